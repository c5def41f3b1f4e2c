"""Ranks wait for each other where all must make the same call, and say so where they do not.

No collective is involved: each rank tells rank 0 over the channel which call it begins, and rank 0 tells all when the
last one has come. So a rank that is elsewhere, even in a collective of its own, is named, and no data are mixed up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from lightning_ddp_ext.rendezvous.call_counter import Call, CallCounter
from lightning_ddp_ext.rendezvous.peer_event import PeerEvent, event_of
from lightning_ddp_ext.rendezvous.wire import Message

if TYPE_CHECKING:
    from lightning_ddp_ext.rendezvous.process_context import ProcessContext

_TOPIC = "barrier"
_LONGEST_TEXT = 500

_GONE_ON = "has gone on without it"
_MAKE_IT = "call it on every rank, not for one rank alone, and give every rank as many batches"
_BE_THERE = "see what it does meanwhile (HangWatchdog prints that), or give the strategy a longer timeout"
_SAME_ORDER = "let every rank make the same calls in the same order"


class NamedBarriers:
    """This rank's side of all barriers; on rank 0 also the record of who has come.

    Args:
        context: this process among the ranks.
    """

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._peers = context.peers
        self._rank = context.world.rank
        self._world_size = len(context.table)
        self._counter = CallCounter(self._rank)
        self._open = 0
        context.listen(_TOPIC, self._hear)

    def advance(self) -> None:
        """Advance this rank's step counter, so that a skipped call can be detected.

        Every rank calls it at the same points, such as the beginning of a training step.

        Raises:
            RankAbsentError: another rank waits in a call that this one should have made before.
        """
        self._counter.steps += 1
        call = self._counter.missed()
        if call is not None:
            raise self._report_absence(call, [self._rank]).to_error()

    def begin(self, what: str, where: str = "", *, name: str = "") -> Call:
        """Say that this rank begins a call that every rank must make. It need not wait, if the call makes ranks wait.

        Args:
            what: the call, as a message shows it.
            where: file and line in the user's code, if known.
            name: what must be the same on every rank; ``what``, if left out.
        """
        what = what[:_LONGEST_TEXT]
        with self._peers.arrived:
            call = self._counter.begin((name or what)[:_LONGEST_TEXT], what, where[:_LONGEST_TEXT])
        self._send({"call": asdict(call)})
        if self._rank == 0:
            self._note(call)
        return call

    def enter(
        self,
        what: str,
        where: str = "",
        *,
        name: str = "",
        check: Callable[[], None] | None = None,
        is_patient: bool = False,
    ) -> None:
        """:meth:`begin` a call and :meth:`wait`. Collective."""
        self.wait(self.begin(what, where, name=name), check=check, is_patient=is_patient)

    def wait(self, call: Call, *, check: Callable[[], None] | None = None, is_patient: bool = False) -> None:
        """Wait until every rank has begun this call. Collective.

        Args:
            call: what :meth:`begin` returned.
            check: called whenever the timeout of a collective has passed; it may raise what is known better.
            is_patient: whether to wait on after that; if not, a rank that has not come by then is absent.

        Raises:
            RankAbsentError: a rank has gone on without this call, or has not come in time.
            RankMismatchError: a rank has begun another call instead.
            RankFailedError: one of its kinds; a rank failed, died or left.
        """
        while not self._is_open(call, self._context.collective_timeout.total_seconds()):
            if check is not None:
                check()
            if not is_patient:
                self._give_up(call)

    def _give_up(self, call: Call) -> None:
        if self._rank == 0:
            self._answer_overdue(call)
        else:
            self._send({"overdue": asdict(call)})
        if not self._is_open(call, self._context.timeouts.answer):
            raise self._report_absence(call, [0], "has not answered", _BE_THERE).to_error()

    def _is_open(self, call: Call, seconds: float) -> bool:
        """Whether all ranks have come within ``seconds``; raises if one of them cannot."""
        peers = self._peers
        with peers.arrived:
            came = peers.arrived.wait_for(
                lambda: self._open >= call.number or peers.cause_or_departure is not None, seconds
            )
            event = None if self._open >= call.number else peers.cause_or_departure
        if event is not None:
            raise event.to_error()
        return came

    def _send(self, message: Message) -> None:
        self._context.send(_TOPIC, message)

    # On the channel's thread, or on rank 0's main one.

    def _hear(self, message: Message) -> None:
        if "open" in message:
            self._let_in(message["open"])
        elif "overdue" in message:
            self._answer_overdue(Call(**message["overdue"]))
        else:
            self._note(Call(**message["call"]))

    def _note(self, call: Call) -> None:
        """Note a call; on rank 0 let all in when the last rank has come, or say which one is in the wrong place."""
        with self._peers.arrived:
            self._counter.hear(call)
            missed = self._counter.missed()
            is_odd = self._rank == 0 and self._counter.contradicts(call)
            is_complete = self._rank == 0 and not is_odd and self._counter.is_complete(call, self._world_size)
        if is_odd:
            self._report_mismatch(self._counter.contradiction(call))
        elif is_complete:
            self._send({"open": call.number})
            self._let_in(call.number)
        elif missed is not None:
            self._report_absence(missed, [self._rank])

    def _let_in(self, number: int) -> None:
        with self._peers.arrived:
            self._open = max(self._open, number)
            self._counter.forget(number)
            self._peers.arrived.notify_all()

    def _answer_overdue(self, call: Call) -> None:
        """On rank 0: name the ranks that have not come to a call."""
        with self._peers.arrived:
            absent = self._counter.absent(self._world_size, call.number) if self._open < call.number else []
        if absent:  # else the last one has come this moment, and all are about to be let in
            self._report_absence(call, absent, "has not come in time", _BE_THERE)

    def _report_absence(
        self, call: Call, absent: list[int], finding: str = _GONE_ON, remedy: str = _MAKE_IT
    ) -> PeerEvent:
        table = self._context.table
        names = ", ".join(str(table[rank]) for rank in absent)
        sentence = f"rank {call.rank} began {call}, and {names} did not: it {finding}; {remedy}"
        return self._peers.report(event_of("absent", table[absent[0]], sentence))

    def _report_mismatch(self, calls: list[Call]) -> None:
        table = self._context.table
        places = "; ".join(f"{table[call.rank]} began {call}" for call in calls)
        sentence = f"ranks wait for each other in different places: {places}; {_SAME_ORDER}"
        self._peers.report(event_of("mismatched", table[calls[0].rank], sentence))
