"""Collect a report from every rank: after a collective timed out, or when a watchdog finds that nothing moves.

Rank 0 requests the reports, on behalf of any rank, in a thread; each rank replies from the channel's thread, even if
its main thread is blocked. A rank that does not reply is named, or else one that does not wait for the others. Such a
rank may just be returning from the collective that timed out on others, so a second request precedes the verdict.
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, Literal

from lightning_ddp_ext.rank_lists import listed
from lightning_ddp_ext.rendezvous.peer_event import PeerEvent, event_of
from lightning_ddp_ext.rendezvous.process_context import ProcessContext, current
from lightning_ddp_ext.rendezvous.rank_table import RankInfo
from lightning_ddp_ext.rendezvous.remote_calls import RemoteCalls
from lightning_ddp_ext.supervision.call_site import call_site_of, main_frame
from lightning_ddp_ext.supervision.diagnosis import Findings, Report, Silence
from lightning_ddp_ext.supervision.flight import flights
from lightning_ddp_ext.supervision.stacks import may_be_waiting_for_ranks

# ``"collective"``: one timed out; ``"silence"``: only name a rank that does not reply; ``"hang"``: a
# watchdog's request.
Kind = Literal["collective", "silence", "hang"]

# Errors of gloo after a timeout: on the rank that had it, and on those whose connections it closed.
_TIMED_OUT = re.compile(r"Timed out waiting|timeout caused pair closure")
_CLOSED = re.compile(r"Connection (closed|reset) by peer|pair closure")
# Seconds between ranks in which a collective finishes, and until a request after it.
_FOLLOWS_WITHIN = 1.0
_LOOKS_EVERY = 5.0  # seconds, for collectives that have timed out
_REMEDY = "make sure that every rank makes the same calls; if one takes longer, pass a longer timeout to the strategy"


class Survey:
    """This rank's part in surveys. Every rank must create its object before any rank sends a request.

    Attributes:
        describe: returns this rank's report.
        publish: called with the findings of a watchdog's survey on the rank that has them; returns whether all
            ranks stop.
    """

    def __init__(self, context: ProcessContext) -> None:
        self.describe: Callable[[], Report] = lambda: report_of(self._mine, doing="user code", is_outside=True)
        self.publish: Callable[[Findings], bool] = lambda findings: True
        self._context = context
        self._peers = context.peers
        self._everyone = range(len(context.table))
        self._rank = context.world.rank
        self._mine = context.table[self._rank]
        self._seconds = context.peers.timeouts.answer
        self._had_broken_collective = False  # from its failed collective
        self._limiter: threading.Thread | None = None
        self._over: set[Kind] = set()
        self._requested: set[Kind] = set()
        self._one_at_a_time = threading.Lock()
        self._remote = RemoteCalls(
            context.peers, "survey", start=self._start, report=lambda: asdict(self._report()), end=self._over.add
        )

    # Called by any thread but the channel's; takes some seconds.

    def cause_of(self, text: str) -> PeerEvent | None:
        """Return the event that broke a collective or a store, the same on all ranks; ``None`` if no rank is to blame.

        Args:
            text: the text of the error; another rank may have closed its connection after a timeout.
        """
        has_timed_out, was_closed = bool(_TIMED_OUT.search(text)), bool(_CLOSED.search(text))
        self._had_broken_collective |= has_timed_out or was_closed
        if has_timed_out:
            return self._request("collective", self._waited)
        event = self._peers.wait(self._peers.timeouts.first_cause)
        if event is None and was_closed:
            event = self._request("collective", f"the connections of rank {self._rank} were closed in a collective")
        return event

    def check_that_all_answer(self) -> None:
        """Raise if a rank does not reply; a rank that only takes long is allowed to.

        Raises:
            RankHungError: a rank does not reply.
            RankFailedError: another of its kinds; a rank died, failed or left.
        """
        event = self._request("silence", f"rank {self._rank} has waited for {self._timeout}")
        if event is not None:
            raise event.to_error()

    def limit_collectives(self) -> None:
        """Have an NCCL collective raise after its timeout and name the missing rank, as gloo's do."""
        if self._context.groups.uses_nccl and self._limiter is None:
            self._limiter = threading.Thread(target=self._limit_collectives, name="ddpx-timeout", daemon=True)
            self._limiter.start()

    def _limit_collectives(self) -> None:
        since: dict[object, float] = {}
        while current() is self._context and self._peers.cause is None:
            now = time.monotonic()
            pending = {(flight.group, flight.pending) for flight in flights() if flight.pending is not None}
            since = {each: since.get(each, now) for each in pending}
            left = self._peers.cause_or_departure
            seconds = self._context.groups.timeout.total_seconds() if left is None else self._seconds
            if self._context.groups.uses_nccl and now - min(since.values(), default=now) >= seconds:
                event = self._request("collective", self._waited)
                if left is not None and event is left:  # NCCL keeps no connection that closes with the rank
                    self._peers.report(event_of("absent", self._peers.table[left.rank], str(left.to_error())))
                since.clear()
            time.sleep(min(seconds / 8, _LOOKS_EVERY))

    def after_standstill(self) -> None:
        """Find the rank that hangs, and report it to all ranks if they are to stop."""
        self._request("hang", "")

    def _request(self, kind: Kind, wait: str) -> PeerEvent | None:
        self._over.discard(kind)
        replies = self._remote.call([0], "start", kind, wait)
        if self._peers.wait_for(lambda: bool(replies), self._seconds):
            # A survey of another kind may be first.
            self._peers.wait_for(lambda: kind in self._over, 4 * self._seconds)
        if self._rank != 0 and kind not in self._over and self._peers.cause_or_departure is None:
            self._conclude(kind, wait, Findings([self._report()], [self._silence(0)]))
        return self._peers.cause_or_departure

    def _report(self) -> Report:
        report = self.describe()
        return replace(report, is_waiting=report.is_waiting or self._had_broken_collective)

    # On rank 0.

    def _start(self, kind: Kind, wait: str) -> bool:
        if kind not in self._requested:
            self._requested.add(kind)
            threading.Thread(target=self._survey, args=[kind, wait], name="ddpx-survey", daemon=True).start()
        return True

    def _survey(self, kind: Kind, wait: str) -> None:
        with self._one_at_a_time:
            try:
                findings = self._collect()
                if kind == "collective" and not findings.silences and findings.elsewhere:
                    self._peers.wait(_FOLLOWS_WITHIN)
                    findings = self._collect()
                if self._peers.cause_or_departure is None:
                    self._conclude(kind, wait, findings)
            finally:
                self._requested.discard(kind)
                self._remote.call(self._everyone, "end", kind)

    def _collect(self) -> Findings:
        """Request a report of each rank."""
        replies = self._remote.call(self._everyone, "report")
        self._peers.wait_for(lambda: len(replies) == len(self._everyone), self._seconds)
        with self._peers.arrived:
            reports = [Report.of(replies[rank]) for rank in sorted(replies)]
            silent = [rank for rank in self._everyone if rank not in replies]
        return Findings(reports, [self._silence(rank) for rank in silent])

    # Actions after a survey.

    def _conclude(self, kind: Kind, wait: str, findings: Findings) -> None:
        event = findings.diagnosis if kind == "hang" else _missing(kind, wait, findings)
        if event is None or (kind == "hang" and not self.publish(findings)):
            return
        self._peers.report(event)
        for silence in findings.silences:
            if kind == "hang" and is_stopped(silence.who, seen_from=self._mine):
                with suppress(OSError):
                    os.kill(silence.who.pid, signal.SIGCONT)  # it receives the event, and exits as the others do

    def _silence(self, rank: int) -> Silence:
        who = self._peers.table[rank]
        return Silence(who, self._seconds, is_stopped(who, seen_from=self._mine))

    @property
    def _waited(self) -> str:
        return f"rank {self._rank} has waited in a collective for its timeout of {self._timeout}"

    @property
    def _timeout(self) -> str:
        return f"{self._context.groups.timeout.total_seconds():g} s"


def report_of(who: RankInfo, **more: Any) -> Report:
    """Return the report of this rank, called by another thread than the main one."""
    frame = main_frame()
    is_waiting = may_be_waiting_for_ranks(frame)
    return Report(who, place=call_site_of(frame), is_waiting=is_waiting, flights=flights(), **more)


def _missing(kind: Kind, wait: str, findings: Findings) -> PeerEvent | None:
    """Return the event for the rank that the others wait for."""
    silences, elsewhere = findings.silences, findings.elsewhere
    if silences:
        return event_of("hung", silences[0].who, f"{listed(silences, separator='; ')}; {wait}")
    if kind == "silence" or not elsewhere:
        return None
    places = listed((f"{each.who} is in {each.place or 'library code'}" for each in elsewhere), separator=" and ")
    return event_of("absent", elsewhere[0].who, f"{wait}, but {places}; {_REMEDY}")


def is_stopped(info: RankInfo, *, seen_from: RankInfo) -> bool:
    """Whether the process of a rank is on the same host and was stopped (SIGSTOP)."""
    import psutil  # takes 6 ms, and few ranks need it

    if (info.host, info.network) != (seen_from.host, seen_from.network):
        return False
    try:
        return bool(psutil.Process(info.pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False
