"""Find in the reports of all ranks which rank is stuck, or that they are in a deadlock.

In a deadlock, ranks made different calls, so none of them can continue. A rank waits
for another one that has not made its call. It can never make it if it is itself waiting
in a call that only ranks of such a circle have not made, or if it has left the
Trainer's run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from lightning_ddp_ext.rank_lists import activities_in_words, grouped, listed, ranks_in_words
from lightning_ddp_ext.rendezvous.peers import PeerEvent, event_of
from lightning_ddp_ext.supervision.flight import Flight
from lightning_ddp_ext.supervision.report import Report, Silence

# Functions whose inputs must have the same number of elements on all ranks.
_OF_SAME_SIZE = ("all_reduce", "broadcast", "reduce")
_COMPUTING = 0.01  # seconds of processor time between two surveys; a thread that waits takes none
_REMEDIES = {
    "property": "read properties that broadcast, such as trainer.log_dir, on every rank",
    "logged values": "log the same values in the same number of steps on every rank",
    "metric": (
        "compute the metric on every rank, and let every rank run the same number of evaluation"
        " steps"
    ),
    "backward": (
        "let every rank run as many backward passes: if a batch has no targets, return a loss that"
        " depends on the model, such as 0 * output.sum(), and use the same callbacks and"
        " accumulate_grad_batches on every rank"
    ),
    "": "make sure that every rank makes the same calls in the same order",
}


@dataclass(frozen=True)
class Findings:
    """The findings on all ranks."""

    reports: list[Report] = field(default_factory=list)
    silences: list[Silence] = field(default_factory=list)

    @property
    def elsewhere(self) -> list[Report]:
        """The reports of ranks that are not waiting for others."""
        return [report for report in self.reports if not report.waits]

    @property
    def diagnosis(self) -> PeerEvent | None:
        """The event of the rank that the others are waiting for.

        ``None`` if it, or every rank, is making progress.
        """
        stalled = [report for report in self.reports if report.makes_no_progress]
        moving = [report for report in self.reports if not report.makes_no_progress]
        if not stalled:
            return None
        longest = max(report.idle for report in stalled)
        # Ranks start to wait at different times, so half of the longest wait suffices.
        if self.silences and all(2 * report.idle > longest for report in moving):
            return event_of("hung", self.silences[0].who, listed(self.silences, separator="; "))
        if moving and all(report.waits for report in stalled):
            return None
        mismatch = mismatch_in(self.reports)
        different = None if mismatch is None else replace(mismatch.event, kind="hung")
        return _absent_from_collective(self.reports) or different or _stuck(stalled)

    def __str__(self) -> str:
        """Return all findings as text, rank by rank."""
        parts = [
            _section(report) for report in sorted(self.reports, key=lambda report: report.who.rank)
        ]
        return "\n\n".join([*map(str, self.silences), *parts])


def _absent_from_collective(reports: Sequence[Report]) -> PeerEvent | None:
    """Return the event of a rank that did not enter an unfinished collective, if any.

    The first unfinished collective of each group is checked, that of the default group
    before the others.
    """
    pending = chain.from_iterable(report.pending for report in reports)
    for flight, number in sorted(pending, key=lambda pair: (pair[0].label, pair[0].group, pair[1])):
        absent = [
            each
            for each in reports
            if flight.is_awaited(number, each.who.rank, each.flight(flight.group))
        ]
        waiting = [
            each for each in reports if flight.group in (its.group for its, _ in each.pending)
        ]
        if absent:
            return _absent(flight.describe(number), absent, waiting)
    return None


def _absent(collective: str, absent: Sequence[Report], waiting: Sequence[Report]) -> PeerEvent:
    # A rank that is not waiting for others is closer to the cause.
    first = min(absent, key=lambda report: (report.waits, report.who.rank))
    seconds = max(report.idle for report in waiting)
    ranks = ranks_in_words(report.who.rank for report in waiting)
    return event_of(
        "hung",
        first.who,
        f"{first.who} never entered {collective}; it is in {_activity(first)}; {ranks} waited for"
        f" it for {seconds:.0f} s",
    )


def _stuck(stalled: Sequence[Report]) -> PeerEvent:
    """Return the event of the rank that the others are assumed to wait for.

    It is a rank that is not waiting itself, if possible.
    """
    inside = [report for report in stalled if not report.is_outside] or list(stalled)
    culprits = [report for report in inside if not report.waits] or inside
    first = max(culprits, key=lambda report: (round(report.idle), -report.who.rank))
    return event_of(
        "hung",
        first.who,
        f"{first.who} has made no progress for {first.idle:.0f} s; it is in {_activity(first)}",
    )


def _activity(report: Report) -> str:
    pending = [flight.describe(number) for flight, number in report.pending]
    return f"{pending[0]}, {report.where}" if pending else report.where


def _section(report: Report) -> str:
    state = f"{report.who}: last progress {report.idle:.1f} s ago, in {_activity(report)}"
    return "\n".join(line for line in (state, report.progress, report.stacks.rstrip()) if line)


# Deadlocks.


@dataclass(frozen=True)
class Deadlock:
    """Ranks that wait for each other in different calls."""

    reports: list[Report]
    calls: dict[int, str]
    """The call of each of these ranks, with file and line."""
    purposes: list[str]
    """The purposes of their collectives."""

    @property
    def event(self) -> PeerEvent:
        """The event that all ranks raise."""
        by_rank: dict[object, str] = {
            report.who: self.calls[report.who.rank] for report in self.reports
        }
        odd = grouped(by_rank)[0][1][0]
        remedy = next(
            remedy
            for purpose, remedy in _REMEDIES.items()
            if purpose in self.purposes or not purpose
        )
        places = activities_in_words(by_rank, "is in")
        return event_of(
            "absent",
            odd,
            f"ranks are waiting for each other in different calls: {places}; {remedy}",
        )

    def persists_in(self, later: Deadlock | None) -> bool:
        """Whether a later survey found the same calls, and no rank was computing."""
        if later is None or self.calls != later.calls:
            return False
        pairs = zip(self.reports, later.reports, strict=True)
        seconds = [new.cpu_seconds - old.cpu_seconds for old, new in pairs if new.is_blocked]
        return max(seconds, default=0.0) < _COMPUTING


def deadlock_in(reports: Sequence[Report]) -> Deadlock | None:
    """Return a deadlock that is certain, if any."""
    return mismatch_in(reports) or _circle_in(reports)


def mismatch_in(reports: Sequence[Report]) -> Deadlock | None:
    """Return ranks that entered different collectives with the same number, if any.

    At least one of them is waiting in its collective.
    """
    for flight, number in chain.from_iterable(report.pending for report in reports):
        others = [(each, each.flight(flight.group)) for each in reports]
        inside = [(each, other) for each, other in others if other and str(number) in other.recent]
        if any(_differ(flight, other, number) for _, other in inside):
            return _mismatch(number, inside)
    return None


def _differ(one: Flight, other: Flight, number: int) -> bool:
    mine = one.collective(number)
    its = other.collective(number)
    is_of_same_size = mine.elements == its.elements or mine.name not in _OF_SAME_SIZE
    return mine.name != its.name or not is_of_same_size


def _mismatch(number: int, inside: Sequence[tuple[Report, Flight]]) -> Deadlock:
    return Deadlock(
        [report for report, _ in inside],
        {report.who.rank: _collective(report, flight, number) for report, flight in inside},
        [flight.collective(number).purpose for _, flight in inside],
    )


def _circle_in(reports: Sequence[Report]) -> Deadlock | None:
    """Return the ranks that wait for each other, or for a rank that has left the run."""
    stuck = [report for report in reports if report.is_blocked or not report.is_in_run]
    while True:
        left = [each for each in stuck if _waits(each, stuck) or _is_missed(each, stuck)]
        if len(left) == len(stuck):
            break
        stuck = left
    if not stuck:
        return None
    purposes = [
        flight.collective(number).purpose for report in stuck for flight, number in report.pending
    ]
    return Deadlock(stuck, {report.who.rank: _call_of(report) for report in stuck}, purposes)


def _waits(report: Report, stuck: Sequence[Report]) -> bool:
    return report.is_blocked and any(_is_waiting_for(report, each) for each in stuck)


def _is_missed(report: Report, stuck: Sequence[Report]) -> bool:
    return not report.is_in_run and any(_is_waiting_for(each, report) for each in stuck)


def _is_waiting_for(report: Report, other: Report) -> bool:
    """Whether a rank waits in a call that another one has not made and cannot make.

    The other one cannot make it if it is blocked, or if it has left that run.
    """
    if not report.is_blocked or not (
        other.is_blocked or (report.is_in_run and other.run >= report.run)
    ):
        return False
    if report.awaited is not None:
        return other.calls < report.awaited.number
    its_rank = other.who.rank
    return any(
        flight.is_awaited(number, its_rank, other.flight(flight.group))
        for flight, number in report.pending
    )


def _call_of(report: Report) -> str:
    """Describe the call that a rank waits in."""
    if report.awaited is not None:
        place = report.awaited.where or report.place
        return f"{report.awaited.what}, {place}"
    calls = [_collective(report, flight, number) for flight, number in report.pending]
    return calls[0] if calls else f"code after the Trainer's run, {report.place}"


def _collective(report: Report, flight: Flight, number: int) -> str:
    return f"{flight.describe(number)}, {flight.collective(number).place or report.place}"
