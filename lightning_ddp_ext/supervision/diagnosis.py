"""Find the rank that others wait for, from the reports of all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_ddp_ext.rank_lists import listed
from lightning_ddp_ext.rendezvous.peers import PeerEvent, event_of
from lightning_ddp_ext.rendezvous.request import RankInfo
from lightning_ddp_ext.supervision.deadlock import mismatch_in
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
        silence = listed((f"{who} has not answered" for who in self.silent), separator="; ")
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
