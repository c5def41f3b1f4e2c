"""Ask every rank what it does: after a collective that timed out, or when a watchdog finds that nothing moves.

Rank 0 asks, on behalf of any rank, in a thread; each rank answers from the channel's thread, whatever its main thread
does. One that does not answer is named, or else one that does not wait for the others. That one may be on its way from
the collective that has timed out on others, so it is asked once more before it is named.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Literal

import psutil

from lightning_ddp_ext.rendezvous.peer_event import PeerEvent, event_of
from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.rank_table import RankInfo
from lightning_ddp_ext.rendezvous.wire import Message
from lightning_ddp_ext.supervision.call_site import call_site_of
from lightning_ddp_ext.supervision.diagnosis import Findings, Report, Silence
from lightning_ddp_ext.supervision.stacks import main_frame, may_be_waiting_for_ranks

# ``"collective"``: one has timed out; ``"silence"``: only a rank that does not answer is to be named; ``"hang"``: a
# watchdog asks.
Kind = Literal["collective", "silence", "hang"]

_TOPIC = "survey"
# Seconds from the end of a collective on one rank to its end on another, and from there to the question.
_FOLLOWS_WITHIN = 1.0
_REMEDY = "let every rank make the same calls, or give the strategy a longer timeout if one of them takes so long"


class Survey:
    """This rank's part in surveys. All ranks must have made theirs before one of them asks.

    Args:
        context: this process among the ranks.

    Attributes:
        describe: what this rank answers to a watchdog.
        publish: on the rank that has the findings, called with those of a watchdog's survey; returns whether all
            ranks are to end.
    """

    def __init__(self, context: ProcessContext) -> None:
        self.describe: Callable[[], Report] = self._brief_report
        self.publish: Callable[[Findings], bool] = lambda findings: True
        self._context = context
        self._peers = context.peers
        self._table = context.table
        self._rank = context.world.rank
        self._mine = context.table[self._rank]
        self._seconds = context.timeouts.answer
        self._has_come_out = False  # of its collective, which was in vain
        self._is_under_way = False
        self._over: set[str] = set()
        self._requested: dict[Kind, str] = {}
        self._is_surveying = False
        self._reports: dict[int, Report] = {}
        context.listen(_TOPIC, self._hear)

    # Called by any thread but the channel's; takes some seconds.

    def after_timeout(self) -> PeerEvent | None:
        """Why a collective has timed out here, as all ranks are told; ``None`` if no rank seems to be to blame."""
        self._has_come_out = True
        return self._ask(
            "collective", f"rank {self._rank} has waited in a collective for its timeout of {self._timeout}"
        )

    def after_closed_connection(self, cause_within: float) -> PeerEvent | None:
        """The same where another rank has closed its connection: it may have done so because it has timed out.

        Args:
            cause_within: seconds in which other causes become known.
        """
        self._has_come_out = True
        event = self._peers.wait(cause_within)
        return event or self._ask("collective", f"the connections of rank {self._rank} were closed in a collective")

    def check_that_all_answer(self) -> None:
        """Be patient with a rank that takes long over something, but not with one that does not answer.

        Raises:
            RankHungError: a rank does not answer.
            RankFailedError: another of its kinds; something else has happened to a rank.
        """
        event = self._ask("silence", f"rank {self._rank} has waited for {self._timeout}")
        if event is not None:
            raise event.to_error()

    def after_standstill(self) -> None:
        """Find out which rank hangs; all ranks are told, if they are to end."""
        self._ask("hang", "")

    def _ask(self, kind: Kind, wait: str) -> PeerEvent | None:
        if self._peers.cause_or_departure is not None and kind == "hang":
            return None  # the ranks are ending already
        with self._peers.arrived:
            self._over.discard(kind)
        if self._rank == 0:
            self._request(kind, wait)
        else:
            self._context.send(_TOPIC, {"request": kind, "wait": wait})
            self._await(lambda: self._is_under_way or kind in self._over, self._seconds)
        # One of another kind may come first.
        self._await(lambda: kind in self._over, 4 * self._seconds if self._is_under_way or self._rank == 0 else 0.0)
        if self._rank != 0 and kind not in self._over and self._peers.cause_or_departure is None:
            self._blame_rank_zero(kind, wait)
        return self._peers.cause_or_departure

    def _blame_rank_zero(self, kind: Kind, wait: str) -> None:
        if kind == "hang":
            self._conclude(Findings([self.describe()], [self._silence(0)]))
        else:
            self._peers.report(self._silent_event([0], wait))

    def _await(self, condition: Callable[[], bool], seconds: float) -> None:
        """Wait until it is so, or something has happened to a rank, which says more."""
        with self._peers.arrived:
            self._peers.arrived.wait_for(lambda: condition() or self._peers.cause_or_departure is not None, seconds)

    # On the channel's thread.

    def _hear(self, message: Message) -> None:
        if "request" in message:
            self._request(message["request"], message["wait"])
        elif "question" in message:
            self._note(under_way=True)
            report = self.describe() if message["question"] == "hang" else self._brief_report()
            self._context.send(_TOPIC, {"report": asdict(report)})
        elif "report" in message:
            self._take(Report.of(message["report"]))
        elif "over" in message:
            self._note(under_way=False, over=message["over"])

    def _note(self, *, under_way: bool, over: str | None = None) -> None:
        with self._peers.arrived:
            self._is_under_way = under_way
            if over is not None:
                self._over.add(over)
            self._peers.arrived.notify_all()

    def _brief_report(self) -> Report:
        frame = main_frame()
        waits = self._has_come_out or may_be_waiting_for_ranks(frame)
        return Report(self._mine, doing="user code", place=call_site_of(frame), is_waiting=waits, is_outside=True)

    # On rank 0.

    def _request(self, kind: Kind, wait: str) -> None:
        with self._peers.arrived:
            self._requested.setdefault(kind, wait)
            is_first, self._is_surveying = not self._is_surveying, True
        if is_first:
            threading.Thread(target=self._survey, name="ddpx-survey", daemon=True).start()

    def _survey(self) -> None:
        while True:
            with self._peers.arrived:
                if not self._requested:
                    self._is_surveying = False
                    self._peers.arrived.notify_all()
                    break
                kind, wait = self._requested.popitem()
            if kind == "hang":
                silent = self._collect(kind)
                if self._peers.cause is None:
                    silences = [self._silence(rank) for rank in silent]
                    self._conclude(Findings(list(self._reports.values()), silences))
            else:
                self._name_missing(kind, wait)
            self._note(under_way=False, over=kind)  # before the others, which may ask again
            self._context.send(_TOPIC, {"over": kind})

    def _name_missing(self, kind: Kind, wait: str) -> None:
        silent = self._collect(kind)
        elsewhere = [report for report in self._reports.values() if not report.is_waiting]
        if elsewhere and not silent and kind == "collective":
            self._peers.wait(_FOLLOWS_WITHIN)
            silent = self._collect(kind)
            elsewhere = [report for report in self._reports.values() if not report.is_waiting]
        if self._peers.cause_or_departure is not None:
            return
        if silent:
            self._peers.report(self._silent_event(silent, wait))
        elif elsewhere and kind == "collective":
            places = " and ".join(f"{report.who} is in {report.place or 'no call of yours'}" for report in elsewhere)
            self._peers.report(event_of("absent", elsewhere[0].who, f"{wait}, and {places}; {_REMEDY}"))

    def _collect(self, kind: Kind) -> list[int]:
        """Ask all ranks for a report; returns those that have not answered."""
        self._note(under_way=True)
        everyone = {info.rank for info in self._table.ranks if not self._peers.has_ended(info.rank)}
        mine = self.describe() if kind == "hang" else self._brief_report()
        with self._peers.arrived:
            self._reports = {0: mine}
        self._context.send(_TOPIC, {"question": kind})
        self._await(lambda: self._reports.keys() >= everyone, self._seconds)
        return sorted(everyone - self._reports.keys())

    def _take(self, report: Report) -> None:
        with self._peers.arrived:
            self._reports[report.who.rank] = report
            self._peers.arrived.notify_all()

    # What follows.

    def _conclude(self, findings: Findings) -> None:
        diagnosis = findings.diagnosis
        if diagnosis is not None and self.publish(findings):
            self._peers.report(event_of("hung", diagnosis.who, diagnosis.sentence))
            for silence in findings.silences:
                process = stopped_process(silence.who, seen_from=self._mine)
                if process is not None:
                    with suppress(psutil.Error):
                        process.send_signal(signal.SIGCONT)  # it hears of the event, and ends as the others do

    def _silence(self, rank: int) -> Silence:
        is_stopped = stopped_process(self._table[rank], seen_from=self._mine) is not None
        return Silence(self._table[rank], self._seconds, is_stopped)

    def _silent_event(self, silent: list[int], wait: str) -> PeerEvent:
        others = "".join(f", {self._table[rank]}" for rank in silent[1:])
        first = self._silence(silent[0])
        stopped = " and its process is stopped (SIGSTOP)" if first.is_stopped else ""
        sentence = f"{first.who}{others} has not answered for {first.seconds:g} s{stopped}; {wait}"
        return event_of("hung", first.who, sentence)

    @property
    def _timeout(self) -> str:
        return f"{self._context.collective_timeout.total_seconds():g} s"


def stopped_process(info: RankInfo, *, seen_from: RankInfo) -> psutil.Process | None:
    """The process of a rank, if it is on the same host and has been stopped (SIGSTOP)."""
    if (info.host, info.network) != (seen_from.host, seen_from.network):
        return None
    with suppress(psutil.Error):
        process = psutil.Process(info.pid)
        return process if process.status() == psutil.STATUS_STOPPED else None
    return None
