"""How a rank ended, and how a failing test tells it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.harness.rank_process import STACKS_SIGNAL, RankError


@dataclass(frozen=True)
class Outcome:
    """How a rank ended.

    ``exit_code`` is negative for a signal; ``result`` is None unless the function returned; ``output`` is what the rank
    wrote to stdout and stderr, in order; ``stacks`` is empty unless the rank was ended at the time limit.
    """

    rank: int
    pid: int
    exit_code: int
    result: Any
    error: RankError | None
    output: str
    stacks: str = ""

    def story(self) -> str:
        """How it ended in one line, its traceback unless that has been printed, its output, and its stacks."""
        error = f"{self.error.type_name}: {self.error.message}, " if self.error else ""
        parts = [f"rank {self.rank} (pid {self.pid}): {error}{name_of_status(self.exit_code)}"]
        if self.error and self.error.traceback not in self.output:
            parts.append(self.error.traceback)
        parts.append(f"--- output of rank {self.rank} ---\n{self.output.rstrip() or '(nothing)'}")
        if self.stacks:
            parts.append(f"--- stacks of rank {self.rank} ---\n{self.stacks}")
        return "\n".join(parts)


class RanksFailed(AssertionError):
    """A rank failed, and the others were ended; ``outcomes`` has those of all, the message begins with the first."""

    def __init__(self, first: Outcome, outcomes: Sequence[Outcome]) -> None:
        others = [outcome.story() for outcome in outcomes if outcome is not first]
        super().__init__("\n\n".join([first.story(), *others]))
        self.outcomes = list(outcomes)


class RanksHung(AssertionError):
    """Ranks had not ended at the time limit, and were ended; ``outcomes`` has those of all, with stacks."""

    def __init__(self, time_limit: float, outcomes: Sequence[Outcome]) -> None:
        stories = (outcome.story() for outcome in outcomes)
        super().__init__("\n\n".join([f"not all ranks had ended after {time_limit} s", *stories]))
        self.outcomes = list(outcomes)


def output_of_all(outcomes: Sequence[Outcome], *, exit_code: int = 0) -> str:
    """What all ranks have written, rank by rank; fails unless each of them has ended with that status."""
    stories = "\n".join(outcome.story() for outcome in outcomes)
    assert [outcome.exit_code for outcome in outcomes] == [exit_code] * len(outcomes), stories
    return "".join(outcome.output for outcome in outcomes)


def name_of_status(exit_code: int) -> str:
    """What an exit status says, such as ``exit status 1`` or ``ended by SIGKILL``."""
    if exit_code >= 0:
        return f"exit status {exit_code}"
    if -exit_code == STACKS_SIGNAL:
        return "ended at the time limit"
    return f"ended by {signal.Signals(-exit_code).name}"
