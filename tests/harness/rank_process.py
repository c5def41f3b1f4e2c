"""Run one rank process, from its fork to its end.

A rank runs like a script: its function is the script's body, an exception that escapes goes to ``sys.excepthook``,
non-daemon threads are waited for, ``atexit`` handlers run once, and the exit status is the interpreter's. A process of
``multiprocessing`` does none of that (https://github.com/python/cpython/issues/83856).
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import os
import pickle
import signal
import sys
import threading
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

from tests.harness.network import Host
from tests.harness.outcomes import RankError

_SECONDS_AFTER_LIMIT = 30.0  # until a rank exits, if the test's own process exited
_test: Connection | None = None  # the rank's end of the pipe to the test
_sending = threading.Lock()


def announce(point: str, value: object = None) -> None:
    """On a rank: report to the test that it has reached ``point``; the test calls ``RankProcesses.wait_for``."""
    _send("point", value, point)


def hold(point: str, value: object = None) -> None:
    """On a rank: announce ``point``, and wait there until the test calls ``RankProcesses.release``."""
    announce(point, value)
    assert _test is not None
    _test.recv_bytes()


def run_rank(
    test: Connection,
    rank: int,
    world_size: int,
    call: bytes,
    *,
    place: Host | None,
    environment: dict[str, str],
    cwd: str,
    output: Path,
    time_limit: float,
) -> None:
    """Run the target of a rank's process.

    ``call`` is a pickled ``(function, args, kwargs)``: unpickling it imports the test's module, which must not happen
    before the environment is set and coverage is measured.
    """
    global _test
    _test = test
    gc.freeze()  # what the server has imported: collections would look through it, and copy its pages
    os.setpgid(0, 0)  # so that the rank and what it forks can be ended together
    _write_to(output, time_limit)
    if place is not None:
        place.enter()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    _limit_deadlocks()
    sys.argv = [f"rank-{rank}-is-no-script"]  # never pytest's: a launcher would run all the tests again
    if "coverage" in sys.modules:  # a rank may run no line of the package
        warnings.filterwarnings("ignore", category=sys.modules["coverage"].exceptions.CoverageWarning)
    _end_as_script(_call(rank, world_size, call))


def _limit_deadlocks() -> None:
    """Have ranks compare their calls after this many seconds, so that a run of all tests finds false alarms."""
    seconds = os.environ.get("DDPX_TESTS_DEADLOCK")
    if seconds is not None:
        from lightning_ddp_ext.rendezvous.request import Timeouts

        create = Timeouts.__init__
        Timeouts.__init__ = functools.partialmethod(create, deadlock=float(seconds))  # type: ignore[assignment]


def _send(kind: str, value: object, point: str = "") -> None:
    assert _test is not None, "announce() and hold() work in a rank process only"
    # Not Connection.send(): its pickler passes tensors as file descriptors, which end with this process.
    message = pickle.dumps((kind, value, point))
    with _sending:
        _test.send_bytes(message)


def _write_to(path: Path, time_limit: float) -> None:
    output = os.open(path, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # as on a terminal
        os.dup2(output, stream.fileno())
    faulthandler.enable(output)  # on SIGABRT C code writes the stacks of all threads, without the GIL
    faulthandler.dump_traceback_later(time_limit + _SECONDS_AFTER_LIMIT, file=output, exit=True)


def _call(rank: int, world_size: int, call: bytes) -> int:
    """Run the rank's function; return the interpreter's exit status, which is -SIGINT for a KeyboardInterrupt."""
    try:
        function, args, kwargs = pickle.loads(call)
        _send("result", function(rank, world_size, *args, **kwargs))
    except SystemExit as error:
        status = _status_of(error)
        if status != 0:
            _send("error", RankError.of(error))
        return status
    except BaseException as error:
        _send("error", RankError.of(error))
        sys.last_value = error  # as Python does
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _status_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _end_as_script(status: int) -> None:
    """End this process as the interpreter ends a script, with the first actions of ``Py_FinalizeEx`` in their order."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()  # among them that of multiprocessing, which runs only once
    sys.stdout.flush()
    sys.stderr.flush()
    if status == -signal.SIGINT:  # as the interpreter ends after a KeyboardInterrupt
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(status)
