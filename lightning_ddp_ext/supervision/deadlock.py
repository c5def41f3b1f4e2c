"""Find a deadlock in the reports of ranks that wait: ranks made different calls, so
none of them can continue.

A rank waits for another one that has not made its call. It can never make it if it is
itself waiting in a call that only ranks of such a circle have not made, or if it has
left the Trainer's run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from lightning_ddp_ext.rank_lists import activities_in_words, grouped
from lightning_ddp_ext.rendezvous.peers import PeerEvent, event_of
from lightning_ddp_ext.supervision.flight import Flight
from lightning_ddp_ext.supervision.report import Report

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
        """Whether a later survey found the same ranks in the same calls, and none of
        them was computing.
        """
        if later is None or self.calls != later.calls:
            return False
        pairs = zip(self.reports, later.reports, strict=True)
        seconds = [new.cpu_seconds - old.cpu_seconds for old, new in pairs if new.is_blocked]
        return max(seconds, default=0.0) < _COMPUTING


def deadlock_in(reports: Sequence[Report]) -> Deadlock | None:
    """Return a deadlock that is certain, if any."""
    return mismatch_in(reports) or _circle_in(reports)


def mismatch_in(reports: Sequence[Report]) -> Deadlock | None:
    """Return the ranks that entered different collectives with the same number, while
    one of them waits in it.
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
    """Whether a rank waits in a call that another one has not made, and that it cannot
    make in another run.
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
