"""How a rank of the harness ended, and how a test's failure tells it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.harness.rank_process import STACKS_SIGNAL


@dataclass(frozen=True)
class RankError:
    """The exception that escaped from a rank's function; also a ``SystemExit`` whose status is not 0.

    ``exception`` is the object itself with its ``__cause__`` chain, or None where it cannot be pickled. ``seconds``
    count from the start of the ranks.
    """

    type_name: str
    message: str
    traceback: str
    exception: BaseException | None
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """How a rank ended.

    ``exit_code`` is negative for a signal; ``result`` is None unless the function returned; ``output`` is what the rank
    wrote to stdout and stderr, in order; ``seconds`` go from the start of the ranks to this one's end; ``stacks`` is
    empty unless the rank was ended at the time limit.
    """

    rank: int
    pid: int
    exit_code: int
    result: Any
    error: RankError | None
    output: str
    seconds: float
    stacks: str = ""

    def describe(self) -> str:
        """One line, such as ``rank 1 (pid 4242): ValueError: no such layer, exit status 1, after 0.12 s``."""
        cause = f"{self.error.type_name}: {self.error.message}, " if self.error else ""
        return f"rank {self.rank} (pid {self.pid}): {cause}{name_of_status(self.exit_code)}, after {self.seconds:.2f} s"

    def story(self) -> str:
        """The line of ``describe``, the traceback unless it has been printed, and the output."""
        trace = self.error.traceback if self.error and self.error.traceback not in self.output else ""
        return f"{self.describe()}\n{trace}{_section(f'output of rank {self.rank}', self.output)}"


class RanksFailed(AssertionError):
    """A rank did not end as expected; ``outcome`` is that of the first one, ``outcomes`` has those of all."""

    def __init__(self, outcome: Outcome, outcomes: Sequence[Outcome]) -> None:
        others = "\n".join(other.describe() for other in outcomes if other is not outcome)
        title = "the other ranks, ended by the harness where they had not ended"
        super().__init__(f"{outcome.story()}\n{_section(title, others)}")
        self.outcome = outcome
        self.outcomes = list(outcomes)


class RanksHung(AssertionError):
    """Ranks had not ended at the time limit, and were ended; ``outcomes`` has those of all, with stacks."""

    def __init__(self, time_limit: float, outcomes: Sequence[Outcome]) -> None:
        stories = (f"{one.story()}\n{_section(f'stacks of rank {one.rank}', one.stacks)}" for one in outcomes)
        super().__init__("\n".join([f"not all ranks had ended after {time_limit} s", *stories]))
        self.outcomes = list(outcomes)


def name_of_status(exit_code: int) -> str:
    """What an exit status says, such as ``exit status 1`` or ``ended by SIGKILL``."""
    if exit_code >= 0:
        return f"exit status {exit_code}"
    if -exit_code == STACKS_SIGNAL:
        return "ended at the time limit"
    known = {number.value: number.name for number in signal.Signals}
    return f"ended by {known.get(-exit_code, f'signal {-exit_code}')}"


def _section(title: str, text: str) -> str:
    return f"--- {title} ---\n{text.rstrip() or '(nothing)'}\n"
