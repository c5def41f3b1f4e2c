"""Collect a report from every rank when one waits for long or makes no progress.

Any rank requests a survey from rank 0, which collects the replies in a thread. Each
rank replies from the channel's thread, even if its main thread is blocked. There are
surveys of four kinds:

- ``"deadlock"``: a rank has waited in a call for some seconds. Only a deadlock that is
  certain is reported, after a second request has found it unchanged. Ranks that work
  only report whether they wait.
- ``"collective"``: a collective has timed out. A rank that does not reply is named,
  otherwise one that is not waiting for the others. The latter may just be returning
  from the same collective, so rank 0 first sends a second request.
- ``"silence"``: only a rank that does not reply is named.
- ``"hang"``: a watchdog has detected no progress.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Literal

from lightning_ddp_ext.rank_lists import listed
from lightning_ddp_ext.rendezvous.peers import PeerEvent, event_of
from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.remote_calls import RemoteCalls
from lightning_ddp_ext.supervision.diagnosis import Deadlock, Findings, deadlock_in, mismatch_in
from lightning_ddp_ext.supervision.flight import flights
from lightning_ddp_ext.supervision.report import Report, Silence
from lightning_ddp_ext.supervision.survey_replies import Glance, SurveyReplies
from lightning_ddp_ext.threads import start_thread

Kind = Literal["deadlock", "collective", "silence", "hang"]

# Seconds; once one rank returns from a collective, all do.
_SECOND_REQUEST_AFTER = 1.0
# Seconds; a rank that does not reply is not in a deadlock, and must not delay others.
_GLANCE_SECONDS = 1.0
# A survey waits for replies at most twice, and may first wait for another survey.
_WAITS_FOR_REPLIES = 4
_REMEDY = (
    "make sure that every rank makes the same calls; if one takes longer, pass a longer timeout to"
    " the strategy"
)


class Survey:
    """Requests surveys on any rank, and reports what they have found.

    Attributes:
        replies: this rank's replies to surveys.
        publish: called with the findings of a watchdog's survey, on the rank that
            collected them; returns whether all ranks stop.
    """

    def __init__(self, context: ProcessContext) -> None:
        self.replies = SurveyReplies(context)
        self.publish: Callable[[Findings], bool] = lambda findings: True
        self._context = context
        self._peers = context.peers
        self._seconds = context.peers.timeouts.answer
        # The kinds whose survey has finished since this rank last requested it.
        self._finished: set[Kind] = set()
        self._leader = SurveyLeader(context, self.replies, self._conclude)
        self._remote = RemoteCalls(
            context.peers, "survey", start=self._start, finish=self._finished.add
        )

    # For any thread except the channel's; most of these calls take several seconds.

    def cause_of_broken_collective(self) -> PeerEvent | None:
        """Return the event that broke a collective or store, if a rank caused it.

        All ranks get the same event.
        """
        self.replies.has_broken_collective = True
        has_timed_out = self.replies.has_timed_out(flights())
        event = None if has_timed_out else self._peers.wait(self._peers.timeouts.first_cause)
        if event is None:
            broken = f"a collective of rank {self._peers.rank} failed"
            event = self.request("collective", self.waited if has_timed_out else broken)
        self.replies.has_broken_collective = event is not None
        return event

    def raise_if_a_rank_is_silent(self) -> None:
        """Raise if a rank does not reply.

        A rank that replies may take as long as it needs.

        Raises:
            RankHungError: a rank does not reply.
            RankFailedError: a rank died, failed or left; it may be a subclass.
        """
        event = self.request("silence", f"rank {self._peers.rank} has waited for {self._timeout}")
        if event is not None:
            raise event.to_error()

    def request(self, kind: Kind, wait: str) -> PeerEvent | None:
        """Have rank 0 make a survey; return the event that was found meanwhile, if any.

        Args:
            kind: the kind of survey.
            wait: describes how long which rank has waited, for the message.
        """
        self._finished.discard(kind)
        is_received = self._remote.call([0], "start", kind, wait)
        if self._peers.wait_for(lambda: bool(is_received), self._seconds):
            longest = _WAITS_FOR_REPLIES * self._seconds
            self._peers.wait_for(lambda: kind in self._finished, longest)
        is_unanswered = kind not in self._finished and self._peers.cause_or_departure is None
        if self._peers.rank != 0 and is_unanswered and kind != "deadlock":
            silence = Silence(self._peers.table[0], self._seconds)
            self._conclude(kind, wait, Findings([self.replies.report()], [silence]))
        return self._peers.cause_or_departure

    @property
    def waited(self) -> str:
        """Describes that this rank's collective timed out, for messages."""
        return (
            f"rank {self._peers.rank} has waited in a collective for its timeout of {self._timeout}"
        )

    @property
    def _timeout(self) -> str:
        return f"{self._context.groups.timeout.total_seconds():g} s"

    def _conclude(self, kind: Kind, wait: str, findings: Findings) -> None:
        """Report the rank that the others wait for, if the findings show it."""
        event = findings.diagnosis if kind == "hang" else _missing(kind, wait, findings)
        if event is not None and (kind != "hang" or self.publish(findings)):
            self._peers.report(event)

    # On rank 0, called by any rank.

    def _start(self, kind: Kind, wait: str) -> bool:
        self._leader.start(
            kind, wait, lambda: self._remote.call(self._peers.everyone, "finish", kind)
        )
        return True


class SurveyLeader:
    """Makes the surveys on rank 0, one at a time.

    Args:
        context: the connections to the other ranks.
        replies: collects the replies.
        conclude: called with the kind, the wait and the findings of a survey.
    """

    def __init__(
        self,
        context: ProcessContext,
        replies: SurveyReplies,
        conclude: Callable[[Kind, str, Findings], None],
    ) -> None:
        self._peers = context.peers
        self._seconds = context.peers.timeouts.answer
        self._replies = replies
        self._conclude = conclude
        # The kinds that wait or run: further requests share that survey.
        self._requested: set[Kind] = set()
        self._one_at_a_time = threading.Lock()
        # The ranks' replies before the last survey that found no deadlock.
        self._harmless: dict[int, Glance] = {}

    def start(self, kind: Kind, wait: str, finish: Callable[[], object]) -> None:
        """Start a survey in a thread, unless one of this kind is under way.

        ``finish`` is called at its end.
        """
        if kind not in self._requested:
            self._requested.add(kind)
            start_thread("ddpx-survey", self._survey, kind, wait, finish)

    def _survey(self, kind: Kind, wait: str, finish: Callable[[], object]) -> None:
        with self._one_at_a_time:
            try:
                if kind == "deadlock":
                    self._report_deadlock()
                else:
                    self._report_findings(kind, wait)
            finally:
                self._requested.discard(kind)
                finish()

    def _report_deadlock(self) -> None:
        seconds = min(_GLANCE_SECONDS, self._seconds)
        replies = self._replies.collect("glance", self._peers.everyone, seconds)
        glances = {rank: Glance(**reply) for rank, reply in replies.items()}
        # Ranks that work need not be disturbed.
        ranks = [rank for rank, glance in glances.items() if glance.waits or not glance.is_in_run]
        if len(ranks) < 2 or glances == self._harmless:
            return
        deadlock = deadlock_in(self._collect("calls", ranks).reports)
        if deadlock is None:
            self._harmless = glances
        else:
            self._confirm(deadlock, ranks)

    def _confirm(self, deadlock: Deadlock, ranks: Collection[int]) -> None:
        """Report a deadlock if a second request finds it unchanged."""
        self._peers.wait(min(_SECOND_REQUEST_AFTER, self._peers.timeouts.deadlock / 2))
        later = deadlock_in(self._collect("calls", ranks).reports)
        if self._peers.cause is None and deadlock.persists_in(later):
            self._peers.report(deadlock.event)

    def _report_findings(self, kind: Kind, wait: str) -> None:
        findings = self._collect("report", self._peers.everyone)
        if kind == "collective" and not findings.silences and findings.elsewhere:
            self._peers.wait(_SECOND_REQUEST_AFTER)
            findings = self._collect("report", self._peers.everyone)
        if self._peers.cause_or_departure is None:
            self._conclude(kind, wait, findings)

    def _collect(self, function: str, ranks: Collection[int]) -> Findings:
        """Request a report from each of the ranks."""
        replies = self._replies.collect(function, ranks, self._seconds)
        silent = [self._peers.table[rank] for rank in ranks if rank not in replies]
        return Findings(
            [Report.from_dict(replies[rank]) for rank in sorted(replies)],
            [Silence(who, self._seconds) for who in silent],
        )


def _missing(kind: Kind, wait: str, findings: Findings) -> PeerEvent | None:
    """Return the event of the rank that the others are waiting for, if it is found."""
    silences = findings.silences
    elsewhere = findings.elsewhere
    if silences:
        return event_of("hung", silences[0].who, f"{listed(silences, separator='; ')}; {wait}")
    if kind == "silence":
        return None
    mismatch = mismatch_in(findings.reports)
    if mismatch is not None:
        return mismatch.event
    if not elsewhere or not any(report.has_timed_out for report in findings.reports):
        return None
    places = listed(
        (f"{each.who} is in {each.place or 'library code'}" for each in elsewhere),
        separator=" and ",
    )
    return event_of("absent", elsewhere[0].who, f"{wait}, but {places}; {_REMEDY}")
