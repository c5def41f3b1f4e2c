"""Be a rank: what its process does from the fork to its exit, and how its function reports
to the test. ``tests.harness.ranks`` is the test's side.

A rank runs like a script: its function is the script's body, an exception that escapes
goes to ``sys.excepthook``, non-daemon threads are waited for, ``atexit`` handlers run
once, and the exit status is the interpreter's. A process of ``multiprocessing`` does
none of that (https://github.com/python/cpython/issues/83856).
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path

from tests.harness.environment import Host

# The points that a rank announces at its end, with the result or the error of its function.
RESULT = "result of the function"
ERROR = "error of the function"
SECONDS_AFTER_LIMIT = 30.0  # until a rank exits, if the test's own process exited
# Set once, when this process becomes a rank; None in the process of the tests.
_pipe_to_test: connection.Connection | None = None
_sending = threading.Lock()  # several threads of a rank may announce


# For the function of a rank.


def announce(point: str, value: object = None) -> None:
    """On a rank: report to the test that it has reached ``point``; the test calls
    ``RankProcesses.wait_for``.
    """
    # Not Connection.send(): its pickler passes tensors as file descriptors, which end
    # with this process.
    message = pickle.dumps((point, value))
    with _sending:
        _pipe().send_bytes(message)


def hold(point: str, value: object = None) -> None:
    """On a rank: announce ``point``, and wait there until the test calls
    ``RankProcesses.release``.
    """
    announce(point, value)
    _pipe().recv_bytes()


def _pipe() -> connection.Connection:
    assert _pipe_to_test is not None, "announce() and hold() work in a rank process only"
    return _pipe_to_test


# The process.


@dataclass(frozen=True)
class RankError:
    """An exception that escaped from a rank's function, including a ``SystemExit``
    whose status is not 0.

    ``at`` is a ``time.monotonic()``, which is one clock for all processes.
    """

    type_name: str
    message: str
    traceback: str
    pickled: bytes  # the exception and its cause; empty if they cannot be pickled
    at: float

    @classmethod
    def of(cls, error: BaseException) -> RankError:
        text = "".join(traceback.format_exception(error))
        return cls(
            type(error).__name__, str(error), text, _pickle_with_cause(error), time.monotonic()
        )

    @property
    def exception(self) -> BaseException | None:
        """The exception itself with its cause; None if it cannot be pickled."""
        if not self.pickled:
            return None
        error, cause = pickle.loads(self.pickled)
        error.__cause__ = cause
        return error


def _pickle_with_cause(error: BaseException) -> bytes:
    try:
        pickled = pickle.dumps((error, error.__cause__))
        pickle.loads(pickled)
    except Exception:
        return b""
    return pickled


def run_rank(
    pipe_to_test: connection.Connection,
    *,
    rank: int,
    world_size: int,
    call: bytes,
    host: Host | None,
    environment: dict[str, str],
    cwd: str,
    output: Path,
    time_limit: float,
) -> None:
    """Be a rank, from the fork to the exit of its process.

    Args:
        pipe_to_test: for announcements, and for releases from ``hold``.
        rank: the first argument of the function.
        world_size: the second argument.
        call: a pickled ``(function, args, kwargs)``. Unpickling it imports the test's
            module, which must not happen before the environment is set and coverage
            is measured.
        host: the host of the process; None for this machine.
        environment: all of its variables.
        cwd: its working directory.
        output: a named pipe, to which it writes.
        time_limit: seconds of the test; somewhat later a rank that still runs writes
            its stacks and exits.
    """
    global _pipe_to_test
    _pipe_to_test = pipe_to_test
    # Collections would look through what the server has imported, and copy its pages.
    gc.freeze()
    os.setpgid(0, 0)  # so that the rank and what it forks can be ended together
    _write_to(output, time_limit)
    if host is not None:
        host.enter()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    # Never pytest's: a launcher would run all the tests again.
    sys.argv = [f"rank-{rank}-is-no-script"]
    if "coverage" in sys.modules:  # a rank may run no line of the package
        warnings.filterwarnings(
            "ignore", category=sys.modules["coverage"].exceptions.CoverageWarning
        )
    _exit_as_script(_call_function(rank, world_size, call))


def _write_to(path: Path, time_limit: float) -> None:
    output = os.open(path, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        stream.reconfigure(line_buffering=True)  # as on a terminal
        os.dup2(output, stream.fileno())
    # On SIGABRT C code writes the stacks of all threads, without the GIL.
    faulthandler.enable(output)
    faulthandler.dump_traceback_later(time_limit + SECONDS_AFTER_LIMIT, file=output, exit=True)


def _call_function(rank: int, world_size: int, call: bytes) -> int:
    """Run the rank's function; return the interpreter's exit status, which is -SIGINT
    for a KeyboardInterrupt.
    """
    try:
        function, args, kwargs = pickle.loads(call)
        announce(RESULT, function(rank, world_size, *args, **kwargs))
    except SystemExit as error:
        status = _status_of(error)
        if status != 0:
            announce(ERROR, RankError.of(error))
        return status
    except BaseException as error:
        announce(ERROR, RankError.of(error))
        sys.last_value = error  # as Python does
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _status_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _exit_as_script(status: int) -> None:
    """Exit as the interpreter ends a script, with the first actions of
    ``Py_FinalizeEx`` in their order.
    """
    threading._shutdown()
    atexit._run_exitfuncs()  # among them that of multiprocessing, which runs only once
    sys.stdout.flush()
    sys.stderr.flush()
    if status == -signal.SIGINT:  # as the interpreter ends after a KeyboardInterrupt
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(status)
