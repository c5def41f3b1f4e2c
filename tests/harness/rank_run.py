"""One rank process seen from the test: started from the fork server, listened to, ended."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.harness.outcomes import Outcome, RankError
from tests.harness.rank_process import Point, Raised, Returned, Seat, load_exception, occupy

PRELOAD = [
    "torch.distributed",
    "lightning.pytorch",
    "torchmetrics",
    "psutil",
    "pytest",
    "hypothesis",
    "tests.harness.ranks",
]
# Half of what a short run costs a rank; not where coverage is measured, which begins when a rank does.
PACKAGE = "lightning_ddp_ext"
LAST = "tests.harness.preload"

_ROOT = Path(__file__).resolve().parents[2]
_CONTEXT = multiprocessing.get_context("forkserver")
_SERVER_ENVIRONMENT = {
    "COVERAGE_PROCESS_CONFIG": None,  # each rank starts its own coverage
    "COVERAGE_PROCESS_START": None,
    "OMP_NUM_THREADS": "1",  # threads for computing must not exist in a process that forks
    "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])),
}


def start_server() -> None:
    """Start the server that ranks are forked from, unless it runs. Returns at once: it imports in the background."""
    package = [] if measured_coverage() else [PACKAGE]
    _CONTEXT.set_forkserver_preload([*PRELOAD, *package, LAST])
    with _changed_environment(_SERVER_ENVIRONMENT):
        forkserver.ensure_running()


def measured_coverage() -> Any:
    """The ``coverage.Coverage`` that measures this process; ``None`` if nobody does."""
    coverage = sys.modules.get("coverage")
    return coverage.Coverage.current() if coverage else None


@contextlib.contextmanager
def _changed_environment(changes: dict[str, str | None]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    _apply(changes)
    try:
        yield
    finally:
        _apply(before)


def _apply(changes: dict[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@dataclass(eq=False)
class RankRun:
    """One rank process; ``is_silent`` once its end of the pipe is closed."""

    rank: int
    pid: int
    process: ForkServerProcess
    inbox: connection.Connection
    output_file: Path
    stacks_file: Path
    points: list[Point] = field(default_factory=list)
    returned: Returned | None = None
    raised: Raised | None = None
    exit_code: int | None = None
    ended_at: float = 0.0
    is_silent: bool = False

    @classmethod
    def start(cls, seat: Seat) -> RankRun:
        """Start the process; waits for the server to have imported what ranks need."""
        ours, theirs = _CONTEXT.Pipe()
        process = _CONTEXT.Process(target=occupy, args=(seat, theirs), name=f"rank-{seat.rank}")
        with theirs:
            process.start()
        assert process.pid is not None
        return cls(seat.rank, process.pid, process, ours, Path(seat.output_file), Path(seat.stacks_file))

    @property
    def sources(self) -> list[Any]:
        """What to wait on for news of this rank."""
        return [self.process.sentinel] if self.is_silent else [self.process.sentinel, self.inbox]

    def take_in(self, *, has_ended: bool) -> None:
        """Read what the rank has sent; one that has ended had sent it before."""
        while not self.is_silent and self.inbox.poll():
            self._read_one()
        if has_ended:
            self.process.join()
            self.exit_code, self.ended_at = self.process.exitcode, time.monotonic()

    def _read_one(self) -> None:
        try:
            message = pickle.loads(self.inbox.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.is_silent = True
            return
        if isinstance(message, Point):
            self.points.append(message)
        elif isinstance(message, Returned):
            self.returned = message
        else:
            self.raised = message

    def take_point(self, name: str) -> Point | None:
        """The oldest announcement of ``name`` that has not been taken yet."""
        found = next((point for point in self.points if point.name == name), None)
        if found is not None:
            self.points.remove(found)
        return found

    def has_failed(self, expected: int) -> bool:
        """Whether it has ended with another status than expected, or has raised and is about to."""
        if self.exit_code is not None:
            return self.exit_code != expected
        return self.raised is not None and expected == 0

    def order_of_failure(self) -> tuple[bool, float]:
        """Sorts first what came first. A kill precedes: it is never a consequence, and its time is known late."""
        was_killed = self.raised is None and self.exit_code is not None and self.exit_code < 0
        return not was_killed, self.raised.at if self.raised else self.ended_at

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """End the rank and what it has forked."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.signal(signal.SIGKILL)  # it may not lead its group yet

    def output(self) -> str:
        return _read(self.output_file)

    def outcome(self, began: float, *, with_stacks: bool = False) -> Outcome:
        assert self.exit_code is not None, f"rank {self.rank} has not ended"
        return Outcome(
            rank=self.rank,
            pid=self.pid,
            exit_code=self.exit_code,
            result=self.returned.value if self.returned else None,
            error=_error_of(self.raised, began) if self.raised else None,
            output=self.output(),
            seconds=self.ended_at - began,
            stacks=_read(self.stacks_file) if with_stacks else "",
        )

    def close(self) -> None:
        self.inbox.close()
        self.process.close()


def _error_of(raised: Raised, began: float) -> RankError:
    exception = load_exception(raised.pickled)
    return RankError(raised.type_name, raised.message, raised.traceback, exception, raised.at - began)


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
