"""Describe how a rank process ended."""

import math
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.harness.rank_process import RankError


@dataclass
class Outcome:
    """How a rank ended.

    Attributes:
        rank: its number.
        pid: its process.
        exit_code: negative for a signal; None while the rank runs.
        result: the function's; None unless the function returned.
        error: the exception that escaped from the function, if any.
        output: what the rank wrote to stdout and stderr, in order. If the rank was
            ended at the time limit, this includes the Python stacks of its threads.
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
        """Return a text for a failing test: one line about the end, the traceback unless
        it was printed, and the output.
        """
        error = f"{self.error.type_name}: {self.error.message}, " if self.error else ""
        parts = [f"rank {self.rank} (pid {self.pid}): {error}{_in_words(self.exit_code)}"]
        if self.error and self.error.traceback not in self.output:
            parts.append(self.error.traceback)
        parts.append(f"--- output of rank {self.rank} ---\n{self.output.rstrip() or '(nothing)'}")
        return "\n".join(parts)


def _in_words(exit_code: int | None) -> str:
    if exit_code is None:
        return "still running"
    if exit_code < 0:
        return f"ended by {signal.Signals(-exit_code).name}"
    return f"exit status {exit_code}"


def stories(outcomes: Sequence[Outcome]) -> str:
    """Return the stories of these ranks, one after another."""
    return "\n\n".join(outcome.story() for outcome in outcomes)


def output_of_all(outcomes: Sequence[Outcome], *, exit_code: int = 0) -> str:
    """Return the output of all ranks, rank by rank; fail unless each exited with that
    status.
    """
    assert all(outcome.exit_code == exit_code for outcome in outcomes), stories(outcomes)
    return "".join(outcome.output for outcome in outcomes)
