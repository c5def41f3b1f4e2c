"""How the ranks of a run should have ended after what has happened to one of them."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass

from tests.faults.plan import ON_RANK_ZERO, Injection
from tests.faults.training import STATUS
from tests.harness.outcomes import name_of_status

_STATUS_OF_CULPRIT = {
    "kill": -signal.SIGKILL,
    "stop": -signal.SIGKILL,  # at last
    "vanish": 0,
    "exit": STATUS,
    "raise": 1,
    "term": -signal.SIGTERM,
    "interrupt": -signal.SIGINT,
}


@dataclass(frozen=True)
class Ending:
    """How ranks have ended: exit statuses, as far as known, and what each has written, or all of them together."""

    statuses: dict[int, int]
    stories: dict[int, str]

    def story(self) -> str:
        return "\n".join(dict.fromkeys(self.stories.values()))


def wrong_with(plan: Injection, ending: Ending) -> list[str]:
    """What should be otherwise: who has not said who is to blame, and exit statuses."""
    wrong = []
    for rank, status in ending.statuses.items():
        if status not in expected_statuses(plan, rank):
            wrong.append(f"rank {rank} has ended with {name_of_status(status)}")
    for rank in named_by(plan, ending):
        if not names(plan, rank, ending.stories[rank]):
            wrong.append(f"rank {rank} does not say who is to blame")
    return wrong


def expected_statuses(plan: Injection, rank: int) -> set[int]:
    if plan.kind == "slow":
        return {0}
    if plan.stops_together:
        return {plan.status}
    if rank != plan.culprit or plan.kind == "cut":
        return {0, 1} if plan.is_late else {1}
    if plan.kind == "interrupt" and plan.is_late:
        return {-signal.SIGINT, 1, 130}
    if plan.kind == "interrupt" and plan.hook == "handshake":
        return {1}  # Lightning's, for Ctrl-C in a Trainer
    return {_STATUS_OF_CULPRIT[plan.kind]}


def named_by(plan: Injection, ending: Ending) -> Iterator[int]:
    """The ranks that must say who is to blame: those that a failure of another one has ended."""
    if plan.kind == "slow" or plan.stops_together:
        return
    if (plan.launch, plan.hook, plan.culprit) == ("script", "begin", 0):  # the script had not started the others yet
        return
    for rank in ending.stories:
        status = ending.statuses.get(rank, 0 if plan.is_late else 1)
        if status != 0 and (rank != plan.culprit or plan.kind == "cut"):
            yield rank


def names(plan: Injection, rank: int, story: str) -> bool:
    """Whether a rank's output names the culprit; a culprit that has lost sight of the others names one of those."""
    suspects = [plan.culprit] if rank != plan.culprit else [each for each in range(plan.world_size) if each != rank]
    return any(re.search(pattern, story) for suspect in suspects for pattern in _patterns(plan, suspect))


def _patterns(plan: Injection, suspect: int) -> Iterator[str]:
    yield rf"\brank {suspect} \(host"
    if plan.hook in ON_RANK_ZERO:
        yield rf"\bon rank {suspect} during"  # what rank 0 does for all fails on all
    if plan.is_unmet:
        yield rf"\branks? (\d+, )*{suspect}(, \d+)* of \d+ did not come"
        if suspect == 0:  # where the others have not found its store, or not for long
            yield r"\bfound no rank 0 at \S+ within|\brank 0 (at \S+|or its host) has gone away"
            yield r"\brank 0's process is stopped"
