"""Follow a rank process from its test, and describe how it ended."""

import contextlib
import fcntl
import math
import os
import pickle
import signal
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.rank_process import CONTEXT, Message, RankError, run_rank

_PIPE_SIZE = 1 << 20


@dataclass
class Outcome:
    """How a rank ended.

    ``exit_code`` is negative for a signal, and None while the rank runs; ``result`` is
    None unless the function returned; ``output`` is what the rank wrote to stdout and
    stderr, in order, and the Python stacks of all its threads if it was ended at the
    time limit.
    """

    rank: int
    pid: int
    exit_code: int | None = None
    result: Any = None
    error: RankError | None = None
    output: str = ""

    @property
    def failure(self) -> RankError:
        """The exception that escaped; fails the test without one."""
        assert self.error is not None, self.story()
        return self.error

    @property
    def failed_at(self) -> float:
        """The time of the failure; a kill counts as the earliest, because no other
        failure causes it, and success as the latest.
        """
        if self.error is not None:
            return self.error.at
        return 0.0 if self.exit_code else math.inf

    def story(self) -> str:
        """Return its end in one line, its traceback unless that was printed, and its
        output.
        """
        error = f"{self.error.type_name}: {self.error.message}, " if self.error else ""
        parts = [f"rank {self.rank} (pid {self.pid}): {error}{name_of_status(self.exit_code)}"]
        if self.error and self.error.traceback not in self.output:
            parts.append(self.error.traceback)
        parts.append(f"--- output of rank {self.rank} ---\n{self.output.rstrip() or '(nothing)'}")
        return "\n".join(parts)


def stories(outcomes: Sequence[Outcome]) -> str:
    """Return how each rank ended."""
    return "\n\n".join(outcome.story() for outcome in outcomes)


def output_of_all(outcomes: Sequence[Outcome], *, exit_code: int = 0) -> str:
    """Return the output of all ranks, rank by rank; fail unless each exited with that
    status.
    """
    assert all(outcome.exit_code == exit_code for outcome in outcomes), stories(outcomes)
    return "".join(outcome.output for outcome in outcomes)


def name_of_status(exit_code: int | None) -> str:
    """Return an exit status in words, such as ``exit status 1`` or ``ended by
    SIGKILL``.
    """
    if exit_code is None:
        return "still running"
    return (
        f"exit status {exit_code}"
        if exit_code >= 0
        else f"ended by {signal.Signals(-exit_code).name}"
    )


class Rank:
    """One rank process as its test sees it; ``outcome`` has its end, or its output so
    far.
    """

    def __init__(
        self, number: int, world_size: int, call: bytes, *, output: Path, **settings: Any
    ) -> None:
        os.mkfifo(output)
        self.output = os.open(output, os.O_RDONLY | os.O_NONBLOCK)
        with contextlib.suppress(PermissionError):
            # Users other than root have a limit for all of their pipes.
            fcntl.fcntl(self.output, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        self._written = b""
        self.pipe, pipe_to_test = CONTEXT.Pipe()
        self.process = CONTEXT.Process(
            target=run_rank,
            args=(pipe_to_test, number, world_size, call),
            kwargs={"output": output, **settings},
        )
        with pipe_to_test:
            self.process.start()  # waits for the server to have imported what ranks need
        assert self.process.pid is not None
        self.outcome = Outcome(number, self.process.pid)
        # Announcements that no test has waited for.
        self.points: dict[str, list[Any]] = defaultdict(list)

    @property
    def runs(self) -> bool:
        return self.outcome.exit_code is None

    def receive(self, *, has_exited: bool) -> None:
        """Read the rank's messages and output; those of a rank that exited are
        complete.
        """
        with contextlib.suppress(EOFError, ConnectionResetError):
            while self.pipe.poll():
                self._handle(pickle.loads(self.pipe.recv_bytes()))
        with contextlib.suppress(BlockingIOError):
            while written := os.read(self.output, _PIPE_SIZE):
                self._written += written
        self.outcome.output = self._written.decode(errors="replace")
        if has_exited:
            self.process.join()
            self.outcome.exit_code = self.process.exitcode

    def _handle(self, message: Message) -> None:
        if message.kind == "point":
            self.points[message.point].append(message.value)
        elif message.kind == "result":
            self.outcome.result = message.value
        else:
            self.outcome.error = message.value

    def end_with_stacks(self) -> None:
        """Have the rank and the processes that it started write their stacks and exit."""
        self.signal_group(signal.SIGABRT)
        self.signal_group(signal.SIGCONT)  # a stopped rank does not handle other signals

    def signal_group(self, number: int) -> None:
        """Send a signal to the rank and the processes that it forked."""
        try:
            os.killpg(self.outcome.pid, number)
        except ProcessLookupError:  # it does not lead its group yet
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.outcome.pid, number)

    def close(self) -> None:
        os.close(self.output)
        self.pipe.close()
        self.process.close()
