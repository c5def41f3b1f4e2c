"""Ranks wait for each other where all must make the same call, and say so where they do not.

No collective is involved: each rank tells rank 0 over its lifeline which call it begins, and rank 0 tells all when the
last one has come. So a rank that is elsewhere, in a collective of its own even, is named, and nobody's data go astray.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

from lightning_ddp_ext.rendezvous.calls import Call, Calls
from lightning_ddp_ext.rendezvous.line import Message
from lightning_ddp_ext.rendezvous.news import News

if TYPE_CHECKING:
    from lightning_ddp_ext.rendezvous.membership import Membership

# Seconds that rank 0's thread has to answer a rank that has waited too long.
_ANSWERS_WITHIN = 5.0

_GONE_ON = "has gone on without it"
_MAKE_IT = "call it on every rank, not for one rank alone, and give every rank as many batches"
_BE_THERE = "see what it does meanwhile (HangWatchdog prints that), or give the strategy a longer timeout"
_SAME_ORDER = "let every rank make the same calls in the same order"


class Meetings:
    """This rank's side of all meetings, and on rank 0 the register of who has come.

    Args:
        membership: this process among the ranks.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._table = membership.table
        self._rank = membership.world.rank
        self._arrived = membership.arrived
        self._calls = Calls(self._rank)
        self._open = 0
        membership.listen("meeting", self._hear)

    def advance(self) -> None:
        """This rank passes a point that all ranks pass in the same order, such as the beginning of a training step.

        Raises:
            RankAbsentError: another rank waits in a call that this one should have made before.
        """
        self._calls.steps += 1
        call = self._calls.missed()
        if call is not None:
            raise self._membership.report(self._absence(call, [self._rank])).to_error()

    def begin(self, what: str, where: str = "", *, name: str = "") -> Call:
        """Say that this rank begins a call that every rank must make. It need not wait, if the call makes ranks wait.

        Args:
            what: the call, as a message shows it.
            where: file and line of the user's, if known.
            name: what must be the same on every rank; ``what``, if left out.
        """
        with self._arrived:
            call = self._calls.begin(name or what, what, where)
        self._send({"call": asdict(call)})
        self._lead()
        return call

    def meet(
        self,
        what: str,
        where: str = "",
        *,
        name: str = "",
        patience: Callable[[], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Begin a call and :meth:`wait`."""
        self.wait(self.begin(what, where, name=name), patience=patience, check=check)

    def wait(
        self, call: Call, *, patience: Callable[[], None] | None = None, check: Callable[[], None] | None = None
    ) -> None:
        """Wait until every rank has begun this call, and none has begun another one instead.

        Args:
            call: what :meth:`begin` returned.
            patience: called whenever the timeout of a collective has passed, and raises if waiting is in vain;
                ``None``: a rank that has not come by then is absent.
            check: called before a rank is said to be absent; it may raise what is known better.

        Raises:
            RankAbsentError: a rank has gone on without this call, or has not come in time.
            RankMismatchError: a rank has begun another call instead.
            RankFailedError: one of its kinds; a rank failed, died or left.
        """
        while not self._is_open(call, self._membership.collective_timeout.total_seconds()):
            (patience or partial(self._give_up, call, check))()

    def _give_up(self, call: Call, check: Callable[[], None] | None) -> None:
        if check is not None:
            check()
        self._send({"overdue": asdict(call)})
        self._answer_overdue(call)
        if not self._is_open(call, _ANSWERS_WITHIN):
            raise self._membership.report(self._absence(call, [0], "has not answered", _BE_THERE)).to_error()

    def _hear(self, message: Message) -> None:
        """Called by the lifelines' thread, while the main one may be waiting in some other collective already."""
        if "open" in message:
            self._let_in(message["open"])
            return
        call = Call(**(message.get("call") or message["overdue"]))
        if "overdue" in message:
            self._answer_overdue(call)
            return
        with self._arrived:
            self._calls.hear(call)
        missed = self._calls.missed()
        if missed is not None:
            self._membership.report(self._absence(missed, [self._rank]))
        self._lead()

    def _send(self, message: Message) -> None:
        self._membership.send("meeting", message)

    def _is_open(self, call: Call, seconds: float) -> bool:
        """Whether all have come within ``seconds``; raises at news."""
        with self._arrived:
            heard = self._membership
            came = self._arrived.wait_for(lambda: self._open >= call.number or bool(heard.news_or_departure), seconds)
            news = None if self._open >= call.number else heard.news_or_departure
        if news is not None:
            raise news.to_error()
        return came

    def _lead(self) -> None:
        """On rank 0: let all in, or say who is in the wrong place."""
        if self._rank != 0:
            return
        with self._arrived:
            calls = self._calls.contradiction()
            complete = self._calls.begun_by_all(len(self._table.claims))
            is_news = complete > self._open and not calls
        if calls:
            self._membership.report(self._contradiction(calls))
        elif is_news:
            self._send({"open": complete})
            self._let_in(complete)

    def _let_in(self, number: int) -> None:
        with self._arrived:
            self._open = max(self._open, number)
            self._arrived.notify_all()

    def _answer_overdue(self, call: Call) -> None:
        """On rank 0: name the ranks that a call has waited for in vain."""
        if self._rank == 0 and self._open < call.number:
            with self._arrived:
                absent = self._calls.absent(range(len(self._table.claims)), call.number)
            if absent:  # else the last one has come this moment, and all are about to be let in
                self._membership.report(self._absence(call, absent, "has not come in time", _BE_THERE))

    def _absence(self, call: Call, absent: list[int], finding: str = _GONE_ON, remedy: str = _MAKE_IT) -> News:
        who = self._table[absent[0]]
        others = "".join(f", {self._table[rank]}" for rank in absent[1:])
        sentence = f"rank {call.rank} began {call}, and {who}{others} did not: it {finding}; {remedy}"
        return News("absent", who.rank, who.host, who.pid, sentence)

    def _contradiction(self, calls: list[Call]) -> News:
        odd = self._table[calls[0].rank]
        places = "; ".join(f"{self._table[call.rank]} began {call}" for call in calls)
        sentence = f"ranks wait for each other in different places: {places}; {_SAME_ORDER}"
        return News("mismatched", odd.rank, odd.host, odd.pid, sentence)
