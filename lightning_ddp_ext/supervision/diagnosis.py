"""Find the rank that others wait for, from the reports of all ranks.

``survey`` chooses the rule by the kind of survey. For a watchdog,
``Findings.stuck_rank`` applies the first of these rules that fits:

=====================================================  ================================
Findings                                               Result
=====================================================  ================================
every rank makes progress                              none
a rank does not reply, and no other one moved lately   the rank that does not reply
some ranks make progress, and the others wait          none, as those should arrive
ranks wait in a collective that another never entered  a rank that never entered it
ranks entered different collectives                    one in the rarest of these
other                                                  the rank with the longest wait,
                                                       if possible in its own code
=====================================================  ================================
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lightning_ddp_ext.rank_lists import listed, ranks_in_words
from lightning_ddp_ext.rendezvous.peers import PeerEvent, event_of
from lightning_ddp_ext.rendezvous.request import RankInfo
from lightning_ddp_ext.supervision.deadlock import mismatch_in
from lightning_ddp_ext.supervision.flight_recorder import GroupProgress
from lightning_ddp_ext.supervision.report import Report

_REMEDY = (
    "make sure that every rank makes the same calls; if one takes longer, pass a longer timeout to"
    " the strategy"
)


@dataclass(frozen=True)
class Findings:
    """The findings of a survey on all ranks.

    Attributes:
        reports: the replies.
        silent: the ranks that did not reply.
    """

    reports: list[Report] = field(default_factory=list)
    silent: list[RankInfo] = field(default_factory=list)

    @property
    def elsewhere(self) -> list[Report]:
        """The reports of ranks that are not waiting for others."""
        return [report for report in self.reports if not report.waits]

    def silent_rank(self, wait: str) -> PeerEvent | None:
        """Return the event of a rank that did not reply, if any.

        ``wait`` is the part of the message about the rank that has waited.
        """
        if not self.silent:
            return None
        silence = listed(self._silence, separator="; ")
        return event_of("hung", self.silent[0], f"{silence}; {wait}")

    def rank_outside_collective(self, wait: str) -> PeerEvent | None:
        """Return the event of a rank that others wait for in a collective, if any.

        It entered another collective, or is not waiting while others time out. ``wait``
        is the part of the message about the rank that has waited.
        """
        mismatch = mismatch_in(self.reports)
        if mismatch is not None:
            return mismatch.event
        elsewhere = self.elsewhere
        has_timed_out = any(report.waits and report.has_timed_out for report in self.reports)
        if not elsewhere or not has_timed_out:
            return None
        places = listed(
            (f"{report.who} is in {report.place or 'library code'}" for report in elsewhere),
            separator=" and ",
        )
        return event_of("absent", elsewhere[0].who, f"{wait}, but {places}; {_REMEDY}")

    @property
    def stuck_rank(self) -> PeerEvent | None:
        """The event of the rank that ranks without progress wait for; see the module.

        ``None`` if that rank, or every rank, makes progress.
        """
        stalled = [report for report in self.reports if report.makes_no_progress]
        moving = [report for report in self.reports if not report.makes_no_progress]
        if not stalled:
            return None
        # Ranks start to wait at different times, so a rank that last moved in the first half
        # of the longest wait may also be waiting.
        half_wait = max(report.idle for report in stalled) / 2
        if self.silent and all(report.idle > half_wait for report in moving):
            return event_of("hung", self.silent[0], listed(self._silence, separator="; "))
        if moving and all(report.waits for report in stalled):
            return None
        absent = _absent_from_collective(self.reports)
        if absent is not None:
            return absent
        mismatch = mismatch_in(self.reports)
        if mismatch is not None:
            return replace(mismatch.event, kind="hung")
        return _slowest(stalled)

    @property
    def _silence(self) -> list[str]:
        return [f"{who} has not answered" for who in self.silent]

    def __str__(self) -> str:
        """Return all findings as text, rank by rank."""
        reports = sorted(self.reports, key=lambda report: report.who.rank)
        return "\n\n".join([*self._silence, *map(_section, reports)])


def _absent_from_collective(reports: Sequence[Report]) -> PeerEvent | None:
    """Return the event of a rank that did not enter an unfinished collective, if any.

    Only the first collective that some ranks have not entered counts, with the default
    group before the others. A rank whose recorder did not answer in time may have
    entered it, and is not reported.
    """
    unfinished = [progress for report in reports for progress in report.unfinished]
    unfinished.sort(key=lambda each: (each.label, each.group, each.pending))
    with_missing_rank = (
        progress
        for progress in unfinished
        if any(report.is_missing_in(progress) for report in reports)
    )
    first = next(with_missing_rank, None)
    if first is None:
        return None
    absent = [report for report in reports if report.groups and report.is_missing_in(first)]
    return _absent(first, absent, reports) if absent else None


def _absent(
    progress: GroupProgress, absent: Sequence[Report], reports: Sequence[Report]
) -> PeerEvent:
    """Return the event of one of the ranks that did not enter a collective."""
    # A rank that is not waiting for others is closer to the cause.
    first = min(absent, key=lambda report: (report.waits, report.who.rank))
    others = [report for report in reports if report is not first]
    waiting = [report for report in others if _waits_in(report, progress.group)]
    seconds = max(report.idle for report in waiting)
    ranks = ranks_in_words(report.who.rank for report in waiting)
    return event_of(
        "hung",
        first.who,
        f"{first.who} never entered {progress.describe(progress.pending)}; it is in"
        f" {_activity(first)}; {ranks} waited for it for {seconds:.0f} s",
    )


def _waits_in(report: Report, group: str) -> bool:
    return any(progress.group == group for progress in report.unfinished)


def _slowest(stalled: Sequence[Report]) -> PeerEvent:
    """Return the event of the rank with the longest wait.

    Ranks that are no longer watched do not count, nor do ranks that wait for others,
    unless there is no other rank.
    """
    watched = [report for report in stalled if report.is_watched] or list(stalled)
    culprits = [report for report in watched if not report.waits] or watched
    first = max(culprits, key=lambda report: (round(report.idle), -report.who.rank))
    return event_of(
        "hung",
        first.who,
        f"{first.who} has made no progress for {first.idle:.0f} s; it is in {_activity(first)}",
    )


def _activity(report: Report) -> str:
    if not report.unfinished:
        return report.where
    progress = report.unfinished[0]
    return f"{progress.describe(progress.pending)}, {report.where}"


def _section(report: Report) -> str:
    state = f"{report.who}: last progress {report.idle:.1f} s ago, in {_activity(report)}"
    return "\n".join(line for line in (state, report.progress, report.stacks.rstrip()) if line)
