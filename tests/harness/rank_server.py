"""Start rank processes from a fork server, which imports torch and Lightning once for all of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

from tests.harness.outcomes import Outcome
from tests.harness.rank_process import RankError, RankStart, run_rank

_CONTEXT = multiprocessing.get_context("forkserver")
_ROOT = Path(__file__).resolve().parents[2]
_PRELOAD = ["torch.distributed", "lightning.pytorch", "torchmetrics", "pytest", "hypothesis", "tests.harness.ranks"]
_PACKAGE = "lightning_ddp_ext"  # not where coverage is measured, which begins when a rank does


def start_server() -> None:
    """Start the server unless it runs. Returns at once: it imports in the background."""
    _CONTEXT.set_forkserver_preload([*_PRELOAD, *([] if measured_coverage() else [_PACKAGE])])
    changes = {
        "OMP_NUM_THREADS": "1",  # threads for computing must not exist in a process that forks
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])),
    }
    own_coverage = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_PROCESS")}
    with mock.patch.dict(os.environ, {**own_coverage, **changes}, clear=True):
        forkserver.ensure_running()


def measured_coverage() -> Any:
    """The ``coverage.Coverage`` that measures this process, or None."""
    coverage = sys.modules.get("coverage")
    return coverage.Coverage.current() if coverage else None


class Rank:
    """One rank process as its test sees it."""

    def __init__(self, start: RankStart) -> None:
        self.number = start.rank
        self.points: list[tuple[str, Any]] = []
        self.result: Any = None
        self.error: RankError | None = None
        self.exit_code: int | None = None
        self._ended_at = 0.0
        self._is_silent = False  # its end of the pipe is closed
        self._files = Path(start.output_file), Path(start.stacks_file)
        self.pipe, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=run_rank, args=(start, theirs), name=f"rank-{start.rank}")
        with theirs:
            self.process.start()  # waits for the server to have imported what ranks need
        assert self.process.pid is not None
        self.pid = self.process.pid

    def sources(self) -> list[Any]:
        return [self.process.sentinel] if self._is_silent else [self.process.sentinel, self.pipe]

    def receive(self, *, has_ended: bool) -> None:
        """Read what the rank has sent; one that has ended had sent it before."""
        while not self._is_silent and self.pipe.poll():
            self._receive_one()
        if has_ended:
            self.process.join()
            self.exit_code, self._ended_at = self.process.exitcode, time.monotonic()

    def _receive_one(self) -> None:
        try:
            kind, name, value = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._is_silent = True
            return
        if kind == "point":
            self.points.append((name, value))
        elif kind == "returned":
            self.result = value
        else:
            self.error = value

    def has_failed(self) -> bool:
        return self.error is not None or self.exit_code not in (None, 0)

    def failed_at(self) -> float:
        """When; a kill is never a consequence of other failures, and comes first: its time is known late."""
        if self.error is not None:
            return self.error.at
        return 0.0 if self.exit_code is not None and self.exit_code < 0 else self._ended_at

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def kill_group(self) -> None:
        """End the rank and what it has forked."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.signal(signal.SIGKILL)  # it may not lead its group yet

    def output(self) -> str:
        return _read(self._files[0])

    def outcome(self) -> Outcome:
        assert self.exit_code is not None, f"rank {self.number} has not ended"
        output, stacks = map(_read, self._files)
        return Outcome(self.number, self.pid, self.exit_code, self.result, self.error, output, stacks)

    def close(self) -> None:
        self.pipe.close()
        self.process.close()


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
