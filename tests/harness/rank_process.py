"""What happens inside one rank process, from its fork to its end.

A rank lives as a script does: its function is the script's body, an exception that escapes goes to ``sys.excepthook``,
non-daemon threads are waited for, ``atexit`` handlers run once, and the exit status is the interpreter's. A process of
``multiprocessing`` does none of that (https://github.com/python/cpython/issues/83856).
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import itertools
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, Protocol

# On this signal a rank writes the Python stacks of all its threads and dies: both in C, whoever holds the GIL.
STACKS_SIGNAL = signal.SIGRTMIN + 7
_SECONDS_AFTER_LIMIT = 30.0  # when a rank ends itself, should the test's own process be gone


class Place(Protocol):
    """Where a rank runs, such as a host of ``network``: its process enters it before anything else."""

    def enter(self) -> None: ...


@dataclass(frozen=True)
class RankStart:
    """All that a rank process needs to know.

    ``call`` is a pickled ``(function, args, kwargs)``: unpickling it imports the test's module, which must not happen
    before the environment is there and coverage is measured. ``place`` is a pickled ``Place`` or None.
    """

    rank: int
    world_size: int
    call: bytes
    place: bytes
    environment: dict[str, str]
    cwd: str
    output_file: str
    stacks_file: str
    time_limit: float


@dataclass(frozen=True)
class RankError:
    """An exception that escaped from a rank's function, also a ``SystemExit`` whose status is not 0.

    ``at`` is a ``time.monotonic()``, one clock for all processes.
    """

    type_name: str
    message: str
    traceback: str
    pickled: bytes  # with its causes; empty where it cannot be pickled
    at: float

    @classmethod
    def of(cls, error: BaseException) -> RankError:
        text = "".join(traceback.format_exception(error))
        return cls(type(error).__name__, str(error), text, _pickle_with_causes(error), time.monotonic())

    @property
    def exception(self) -> BaseException | None:
        """The exception itself with its chain of causes; None where it cannot be pickled."""
        chain: list[BaseException] = pickle.loads(self.pickled) if self.pickled else []
        for error, cause in itertools.pairwise(chain):
            error.__cause__ = cause
        return chain[0] if chain else None


class _Pipe:
    """The rank's end of the pipe to the test, for any thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, kind: str, value: object, name: str = "") -> None:
        # Not Connection.send(): its pickler passes tensors as file descriptors, which end with this process.
        data = pickle.dumps((kind, name, value))
        with self._lock:
            self._connection.send_bytes(data)

    def wait_for_release(self) -> None:
        self._connection.recv_bytes()


_pipe: _Pipe | None = None


def announce(point: str, value: object = None) -> None:
    """On a rank: tell the test that it has reached ``point``; the test calls ``RankProcesses.wait_for``."""
    assert _pipe is not None, "announce() and hold() work in a rank process only"
    _pipe.send("point", value, point)


def hold(point: str, value: object = None) -> None:
    """On a rank: announce ``point`` and go no further until the test calls ``RankProcesses.release``."""
    announce(point, value)
    assert _pipe is not None
    _pipe.wait_for_release()


def import_package_anew() -> ModuleType:
    """On a rank: the package, imported as in a process that has not done so, whatever the ranks' server has."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_ddp_ext"]:
        del sys.modules[name]
    return importlib.import_module("lightning_ddp_ext")


def run_rank(start: RankStart, connection: Connection) -> None:
    """The target of a rank's process."""
    global _pipe
    _pipe = _Pipe(connection)
    _prepare(start)
    status = _call(start, _pipe)
    _finalize()
    if status == -signal.SIGINT:  # as the interpreter ends after a KeyboardInterrupt
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(status)


def _prepare(start: RankStart) -> None:
    gc.freeze()  # what the server has imported: collections would look through it, and copy its pages
    os.setpgid(0, 0)  # so that the rank and what it forks can be ended together
    _capture_output(start.output_file)
    place: Place | None = pickle.loads(start.place)
    if place is not None:
        place.enter()
    stacks = os.open(start.stacks_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # open until the process ends
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True, chain=True)
    faulthandler.dump_traceback_later(start.time_limit + _SECONDS_AFTER_LIMIT, file=stacks, exit=True)
    os.environ.clear()
    os.environ.update(start.environment)
    sys.argv = [f"rank-{start.rank}-is-no-script"]  # never pytest's: a launcher would run all the tests again
    os.chdir(start.cwd)
    if "coverage" in sys.modules:  # a rank may run no line of the package
        warnings.filterwarnings("ignore", category=sys.modules["coverage"].exceptions.CoverageWarning)


def _capture_output(path: str) -> None:
    captured = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # as on a terminal
    os.dup2(captured, 1)
    os.dup2(captured, 2)
    os.close(captured)


def _call(start: RankStart, pipe: _Pipe) -> int:
    """Run the rank's function; the exit status that the interpreter would give, -SIGINT for a KeyboardInterrupt."""
    try:
        function, args, kwargs = pickle.loads(start.call)
        pipe.send("returned", function(start.rank, start.world_size, *args, **kwargs))
    except SystemExit as error:
        status = _status_of(error)
        if status != 0:
            pipe.send("raised", RankError.of(error))
        return status
    except BaseException as error:
        pipe.send("raised", RankError.of(error))
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _status_of(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def _pickle_with_causes(error: BaseException) -> bytes:
    chain: list[Any] = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    try:
        pickled = pickle.dumps(chain)
        pickle.loads(pickled)
    except Exception:
        return b""
    return pickled


def _finalize() -> None:
    """Do what ``Py_FinalizeEx`` does first, in its order. One handler is multiprocessing's, which runs only once."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
