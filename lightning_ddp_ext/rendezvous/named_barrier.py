"""Ranks wait for each other where all must make the same call, and say so where they do not.

No collective is involved: each rank tells rank 0 over the channel which call it begins, and rank 0 tells all when the
last one has come. So a rank that is elsewhere, even in a collective of its own, is named, and no data are mixed up.

Each call has an ordinal, and carries the number of steps that its rank has begun before. In a correct program all ranks
make the same calls in the same order, between the same steps. So a rank whose call of the same ordinal has another name
will never make this one, and neither will a rank that has begun more steps and has made fewer calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from lightning_ddp_ext.rendezvous.peer_event import PeerEvent, event_of
from lightning_ddp_ext.rendezvous.wire import Message

if TYPE_CHECKING:
    from lightning_ddp_ext.rendezvous.process_context import ProcessContext

_TOPIC = "barrier"
_LONGEST_TEXT = 500

_GONE_ON = "has gone on without it"
_MAKE_IT = (
    "call it on every rank, not for one rank alone; if ranks have different numbers of batches, pass "
    "DDPExtStrategy(uneven_inputs='join') or 'stop_at_shortest'"
)
_BE_THERE = "see what it does meanwhile (HangWatchdog prints that), or give the strategy a longer timeout"
_SAME_ORDER = "let every rank make the same calls in the same order"


@dataclass(frozen=True)
class Call:
    """The beginning of a call on one rank.

    Attributes:
        rank: that makes it.
        number: its ordinal on that rank, from 1 on.
        steps: that the rank has begun before.
        name: what must be the same on all ranks.
        what: the call as a message shows it.
        where: file and line in the user's code, if known.
    """

    rank: int
    number: int
    steps: int
    name: str
    what: str
    where: str = ""

    def __str__(self) -> str:
        return f"{self.what} ({self.where})" if self.where else self.what


class NamedBarriers:
    """This rank's side of all barriers; on rank 0 also the record of who has come. O(1) for each message."""

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._peers = context.peers
        self._rank = context.world.rank
        self._steps = 0
        self._made = 0
        self._open = 0
        self._waiting: dict[int, list[Call]] = {}
        context.listen(_TOPIC, self._hear)

    def advance(self) -> None:
        """Advance this rank's step counter, so that a skipped call can be detected.

        Every rank calls it at the same points, such as the beginning of a training step.

        Raises:
            RankAbsentError: another rank waits in a call that this one should have made before.
        """
        self._steps += 1
        call = self._missed()
        if call is not None:
            raise self._report_absence(call, [self._rank]).to_error()

    def _missed(self) -> Call | None:
        """A call that another rank waits in, and that this rank has gone past."""
        waiting = self._waiting.get(self._made + 1, [])
        earliest = min(waiting, key=lambda call: call.steps, default=None)
        return earliest if earliest is not None and self._steps > earliest.steps else None

    def begin(self, what: str, where: str = "", *, name: str = "") -> Call:
        """Say that this rank begins a call that every rank must make. It need not wait, if the call makes ranks wait.

        Args:
            what: the call, as a message shows it.
            where: file and line in the user's code, if known.
            name: what must be the same on every rank; ``what``, if left out.
        """
        what, where, name = what[:_LONGEST_TEXT], where[:_LONGEST_TEXT], (name or what)[:_LONGEST_TEXT]
        with self._peers.arrived:
            self._made += 1
            call = Call(self._rank, self._made, self._steps, name, what, where)
        self._tell("call", call)
        return call

    def enter(
        self,
        what: str,
        where: str = "",
        *,
        name: str = "",
        check: Callable[[], None] = lambda: None,
        is_patient: bool = False,
    ) -> None:
        """:meth:`begin` a call and :meth:`wait`. Collective."""
        self.wait(self.begin(what, where, name=name), check=check, is_patient=is_patient)

    def wait(self, call: Call, *, check: Callable[[], None] = lambda: None, is_patient: bool = False) -> None:
        """Wait until every rank has begun this call. Collective.

        Args:
            call: what :meth:`begin` returned.
            check: called whenever the timeout of a collective has passed; it may raise what is known better.
            is_patient: whether to wait on after that; if not, a rank that has not come by then is absent.

        Raises:
            RankAbsentError: a rank has gone on without this call, or has not come in time.
            RankAbsentError: a rank has begun another call instead.
            RankFailedError: one of its kinds; a rank failed, died or left.
        """
        while not self._is_open(call, self._context.collective_timeout.total_seconds()):
            check()
            if not is_patient:
                self._give_up(call)

    def _give_up(self, call: Call) -> None:
        self._tell("overdue", call)
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

    def _tell(self, what: str, call: Call) -> None:
        """Tell rank 0 of a call; rank 0 tells itself and all others."""
        message = {what: asdict(call)}
        self._context.send(_TOPIC, message)
        if self._rank == 0:
            self._hear(message)

    # On the channel's thread, or on rank 0's main one.

    def _hear(self, message: Message) -> None:
        if "open" in message:
            self._let_in(message["open"])
        elif "call" in message:
            self._note(Call(**message["call"]))
        elif self._rank == 0:
            self._answer_overdue(Call(**message["overdue"]))

    def _note(self, call: Call) -> None:
        """Note a call; on rank 0 let all in when the last rank has come, or say which one is in the wrong place."""
        with self._peers.arrived:
            calls = self._waiting.setdefault(call.number, [])
            calls.append(call)
            is_odd = self._rank == 0 and call.name != calls[0].name
            is_complete = len(calls) == len(self._context.table) and len({each.name for each in calls}) == 1
            missed = self._missed()
        if is_odd:
            self._report_mismatch(calls)
        elif is_complete:
            self._context.send(_TOPIC, {"open": call.number})
            self._let_in(call.number)
        elif missed is not None:
            self._report_absence(missed, [self._rank])

    def _let_in(self, number: int) -> None:
        with self._peers.arrived:
            self._open = max(self._open, number)
            self._waiting.pop(number, None)
            self._peers.arrived.notify_all()

    def _answer_overdue(self, call: Call) -> None:
        """On rank 0: name the ranks that have not come to a call."""
        with self._peers.arrived:
            came = {each.rank for each in self._waiting.get(call.number, [])}
            absent = [info.rank for info in self._context.table if info.rank not in came]
            is_open = self._open >= call.number
        if absent and not is_open:  # else the last one has come this moment, and all are about to be let in
            self._report_absence(call, absent, "has not come in time", _BE_THERE)

    def _report_absence(
        self, call: Call, absent: list[int], finding: str = _GONE_ON, remedy: str = _MAKE_IT
    ) -> PeerEvent:
        table = self._context.table
        names = ", ".join(str(table[rank]) for rank in absent)
        sentence = f"rank {call.rank} began {call}, and {names} did not: it {finding}; {remedy}"
        return self._peers.report(event_of("absent", table[absent[0]], sentence))

    def _report_mismatch(self, calls: list[Call]) -> None:
        """The rarest call is the odd one."""
        names = [call.name for call in calls]
        ordered = sorted(calls, key=lambda call: (names.count(call.name), call.name, call.rank))
        table = self._context.table
        places = "; ".join(f"{table[call.rank]} began {call}" for call in ordered)
        sentence = f"ranks wait for each other in different places: {places}; {_SAME_ORDER}"
        self._peers.report(event_of("mismatched", table[ordered[0].rank], sentence))
