"""Summarise the reports of all ranks in one sentence: which rank is stuck, and where
the other ranks are waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from lightning_ddp_ext.rank_lists import listed, ranks_in_words
from lightning_ddp_ext.rendezvous.peers import PeerEvent, event_of
from lightning_ddp_ext.supervision.deadlock import mismatch_in
from lightning_ddp_ext.supervision.report import Report, Silence


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
        """The event of the rank that the others are waiting for; ``None`` if it, or
        every rank, is making progress.
        """
        still = [report for report in self.reports if report.is_still]
        moving = [report for report in self.reports if not report.is_still]
        if not still:
            return None
        longest = max(report.idle for report in still)
        # Ranks start to wait at different times, so a rank past half of the longest
        # wait also counts as still.
        if self.silences and all(2 * report.idle > longest for report in moving):
            sentence = listed([*self.silences, *_activities(still)], separator="; ")
            return event_of("hung", self.silences[0].who, sentence)
        if moving and all(report.waits for report in still):
            return None
        mismatch = mismatch_in(self.reports)
        different = None if mismatch is None else replace(mismatch.event, kind="hung")
        return _absent_from_collective(self.reports) or different or _stuck(still)

    def __str__(self) -> str:
        """Return all findings as text, rank by rank."""
        parts = [
            _section(report) for report in sorted(self.reports, key=lambda report: report.who.rank)
        ]
        return "\n\n".join([*map(str, self.silences), *parts])


def _absent_from_collective(reports: Sequence[Report]) -> PeerEvent | None:
    """Return the event of a rank that did not enter the first unfinished collective of
    a group, if any.

    The default group comes first.
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
    others = [report.who.rank for report in absent if report is not first]
    also = f" (nor did {ranks_in_words(others)})" if others else ""
    seconds = max(report.idle for report in waiting)
    who = ranks_in_words(report.who.rank for report in waiting)
    wait = f"{who} {'has' if len(waiting) == 1 else 'have'} waited for it"
    return event_of(
        "hung",
        first.who,
        f"{first.who} never entered {collective}{also}; it is in {_activity(first)}; {wait} for"
        f" {seconds:.0f} s",
    )


def _stuck(still: Sequence[Report]) -> PeerEvent:
    """Return the event of the rank that the others are assumed to wait for: one that is
    not waiting itself, if any.
    """
    inside = [report for report in still if not report.is_outside] or list(still)
    culprits = [report for report in inside if not report.waits] or inside
    first = max(culprits, key=lambda report: (round(report.idle), -report.who.rank))
    finding = (
        f"{first.who} has made no progress for {first.idle:.0f} s; it is in {_activity(first)}"
    )
    others = [report for report in still if report is not first]
    return event_of("hung", first.who, listed([finding, *_activities(others)], separator="; "))


def _activities(still: Sequence[Report]) -> list[str]:
    ordered = sorted(still, key=lambda report: report.who.rank)
    return [
        f"rank {each.who.rank} has been in {_activity(each)} for {each.idle:.0f} s"
        for each in ordered
    ]


def _activity(report: Report) -> str:
    pending = [flight.describe(number) for flight, number in report.pending]
    return f"{pending[0]}, {report.where}" if pending else report.where


def _section(report: Report) -> str:
    state = (
        f"no progress for {report.idle:.1f} s"
        if report.is_still
        else f"last progress {report.idle:.1f} s ago"
    )
    lines = [f"{report.who}: {state}, in {report.where}", report.progress]
    for flight in report.flights:
        pending = (
            "" if flight.pending is None else f", waiting in {flight.describe(flight.pending)}"
        )
        lines.append(f"group {flight.label or 'default'}: entered #{flight.entered}{pending}")
    return "\n".join(line for line in [*lines, report.stacks.rstrip()] if line)
