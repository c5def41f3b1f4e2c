"""Collect a report from every rank after a collective has timed out, or a watchdog has detected no progress.

Rank 0 requests the reports in a thread, on behalf of any rank. Each rank replies from the channel's thread, even if its
main thread is blocked. The survey names a rank that does not reply, otherwise one that is not waiting for the others.
The latter may just be returning from the collective that timed out elsewhere, so rank 0 first sends a second request.
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

# ``"collective"``: a collective has timed out. ``"silence"``: only a rank that does not reply is named. ``"hang"``: a
# watchdog has detected no progress.
Kind = Literal["collective", "silence", "hang"]

# gloo's errors after a timeout: on the rank that timed out, and on the ranks whose connections it closed.
_TIMED_OUT = re.compile(r"Timed out waiting|timeout caused pair closure")
_CLOSED = re.compile(r"Connection (closed|reset) by peer|pair closure")
# Seconds within which all ranks return from a collective once one has, so rank 0 waits this long before asking again.
_FOLLOWS_WITHIN = 1.0
_LOOKS_EVERY = 5.0  # seconds between checks for collectives that timed out
_REMEDY = "make sure that every rank makes the same calls; if one takes longer, pass a longer timeout to the strategy"


class Survey:
    """This rank's part in surveys. Every rank must create its instance before any rank sends a request.

    Attributes:
        describe: returns this rank's report.
        publish: called with the findings of a watchdog's survey, on the rank that collected them; returns whether all
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
        self._had_broken_collective = False  # set after a failed collective
        self._limiter: threading.Thread | None = None
        self._over: set[Kind] = set()
        self._requested: set[Kind] = set()
        self._one_at_a_time = threading.Lock()
        self._remote = RemoteCalls(
            context.peers, "survey", start=self._start, report=lambda: asdict(self._report()), end=self._over.add
        )

    # For any thread except the channel's; most of these calls take several seconds.

    def cause_of(self, text: str) -> PeerEvent | None:
        """Return the event that broke a collective or store, the same on all ranks; ``None`` if no rank caused it.

        Args:
            text: the error's text; it shows whether this rank timed out, or other ranks closed its connections.
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
        """Raise if a rank does not reply; a rank that replies may take as long as it needs.

        Raises:
            RankHungError: a rank does not reply.
            RankFailedError: a rank died, failed or left; it may be a subclass.
        """
        event = self._request("silence", f"rank {self._rank} has waited for {self._timeout}")
        if event is not None:
            raise event.to_error()

    def limit_collectives(self) -> None:
        """Have NCCL collectives raise after their timeout and name the missing rank, as gloo's do."""
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
        """Find the rank that is stuck, and report it to all ranks if they should stop."""
        self._request("hang", "")

    def _request(self, kind: Kind, wait: str) -> PeerEvent | None:
        self._over.discard(kind)
        replies = self._remote.call([0], "start", kind, wait)
        if self._peers.wait_for(lambda: bool(replies), self._seconds):
            # A survey of another kind may run first.
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
        """Request a report from each rank."""
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
                    os.kill(silence.who.pid, signal.SIGCONT)  # it then receives the event and exits as well

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
    """Return the report of this rank; not for the main thread."""
    frame = main_frame()
    is_waiting = may_be_waiting_for_ranks(frame)
    return Report(who, place=call_site_of(frame), is_waiting=is_waiting, flights=flights(), **more)


def _missing(kind: Kind, wait: str, findings: Findings) -> PeerEvent | None:
    """Return the event for the rank that the others are waiting for; ``None`` if it is not found."""
    silences, elsewhere = findings.silences, findings.elsewhere
    if silences:
        return event_of("hung", silences[0].who, f"{listed(silences, separator='; ')}; {wait}")
    if kind == "silence" or not elsewhere:
        return None
    places = listed((f"{each.who} is in {each.place or 'library code'}" for each in elsewhere), separator=" and ")
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
