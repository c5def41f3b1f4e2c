"""Summarise the reports of all ranks in one sentence: which rank is stuck, and where the other ranks are waiting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_ddp_ext.rank_lists import activities_in_words, listed, ranks_in_words
from lightning_ddp_ext.rendezvous.named_barrier import Call
from lightning_ddp_ext.rendezvous.peers import PeerEvent, event_of
from lightning_ddp_ext.rendezvous.request import RankInfo
from lightning_ddp_ext.supervision.flight import Flight


@dataclass(frozen=True)
class Report:
    """A rank's report about itself."""

    who: RankInfo
    idle: float = 0.0
    """Seconds since its last progress."""
    is_still: bool = False
    """Whether ``idle`` exceeds the timeout, or the rank has left the watched code."""
    doing: str = ""
    """The activity of its main thread, such as ``train_dataloader_next``."""
    place: str = ""
    """File and line in the user's code."""
    is_waiting: bool = False
    """Whether its main thread is waiting for other ranks, in a collective or elsewhere."""
    is_outside: bool = False
    """Whether it has left the watched code, so it may no longer need the other ranks."""
    progress: str = ""
    """Its progress: epoch, step, batch."""
    flights: list[Flight] = field(default_factory=list)
    """Its collectives, as far as torch records them."""
    stacks: str = ""
    is_blocked: bool = False
    """Whether its main thread cannot continue before other ranks make the calls that it waits in."""
    cpu_seconds: float = 0.0
    """The processor time of its main thread."""
    calls: int = 0
    """The number of calls of named barriers that it has started."""
    awaited: Call | None = None
    """The call of a named barrier that it waits in."""
    run: int = 0
    """The ordinal of its Trainer's run, or of the last one."""
    is_in_run: bool = True
    """Whether that run is under way."""
    has_timed_out: bool = False
    """Whether it has waited in a collective for the timeout."""

    @property
    def where(self) -> str:
        """Its activity, with file and line."""
        return f"{self.doing}, {self.place}" if self.place else self.doing

    @property
    def waits(self) -> bool:
        """Whether another rank may be the reason why it is making no progress."""
        return self.is_waiting or any(flight.pending is not None for flight in self.flights)

    @classmethod
    def of(cls, values: dict[str, Any]) -> Report:
        """Restore a report from the result of ``dataclasses.asdict``."""
        flights = [Flight.of(flight) for flight in values["flights"]]
        awaited = values["awaited"] and Call(**values["awaited"])
        return cls(**{**values, "who": RankInfo(**values["who"]), "flights": flights, "awaited": awaited})


@dataclass(frozen=True)
class Silence:
    """A rank that did not reply."""

    who: RankInfo
    seconds: float
    is_stopped: bool = False

    def __str__(self) -> str:
        stopped = ", and its process is stopped (SIGSTOP)" if self.is_stopped else ""
        return f"{self.who} has not answered for {self.seconds:.0f} s{stopped}"


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
        """The event of the rank that the others are waiting for; ``None`` if it, or every rank, is making progress."""
        still = [report for report in self.reports if report.is_still]
        moving = [report for report in self.reports if not report.is_still]
        if not still:
            return None
        longest = max(report.idle for report in still)
        # Ranks start to wait at different times, so a rank past half of the longest wait also counts as still.
        if self.silences and all(2 * report.idle > longest for report in moving):
            sentence = listed([*self.silences, *_activities(still)], separator="; ")
            return event_of("hung", self.silences[0].who, sentence)
        if moving and all(report.waits for report in still):
            return None
        return _in_collectives(self.reports) or _stuck(still)

    def __str__(self) -> str:
        """Return all findings as text, rank by rank."""
        parts = [_section(report) for report in sorted(self.reports, key=lambda report: report.who.rank)]
        return "\n\n".join([*map(str, self.silences), *parts])


def _in_collectives(reports: Sequence[Report]) -> PeerEvent | None:
    """Return the event found from the first unfinished collective of a group; the default group comes first."""
    first: dict[tuple[bool, str], int] = {}
    for report in reports:
        for flight in report.flights:
            if flight.pending is not None:
                group = (bool(flight.label), flight.group)  # labelled groups contain only some ranks
                first[group] = min(flight.pending, first.get(group, flight.pending))
    found = (_in_collective(*group, number, reports) for group, number in sorted(first.items()))
    return next((diagnosis for diagnosis in found if diagnosis is not None), None)


def _in_collective(is_for_some: bool, group: str, number: int, reports: Sequence[Report]) -> PeerEvent | None:
    """Return the event of a rank that did not enter a collective, or entered another one with the same number."""
    inside, absent = [], []
    for report in reports:
        flight = next((each for each in report.flights if each.group == group), None)
        if flight is not None and flight.entered >= number:
            inside.append((report, flight))
        elif flight is not None or not is_for_some:
            absent.append(report)
    collective = inside[0][1].describe(number)
    if absent:
        return _absent(collective, absent, [report for report, flight in inside if flight.pending])
    entered = {flight.describe(number) for _, flight in inside if str(number) in flight.recent}
    return _mismatched(number, inside) if len(entered) > 1 else None


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
        f"{first.who} never entered {collective}{also}; it is in {_activity(first)}; {wait} for {seconds:.0f} s",
    )


def _mismatched(number: int, inside: Sequence[tuple[Report, Flight]]) -> PeerEvent:
    calls = {report.who: flight.describe(number) for report, flight in inside}
    frequency = Counter(calls.values())
    odd = min(calls, key=lambda who: (frequency[calls[who]], -who.rank))
    places = activities_in_words({report.who: f"{calls[report.who]}, {report.where}" for report, _ in inside}, "in")
    remedy = "make sure that every rank makes the same calls"
    return event_of("hung", odd, f"ranks are in different collectives: {places}; {remedy}")


def _stuck(still: Sequence[Report]) -> PeerEvent:
    """Return the event of the rank that the others are assumed to wait for: one that is not waiting itself, if any."""
    inside = [report for report in still if not report.is_outside] or list(still)
    culprits = [report for report in inside if not report.waits] or inside
    first = max(culprits, key=lambda report: (round(report.idle), -report.who.rank))
    finding = f"{first.who} has made no progress for {first.idle:.0f} s; it is in {_activity(first)}"
    others = [report for report in still if report is not first]
    return event_of("hung", first.who, listed([finding, *_activities(others)], separator="; "))


def _activities(still: Sequence[Report]) -> list[str]:
    ordered = sorted(still, key=lambda report: report.who.rank)
    return [f"rank {each.who.rank} has been in {_activity(each)} for {each.idle:.0f} s" for each in ordered]


def _activity(report: Report) -> str:
    pending = [flight.describe(flight.pending) for flight in report.flights if flight.pending is not None]
    return f"{pending[0]}, {report.where}" if pending else report.where


def _section(report: Report) -> str:
    state = f"no progress for {report.idle:.1f} s" if report.is_still else f"last progress {report.idle:.1f} s ago"
    lines = [f"{report.who}: {state}, in {report.where}", report.progress]
    for flight in report.flights:
        pending = "" if flight.pending is None else f", waiting in {flight.describe(flight.pending)}"
        lines.append(f"group {flight.label or 'default'}: entered #{flight.entered}{pending}")
    return "\n".join(line for line in [*lines, report.stacks.rstrip()] if line)
