"""Collect a report from every rank, and find the rank that the others wait for.

A hang becomes an error in four steps:

1. A rank notices that it waits, and requests a survey from rank 0: in ``long_waits``,
   ``failure`` or ``graceful_stop``.
2. Rank 0 collects the replies in a thread. Each rank replies from the channel's thread,
   even if its main thread is blocked. Its ``report`` has its ``stacks`` and the
   collectives in torch's ``flight_recorder``.
3. Rank 0 finds out which rank the others are waiting for, in ``deadlock`` or
   ``diagnosis``.
4. It reports that rank, and the main thread of every rank raises (``rendezvous.peers``).

There are surveys of three kinds:

==============  ====================================  ==================================
Kind            Requested                             Rank 0 reports
==============  ====================================  ==================================
``deadlock``    after some seconds in a call          ranks that certainly wait for each
                                                      other: a second request has found
                                                      them in the same calls
``collective``  after a collective failed or timed    a rank that does not reply, else
                out                                   one outside of the collective,
                                                      after a second request
``silence``     while other ranks are late            a rank that does not reply
==============  ====================================  ==================================
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import asdict
from typing import Any, Literal

from lightning_ddp_ext.rendezvous.peers import PeerEvent
from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.remote_calls import RemoteCalls
from lightning_ddp_ext.supervision.deadlock import Deadlock, deadlock_in
from lightning_ddp_ext.supervision.diagnosis import Findings
from lightning_ddp_ext.supervision.flight_recorder import has_timed_out, read_progress
from lightning_ddp_ext.supervision.report import Report, Reporter
from lightning_ddp_ext.threads import start_thread

Kind = Literal["deadlock", "collective", "silence"]

# Seconds; a rank may just be returning from the collective. Once one does, all do.
_SECOND_REQUEST_AFTER = 1.0
# Seconds; a rank that does not reply is not in a deadlock, and must not delay others.
_SECONDS_TO_CHOOSE = 1.0
# A survey waits for replies at most twice, and may first wait for another survey.
_WAITS_FOR_REPLIES = 4


class Survey:
    """Requests surveys on any rank, and makes them on rank 0, one at a time.

    Attributes:
        reporter: describes this rank.
    """

    def __init__(self, context: ProcessContext) -> None:
        self.reporter = Reporter(context)
        self._peers = context.peers
        self._groups = context.groups
        self._seconds = context.peers.timeouts.answer
        # The kinds whose survey has finished since this rank last requested it.
        self._finished: set[Kind] = set()
        # On rank 0: the kinds that wait or run; further requests share that survey.
        self._requested: set[Kind] = set()
        self._one_at_a_time = threading.Lock()
        self._remote = RemoteCalls(
            context.peers,
            "survey",
            start=self._start,
            finish=self._finished.add,
            is_waiting=lambda: bool(self.reporter.open_calls()),
            report=self._report,
        )

    # For any thread except the channel's; most of these calls take several seconds.

    def cause_of_broken_collective(self) -> PeerEvent | None:
        """Return the event that broke a collective or store, if a rank caused it.

        All ranks get the same event.
        """
        self.reporter.has_broken_collective = True
        is_timeout = has_timed_out(read_progress(), self._groups.timeout)
        event = None if is_timeout else self._peers.wait(self._peers.timeouts.first_cause)
        if event is None:
            broken = f"a collective of rank {self._peers.rank} failed"
            event = self.request("collective", self.wait_in_words if is_timeout else broken)
        self.reporter.has_broken_collective = event is not None
        return event

    def raise_if_a_rank_is_silent(self) -> None:
        """Raise if a rank does not reply.

        A rank that replies may take as long as it needs.

        Raises:
            RankAbsentError: a rank does not reply.
            RankFailedError: a rank died, failed or left; it may be a subclass.
        """
        event = self.request("silence", f"rank {self._peers.rank} has waited for {self._timeout}")
        if event is not None:
            raise event.to_error()

    def request(self, kind: Kind, wait: str = "") -> PeerEvent | None:
        """Have rank 0 make a survey; return the event that was found meanwhile, if any.

        Args:
            kind: the kind of survey.
            wait: describes how long which rank has waited, for the message.
        """
        self._finished.discard(kind)
        receipt = self._remote.call([0], "start", kind, wait)
        if self._peers.wait_for(lambda: bool(receipt), self._seconds):
            longest = _WAITS_FOR_REPLIES * self._seconds
            self._peers.wait_for(lambda: kind in self._finished, longest)
        is_answered = kind in self._finished or self._peers.cause_or_departure is not None
        is_rank_zero_silent = not is_answered and self._peers.rank != 0
        if is_rank_zero_silent and kind != "deadlock":  # a deadlock needs a report of rank 0
            silent = [self._peers.table[0]]
            self._conclude(kind, wait, Findings([self.reporter.report()], silent))
        return self._peers.cause_or_departure

    @property
    def wait_in_words(self) -> str:
        """Describes that this rank's collective timed out, for messages."""
        return (
            f"rank {self._peers.rank} has waited in a collective for its timeout of {self._timeout}"
        )

    @property
    def _timeout(self) -> str:
        return f"{self._groups.timeout.total_seconds():g} s"

    def _conclude(self, kind: Kind, wait: str, findings: Findings) -> None:
        """Report the rank that the others wait for, if the findings show it."""
        event = findings.silent_rank(wait)
        if event is None and kind == "collective":
            event = findings.rank_outside_collective(wait)
        if event is not None:
            self._peers.report(event)

    def _report(self) -> dict[str, Any]:
        """Reply to rank 0 with this rank's report."""
        return asdict(self.reporter.report())

    # On rank 0.

    def _start(self, kind: Kind, wait: str) -> bool:
        if kind not in self._requested:
            self._requested.add(kind)
            start_thread("ddpx-survey", self._survey, kind, wait)
        return True

    def _survey(self, kind: Kind, wait: str) -> None:
        with self._one_at_a_time:
            try:
                if kind == "deadlock":
                    self._report_deadlock()
                else:
                    self._report_findings(kind, wait)
            finally:
                self._requested.discard(kind)
                self._remote.call(self._peers.everyone, "finish", kind)

    def _report_deadlock(self) -> None:
        seconds = min(_SECONDS_TO_CHOOSE, self._seconds)
        replies = self._collect(self._peers.everyone, seconds, "is_waiting")
        # Ranks that work are not disturbed: CUDA may refuse what a report needs while it
        # captures a graph.
        ranks = [rank for rank, is_waiting in replies.items() if is_waiting]
        if len(ranks) < 2:
            return
        deadlock = deadlock_in(self._findings(ranks).reports)
        if deadlock is not None:
            self._confirm(deadlock, ranks)

    def _confirm(self, deadlock: Deadlock, ranks: Collection[int]) -> None:
        """Report a deadlock if a second request finds it unchanged."""
        self._peers.wait(min(_SECOND_REQUEST_AFTER, self._peers.timeouts.deadlock / 2))
        later = deadlock_in(self._findings(ranks).reports)
        if self._peers.cause is None and deadlock.persists_in(later):
            self._peers.report(deadlock.event)

    def _report_findings(self, kind: Kind, wait: str) -> None:
        findings = self._findings(self._peers.everyone)
        if kind == "collective" and not findings.silent and findings.elsewhere:
            self._peers.wait(_SECOND_REQUEST_AFTER)
            findings = self._findings(self._peers.everyone)
        if self._peers.cause_or_departure is None:
            self._conclude(kind, wait, findings)

    def _findings(self, ranks: Collection[int]) -> Findings:
        """Request a report from each of the ranks."""
        replies = self._collect(ranks, self._seconds, "report")
        return Findings(
            [Report.from_dict(replies[rank]) for rank in sorted(replies)],
            [self._peers.table[rank] for rank in ranks if rank not in replies],
        )

    def _collect(self, ranks: Collection[int], seconds: float, function: str) -> dict[int, Any]:
        """Call a function of the ranks; return the replies within ``seconds``."""
        replies = self._remote.call(ranks, function)
        self._peers.wait_for(lambda: len(replies) == len(ranks), seconds)
        with self._peers.arrived:
            return dict(replies)
