"""Find ranks that wait for each other in different calls, from the reports of all ranks.

In a deadlock, ranks made different calls, so none of them can continue. A rank that
waits in a call needs all ranks that have not made this call. One of them never will if
it waits in another call for a rank that never will.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lightning_ddp_ext.rank_lists import activities_in_words, grouped
from lightning_ddp_ext.rendezvous.named_barrier import SAME_CALLS, remedies_of
from lightning_ddp_ext.rendezvous.peers import PeerEvent, event_of
from lightning_ddp_ext.rendezvous.request import RankInfo
from lightning_ddp_ext.supervision.flight_recorder import Collective, GroupProgress
from lightning_ddp_ext.supervision.report import Report

# Functions whose inputs must have the same number of elements on all ranks.
_OF_SAME_SIZE = ("all_reduce", "broadcast", "reduce")
_COMPUTING = 0.01  # seconds of processor time between two surveys; a thread that waits takes none


@dataclass(frozen=True)
class Deadlock:
    """Ranks that wait for each other in different calls.

    Attributes:
        reports: the reports of these ranks, in the order of ranks.
        calls: the call of each of these ranks, in this order, with file and line.
    """

    reports: list[Report]
    calls: dict[RankInfo, str]

    @property
    def event(self) -> PeerEvent:
        """The event that all ranks raise; it accuses a rank that is in the rarest call."""
        _, ranks_in_rarest_call = grouped(self.calls)[0]
        accused = ranks_in_rarest_call[0]
        activities = activities_in_words(self.calls, "is in")
        remedies = self._remedies()
        return event_of(
            "absent",
            accused,
            f"ranks are waiting for each other in different calls: {activities}; {remedies}",
        )

    def _remedies(self) -> str:
        awaited = [report.awaited for report in self.reports if report.awaited is not None]
        return "; ".join(remedies_of(awaited)) or SAME_CALLS

    def persists_in(self, later: Deadlock | None) -> bool:
        """Whether a later survey found the same calls, with no blocked rank computing since."""
        if later is None or self.calls != later.calls:
            return False
        pairs = zip(self.reports, later.reports, strict=True)  # of the same ranks as in calls
        seconds = [new.cpu_seconds - old.cpu_seconds for old, new in pairs if new.is_blocked]
        return max(seconds, default=0.0) < _COMPUTING


def deadlock_in(reports: Sequence[Report]) -> Deadlock | None:
    """Return a deadlock that is certain, if any."""
    return mismatch_in(reports) or _circular_wait_in(reports)


@dataclass(frozen=True)
class _Entered:
    """A collective that a rank has entered."""

    report: Report
    progress: GroupProgress
    number: int

    @property
    def collective(self) -> Collective:
        return self.progress.collective(self.number)

    def __str__(self) -> str:
        place = self.collective.place or self.report.place
        return f"{self.progress.describe(self.number)}, {place}"


# Ranks in different collectives of the same group.


def mismatch_in(reports: Sequence[Report]) -> Deadlock | None:
    """Return ranks that entered different collectives with the same number, if any.

    At least one of them is waiting in its collective.
    """
    for waiting in _pending_in(reports):
        entered = _entered_by_ranks(reports, waiting.progress.group, waiting.number)
        if any(_differ(waiting.collective, other.collective) for other in entered):
            return Deadlock(
                [each.report for each in entered],
                {each.report.who: str(each) for each in entered},
            )
    return None


def _pending_in(reports: Sequence[Report]) -> list[_Entered]:
    return [
        _Entered(report, progress, progress.pending)
        for report in reports
        for progress in report.unfinished
    ]


def _entered_by_ranks(reports: Sequence[Report], group: str, number: int) -> list[_Entered]:
    """Return a collective of a group as each rank entered it."""
    entered = []
    for report in reports:
        progress = report.progress_in(group)
        if progress is not None and progress.has_entered(number):
            entered.append(_Entered(report, progress, number))
    return entered


def _differ(one: Collective, other: Collective) -> bool:
    is_of_same_size = one.elements == other.elements or one.name not in _OF_SAME_SIZE
    return one.name != other.name or not is_of_same_size


# Ranks that wait for each other.


def _circular_wait_in(reports: Sequence[Report]) -> Deadlock | None:
    """Return the blocked ranks that wait for each other, if any.

    For example, rank 0 waits in an ``all_reduce`` that rank 1 has not entered, and rank
    1 in a named barrier that rank 0 has not entered. If rank 1 were computing, rank 0
    could continue later.
    """
    blocked = [report for report in reports if report.is_blocked]
    stuck = _waiting_for_each_other(blocked)
    # A rank that turns out not to be stuck may make the call that others wait for.
    while len(stuck) < len(blocked):
        blocked = stuck
        stuck = _waiting_for_each_other(blocked)
    if not stuck:
        return None
    return Deadlock(stuck, {report.who: _call_of(report) for report in stuck})


def _waiting_for_each_other(reports: Sequence[Report]) -> list[Report]:
    return [report for report in reports if _waits_for_any(report, reports)]


def _waits_for_any(report: Report, others: Collection[Report]) -> bool:
    """Whether a rank waits in a call that one of the others has not made."""
    if report.awaited is not None:
        return any(other.calls_made < report.awaited.number for other in others)
    return any(other.is_missing_in(progress) for progress in report.unfinished for other in others)


def _call_of(report: Report) -> str:
    """Describe the call that a rank waits in."""
    if report.awaited is not None:
        return f"{report.awaited.what}, {report.awaited.where or report.place}"
    return str(_pending_in([report])[0])
