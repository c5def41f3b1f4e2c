"""Collect a report from every rank when one waits for long or makes no progress.

Rank 0 requests the reports in a thread, on behalf of any rank. Each rank replies from
the channel's thread, even if its main thread is blocked. There are surveys of four
kinds:

- ``"deadlock"``: a rank has waited in a call for some seconds. Only a deadlock that is
  certain is reported, after a second survey has found it unchanged. Ranks that work
  only report whether they wait.
- ``"collective"``: a collective has timed out. A rank that does not reply is named,
  otherwise one that is not waiting for the others. The latter may just be returning
  from the same collective, so rank 0 first sends a second request.
- ``"silence"``: only a rank that does not reply is named.
- ``"hang"``: a watchdog has detected no progress.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, Literal

from lightning_ddp_ext.rank_lists import listed
from lightning_ddp_ext.rendezvous.peers import PeerEvent, current_run, event_of, joint_runs
from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.remote_calls import RemoteCalls
from lightning_ddp_ext.rendezvous.request import RankInfo
from lightning_ddp_ext.supervision.diagnosis import Findings, deadlock_in, mismatch_in
from lightning_ddp_ext.supervision.flight import Flight, flights, unfinished
from lightning_ddp_ext.supervision.report import Report, Silence
from lightning_ddp_ext.supervision.stacks import (
    call_site_of,
    is_in_backward,
    is_in_collective,
    main_frame,
    may_be_waiting_for_ranks,
)
from lightning_ddp_ext.threads import start_thread

Kind = Literal["deadlock", "collective", "silence", "hang"]

# Seconds before a second request; once one rank returns from a collective, all do.
_FOLLOWS_WITHIN = 1.0
# Seconds; a rank that does not reply is not in a deadlock, and must not delay others.
_GLANCED_WITHIN = 1.0
# A rank may have entered its last collective a little after the one that timed out.
_NEARLY = 0.9
_REMEDY = (
    "make sure that every rank makes the same calls; if one takes longer, pass a longer timeout to"
    " the strategy"
)


class Survey:
    """This rank's part in surveys.

    Attributes:
        describe: returns this rank's report.
        publish: called with the findings of a watchdog's survey, on the rank that
            collected them; returns whether all ranks stop.
    """

    def __init__(self, context: ProcessContext) -> None:
        self.describe: Callable[[], Report] = lambda: report_of(
            self._peers.mine, doing="user code", is_outside=True
        )
        self.publish: Callable[[Findings], bool] = lambda findings: True
        self._context = context
        self._peers = context.peers
        self._seconds = context.peers.timeouts.answer
        self._has_broken_collective = False
        # The ranks' replies before the last survey that found no deadlock.
        self._glances: dict[int, Any] = {}
        # The kinds whose survey has finished since this rank last requested it.
        self._over: set[Kind] = set()
        # On rank 0, the kinds that wait or run: further requests share that survey.
        self._requested: set[Kind] = set()
        self._one_at_a_time = threading.Lock()
        self._remote = RemoteCalls(
            context.peers,
            "survey",
            start=self._start,
            glance=self._glance,
            report=lambda: asdict(self._report()),
            calls=lambda: asdict(self._completed(report_of(self._peers.mine))),
            end=self._over.add,
        )

    # For any thread except the channel's; most of these calls take several seconds.

    def cause_of_broken_collective(self) -> PeerEvent | None:
        """Return the event that broke a collective or store, if a rank caused it.

        All ranks get the same event.
        """
        self._has_broken_collective = True
        has_timed_out = self._has_timed_out(flights())
        event = None if has_timed_out else self._peers.wait(self._peers.timeouts.first_cause)
        if event is None:
            broken = f"a collective of rank {self._peers.rank} failed"
            event = self.request("collective", self.waited if has_timed_out else broken)
        self._has_broken_collective = event is not None
        return event

    def check_that_all_answer(self) -> None:
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
        self._over.discard(kind)
        replies = self._remote.call([0], "start", kind, wait)
        if self._peers.wait_for(lambda: bool(replies), self._seconds):
            # A survey of another kind may run first.
            self._peers.wait_for(lambda: kind in self._over, 4 * self._seconds)
        is_unanswered = kind not in self._over and self._peers.cause_or_departure is None
        if self._peers.rank != 0 and is_unanswered and kind != "deadlock":
            self._conclude(kind, wait, Findings([self._report()], [self._silence(0)]))
        return self._peers.cause_or_departure

    # Reports of this rank.

    def waits(self) -> list[str]:
        """Return the calls in which this rank waits, or in which its device does."""
        call = self._context.barriers.awaited
        return unfinished() + ([] if call is None else [f"call {call.number}"])

    def _has_timed_out(self, found: Collection[Flight]) -> bool:
        """Whether a collective of this rank took as long as its timeout.

        Also true if torch has not recorded any.
        """
        limit = self._context.groups.timeout.total_seconds()
        return not found or any(each.seconds >= _NEARLY * min(limit, each.limit) for each in found)

    def _glance(self) -> list[Any]:
        return [*self.waits(), self._is_blocked(), current_run() is not None]

    def _is_blocked(self) -> bool:
        frame = main_frame()
        is_in_call = self._context.barriers.awaited is not None
        return is_in_call or is_in_collective(frame) or is_in_backward(frame)

    def _report(self) -> Report:
        return self._completed(self.describe())

    def _completed(self, report: Report) -> Report:
        """Return a report with the calls in which this rank waits."""
        barriers = self._context.barriers
        return replace(
            report,
            is_waiting=report.is_waiting or self._has_broken_collective,
            is_blocked=self._is_blocked(),
            # CUDA may poll while it waits.
            cpu_seconds=0.0 if self._context.groups.uses_nccl else _cpu_seconds(),
            calls=barriers.made,
            awaited=barriers.awaited,
            run=joint_runs(),
            is_in_run=current_run() is not None,
            has_timed_out=self._has_timed_out(report.flights),
        )

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
                self._remote.call(self._peers.everyone, "end", kind)

    def _report_deadlock(self) -> None:
        glances = self._replies("glance", self._peers.everyone, min(_GLANCED_WITHIN, self._seconds))
        # A reply contains the calls in which the rank waits, and two bools. Working
        # ranks need not be disturbed.
        ranks = [rank for rank, (*waits, _, is_in_run) in glances.items() if waits or not is_in_run]
        if len(ranks) < 2 or glances == self._glances:
            return
        found = deadlock_in(self._collect(ranks, "calls").reports)
        if found is None:
            self._glances = glances
            return
        self._peers.wait(min(_FOLLOWS_WITHIN, self._peers.timeouts.deadlock / 2))
        later = deadlock_in(self._collect(ranks, "calls").reports)
        if self._peers.cause is None and found.persists_in(later):
            self._peers.report(found.event)

    def _report_findings(self, kind: Kind, wait: str) -> None:
        findings = self._collect(self._peers.everyone)
        if kind == "collective" and not findings.silences and findings.elsewhere:
            self._peers.wait(_FOLLOWS_WITHIN)
            findings = self._collect(self._peers.everyone)
        if self._peers.cause_or_departure is None:
            self._conclude(kind, wait, findings)

    def _collect(self, ranks: Collection[int], function: str = "report") -> Findings:
        """Request a report from each of the ranks."""
        replies = self._replies(function, ranks, self._seconds)
        reports = [Report.of(replies[rank]) for rank in sorted(replies)]
        silent = [rank for rank in ranks if rank not in replies]
        return Findings(reports, [self._silence(rank) for rank in silent])

    def _replies(self, function: str, ranks: Collection[int], seconds: float) -> dict[int, Any]:
        replies = self._remote.call(ranks, function)
        self._peers.wait_for(lambda: len(replies) == len(ranks), seconds)
        with self._peers.arrived:
            return replies.copy()

    # Actions after a survey.

    def _conclude(self, kind: Kind, wait: str, findings: Findings) -> None:
        event = findings.diagnosis if kind == "hang" else _missing(kind, wait, findings)
        if event is None or (kind == "hang" and not self.publish(findings)):
            return
        self._peers.report(event)
        for silence in findings.silences:
            if kind == "hang" and is_stopped(silence.who, seen_from=self._peers.mine):
                with suppress(OSError):
                    # It then receives the event and exits as well.
                    os.kill(silence.who.pid, signal.SIGCONT)

    def _silence(self, rank: int) -> Silence:
        who = self._peers.table[rank]
        return Silence(who, self._seconds, is_stopped(who, seen_from=self._peers.mine))

    @property
    def waited(self) -> str:
        """Describes that this rank's collective timed out, for messages."""
        return (
            f"rank {self._peers.rank} has waited in a collective for its timeout of {self._timeout}"
        )

    @property
    def _timeout(self) -> str:
        return f"{self._context.groups.timeout.total_seconds():g} s"


def report_of(who: RankInfo, **more: Any) -> Report:
    """Return the report of this rank; not for the main thread."""
    frame = main_frame()
    is_waiting = may_be_waiting_for_ranks(frame)
    return Report(who, place=call_site_of(frame), is_waiting=is_waiting, flights=flights(), **more)


def _cpu_seconds() -> float:
    """Return the processor time of the main thread, or 0 where it is unknown."""
    clock_of = getattr(time, "pthread_getcpuclockid", None)
    ident = threading.main_thread().ident
    return 0.0 if clock_of is None or ident is None else time.clock_gettime(clock_of(ident))


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


def is_stopped(info: RankInfo, *, seen_from: RankInfo) -> bool:
    """Whether the process of a rank is on the same host and stopped (SIGSTOP)."""
    import psutil  # importing it takes 6 ms, and it is rarely needed

    if (info.host, info.network) != (seen_from.host, seen_from.network):
        return False
    try:
        return bool(psutil.Process(info.pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
