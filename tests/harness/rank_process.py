"""What happens inside one rank process of the harness, from its fork to its end.

The life of a rank is that of a script: its function is the script's body, an exception that escapes goes to
``sys.excepthook``, non-daemon threads are waited for, ``atexit`` handlers run once, and the exit status is what the
interpreter would give. A process of ``multiprocessing`` does none of that by itself: in Python 3.11 it prints the
traceback on its own and leaves by ``os._exit`` without an ``atexit`` handler
(https://github.com/python/cpython/issues/83856).
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

# A rank that gets this signal writes the Python stacks of all its threads and dies: both in C, whoever holds the GIL.
STACKS_SIGNAL = signal.SIGRTMIN + 7
# Seconds after its time limit when a rank ends itself, for the case that the test's own process is gone by then.
ORPHAN_GRACE = 30.0


class Place(Protocol):
    """Where a rank runs, such as a host of ``network``: its process enters it before anything else."""

    def enter(self) -> None: ...


@dataclass(frozen=True)
class Seat:
    """All that a rank process needs to know.

    ``call`` is a pickled ``(function, args, kwargs)``: unpickling it imports the test's module and what that imports,
    which must not happen before the environment is there and coverage is measured. ``place`` is a pickled ``Place`` or
    None.
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
class Point:
    """The rank has reached a named point."""

    name: str
    value: Any


@dataclass(frozen=True)
class Returned:
    """The rank's function has returned ``value``."""

    value: Any


@dataclass(frozen=True)
class Raised:
    """An exception has escaped from the rank's function, ``at`` a ``time.monotonic()``: one clock for all processes.

    ``pickled`` is the exception with its ``__cause__`` chain, or empty where it cannot be pickled.
    """

    type_name: str
    message: str
    traceback: str
    pickled: bytes
    at: float


class _Link:
    """The rank's end of the pipe to the test; one thread at a time may write to it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: Point | Returned | Raised) -> None:
        # Not Connection.send(): its pickler passes tensors as file descriptors, which end with this process.
        data = pickle.dumps(message)
        with self._lock:
            self._connection.send_bytes(data)

    def wait_for_release(self) -> None:
        self._connection.recv_bytes()


_link: _Link | None = None


def import_package_anew() -> ModuleType:
    """On a rank: the package, imported as in a process that has not done so, whatever the ranks' server has."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning_ddp_ext"]:
        del sys.modules[name]
    return importlib.import_module("lightning_ddp_ext")


def announce(point: str, value: object = None) -> None:
    """Tell the test that this rank has reached ``point``; it waits with ``RankProcesses.wait_for``. For any thread."""
    _our_link().send(Point(point, value))


def hold(point: str, value: object = None) -> None:
    """Announce ``point`` and go no further until the test calls ``RankProcesses.release`` for this rank."""
    announce(point, value)
    _our_link().wait_for_release()


def occupy(seat: Seat, connection: Connection) -> None:
    """Live the life of one rank; the target of its process."""
    global _link
    _link = _Link(connection)
    _settle_in(seat)
    status = _call(seat, _link)
    _run_exit_handlers()
    if status == -signal.SIGINT:  # as the interpreter ends after a KeyboardInterrupt
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.exit(status)


def load_exception(pickled: bytes) -> BaseException | None:
    """The exception in ``pickled``, with its causes linked again; None if there is none."""
    chain: list[BaseException] = pickle.loads(pickled) if pickled else []
    for error, cause in itertools.pairwise(chain):
        error.__cause__ = cause
    return chain[0] if chain else None


def _our_link() -> _Link:
    if _link is None:
        raise RuntimeError("announce() and hold() work in a rank process only, and this is none")
    return _link


def _settle_in(seat: Seat) -> None:
    gc.freeze()  # what it was born with need not be looked through each time that it collects its garbage
    os.setpgid(0, 0)  # so that the rank and what it forks can be ended together
    _capture_output(seat.output_file)
    place: Place | None = pickle.loads(seat.place)
    if place is not None:
        place.enter()
    _prepare_stacks(seat)
    os.environ.clear()
    os.environ.update(seat.environment)
    sys.argv = [f"rank-{seat.rank}-is-no-script"]  # never pytest's: a launcher would run all the tests again
    os.chdir(seat.cwd)
    _silence_coverage()


def _capture_output(path: str) -> None:
    captured = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # as on a terminal
    os.dup2(captured, 1)
    os.dup2(captured, 2)
    os.close(captured)


def _prepare_stacks(seat: Seat) -> None:
    stacks = os.open(seat.stacks_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # open until the process ends
    faulthandler.register(STACKS_SIGNAL, file=stacks, all_threads=True, chain=True)
    faulthandler.dump_traceback_later(seat.time_limit + ORPHAN_GRACE, file=stacks, exit=True)


def _silence_coverage() -> None:
    """Keep out of a rank's output that it has run no line of the package."""
    coverage = sys.modules.get("coverage")
    if coverage is not None:
        warnings.filterwarnings("ignore", category=coverage.exceptions.CoverageWarning)


def _call(seat: Seat, link: _Link) -> int:
    """Run the rank's function; the exit status that the interpreter would give, -SIGINT for a KeyboardInterrupt."""
    try:
        function, args, kwargs = pickle.loads(seat.call)
        link.send(Returned(function(seat.rank, seat.world_size, *args, **kwargs)))
    except SystemExit as error:
        status = _status_of(error)
        if status != 0:
            link.send(_report(error))
        return status
    except BaseException as error:
        link.send(_report(error))
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _status_of(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return 1


def _report(error: BaseException) -> Raised:
    at = time.monotonic()
    text = "".join(traceback.format_exception(error))
    return Raised(type(error).__name__, str(error), text, _pickle_exception(error), at)


def _pickle_exception(error: BaseException) -> bytes:
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    try:
        pickled = pickle.dumps(chain)
        pickle.loads(pickled)
    except Exception:
        return b""
    return pickled


def _run_exit_handlers() -> None:
    """Do what ``Py_FinalizeEx`` does first, in its order. One handler is multiprocessing's, which runs only once."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
