"""Start rank processes from a fork server, which imports torch and Lightning once for all of them."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import pickle
import signal
import sys
from collections import defaultdict
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

from tests.harness.outcomes import Outcome
from tests.harness.processes import PIPE_SIZE
from tests.harness.rank_process import run_rank

_CONTEXT = multiprocessing.get_context("forkserver")
_ROOT = Path(__file__).resolve().parents[2]
_PRELOAD = ["tests.harness.preload"]
_PACKAGE = "lightning_ddp_ext"  # not where coverage is measured, which begins when a rank does


def start_server() -> None:
    """Start the server unless it runs, without waiting: it imports in the background."""
    _CONTEXT.set_forkserver_preload([*_PRELOAD, *([] if measured_coverage() else [_PACKAGE])])
    changes = {
        "OMP_NUM_THREADS": "1",  # threads for computing must not exist in a process that forks
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")])),
    }
    own_coverage = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_PROCESS")}
    with mock.patch.dict(os.environ, {**own_coverage, **changes}, clear=True):
        forkserver.ensure_running()


def measured_coverage() -> Any:
    """Return the ``coverage.Coverage`` that measures this process, or None."""
    coverage = sys.modules.get("coverage")
    return coverage.Coverage.current() if coverage else None


class Rank:
    """One rank process as its test sees it; ``outcome`` has its end, or its output so far."""

    def __init__(self, number: int, world_size: int, call: bytes, *, output: Path, **settings: Any) -> None:
        os.mkfifo(output)
        self.output = os.open(output, os.O_RDONLY | os.O_NONBLOCK)
        with contextlib.suppress(PermissionError):  # users other than root have a limit for all of their pipes
            fcntl.fcntl(self.output, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        self._written = b""
        self.pipe, theirs = _CONTEXT.Pipe()
        arguments = (theirs, number, world_size, call)
        self.process = _CONTEXT.Process(target=run_rank, args=arguments, kwargs={"output": output, **settings})
        with theirs:
            self.process.start()  # waits for the server to have imported what ranks need
        assert self.process.pid is not None
        self.outcome = Outcome(number, self.process.pid)
        self.points: dict[str, list[Any]] = defaultdict(list)  # announcements that no test has waited for

    @property
    def runs(self) -> bool:
        return self.outcome.exit_code is None

    @property
    def has_failed(self) -> bool:
        return self.outcome.error is not None or self.outcome.exit_code not in (None, 0)

    @property
    def failed_at(self) -> float:
        """The time of the failure; a kill counts as the earliest, because no other failure causes it."""
        return self.outcome.error.at if self.outcome.error else 0.0

    def receive(self, *, has_ended: bool) -> None:
        """Read the rank's messages and output; those of a rank that exited are complete."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            while self.pipe.poll():
                kind, value, point = pickle.loads(self.pipe.recv_bytes())
                if kind == "point":
                    self.points[point].append(value)
                else:
                    setattr(self.outcome, kind, value)
        with contextlib.suppress(BlockingIOError):
            while written := os.read(self.output, PIPE_SIZE):
                self._written += written
        self.outcome.output = self._written.decode(errors="replace")
        if has_ended:
            self.process.join()
            self.outcome.exit_code = self.process.exitcode

    def end_with_stacks(self) -> None:
        """Have the rank and the processes that it started write their stacks and exit."""
        for number in (signal.SIGABRT, signal.SIGCONT):  # a stopped rank does not handle other signals
            self.signal_group(number)

    def kill_group(self) -> None:
        """Kill the rank and the processes that it forked."""
        self.signal_group(signal.SIGKILL)

    def signal_group(self, number: int) -> None:
        try:
            os.killpg(self.outcome.pid, number)
        except ProcessLookupError:  # it does not lead its group yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.outcome.pid, number)

    def close(self) -> None:
        os.close(self.output)
        self.pipe.close()
        self.process.close()
