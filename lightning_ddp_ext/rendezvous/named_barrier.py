"""Wait for all ranks in calls that each must make, and name a rank that misses one.

A barrier does not use a collective. Each rank reports the start of a call to rank 0
over the channel, and rank 0 opens the barrier for all ranks after the last report. A
rank that is elsewhere, even in another collective, is therefore named, and does not mix
up the data of two calls.

A call has an ordinal, and the number of steps that its rank started before it. In a
correct program, all ranks make the same calls in the same order, between the same
steps. A rank will never make a call if its own call with this ordinal has another name,
or if it has started more steps and made fewer calls. For example, both ranks have made 4
calls. Rank 0 starts step 7, and then call 5, which thus has 7 steps. Once rank 1 starts
step 8 and has still made 4 calls, it has skipped call 5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from lightning_ddp_ext.rank_lists import activities_in_words, grouped, listed
from lightning_ddp_ext.rendezvous.channel import Message
from lightning_ddp_ext.rendezvous.peers import PeerEvent, Peers, event_of
from lightning_ddp_ext.rendezvous.request import RankInfo

_MAKE_IT = (
    "make this call on every rank; if the ranks have different numbers of batches, use "
    "DDPExtStrategy(uneven_inputs='stop_at_shortest')"
)
_SAME_CALLS = "make sure that every rank makes the same calls in the same order"


@dataclass(frozen=True)
class Call:
    """The start of a call on one rank.

    Attributes:
        rank: the rank that makes it.
        number: its ordinal on that rank, counted from 1.
        steps: the number of steps that the rank started before it.
        name: identifies the call; it must be the same on all ranks.
        what: describes the call in messages, perhaps differently on each rank.
        where: file and line in the user's code, if known.
        remedy: advice for a rank that skips it; empty for the usual one.
        may_be_late: whether a rank may take as long as it needs to start the call.
    """

    rank: int
    number: int
    steps: int
    name: str
    what: str
    where: str = ""
    remedy: str = ""
    may_be_late: bool = False

    def __str__(self) -> str:
        return f"{self.what} ({self.where})" if self.where else self.what


class NamedBarriers:
    """This rank's part in all barriers, and on rank 0 the record of all ranks' calls.

    The main thread makes calls, and the channel's thread records those of other ranks.

    Args:
        peers: the other ranks.

    Attributes:
        made: the number of calls that this rank has started.
        awaited: the call in which this rank is waiting for the others, if any.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self.awaited: Call | None = None
        # These two only change with the lock of messages, see `_skipped_call`.
        self.made = 0
        self._steps = 0  # the number of steps that this rank has started
        # The received calls, by number, until their barrier opens: rank 0 receives those
        # of all ranks, and the others receive those of rank 0.
        self._received: dict[int, list[Call]] = {}
        self._opened = 0  # the number of the last call that all ranks have started
        peers.channel.on_message("call", self._record_call)
        peers.channel.on_message("open", self._open_barrier)

    def advance(self) -> None:
        """Advance this rank's step counter, so that a skipped call can be detected.

        Every rank must call it at the same points, such as the beginning of a training
        step.

        Raises:
            RankAbsentError: another rank is waiting in a call that this rank should
                already have made.
        """
        with self._peers.arrived:
            self._steps += 1
            call = self._skipped_call()
        if call is not None:
            self._report_skipped(call)
            self._peers.check()

    def _skipped_call(self) -> Call | None:
        """Return a call that this rank skipped and another one waits in, if any.

        It has the number of this rank's next call, but fewer steps before it than this
        rank has started. A step or a message can cause this, so both look for it, with
        the lock of messages.
        """
        others = self._received.get(self.made + 1, [])
        skipped = [call for call in others if call.steps < self._steps]
        return min(skipped, key=lambda call: call.steps, default=None)

    def enter(
        self,
        what: str,
        where: str = "",
        *,
        name: str = "",
        remedy: str = "",
        may_be_late: bool = False,
    ) -> None:
        """Report the start of a call, and wait until every rank has started it.

        Collective: every rank must call it.

        Args:
            what: the call, as messages show it.
            where: file and line in the user's code, if known.
            name: the name that must be the same on every rank; by default ``what``.
            remedy: advice for a rank that skips it, if the user does not make the call.
            may_be_late: whether a rank may take as long as it needs. Otherwise,
                ``supervision.pusher`` ends the wait after the collective timeout.

        Raises:
            RankAbsentError: a rank skipped this call, started another one, or did not
                start it in time.
            RankFailedError: a rank failed, died or left; it may be a subclass.
        """
        with self._peers.arrived:
            self.made += 1
            call = Call(
                rank=self._peers.rank,
                number=self.made,
                steps=self._steps,
                name=name or what,
                what=what,
                where=where,
                remedy=remedy,
                may_be_late=may_be_late,
            )
        receivers = self._peers.everyone if self._peers.rank == 0 else [0]
        self._peers.tell(receivers, "call", {"call": asdict(call)})
        self.awaited = call
        try:
            is_open = self._peers.wait_for(lambda: self._opened >= call.number)
        finally:
            self.awaited = None
        if not is_open:
            event = self._peers.cause_or_departure
            assert event is not None  # it has ended the wait
            # A departure has no reason, so its message names the call.
            raise replace(event, reason=event.reason or str(call)).to_error()
        # Rank 0 may exit next, and must first have opened the barrier for the others.
        self._peers.channel.wait_until_sent()

    # Messages, with their lock: on the channel's thread, and for rank 0's own calls on the
    # main thread.

    def _record_call(self, body: Message) -> None:
        """Record a call, and report it if this rank skipped it.

        Rank 0, which alone has the calls of several ranks, opens the barrier, or names a
        differing rank.
        """
        call = Call(**body["call"])
        calls = self._received.setdefault(call.number, [])
        calls.append(call)
        if len({each.name for each in calls}) > 1:
            self._report_mismatch(calls)
        elif len(calls) == len(self._peers.everyone):
            self._peers.tell(self._peers.everyone, "open", {"number": call.number})
        elif (missed := self._skipped_call()) is not None:
            self._report_skipped(missed)

    def _open_barrier(self, body: Message) -> None:
        self._opened = body["number"]  # these arrive in order
        self._received.pop(self._opened, None)

    def _report_skipped(self, call: Call) -> None:
        self._peers.report(
            event_of_absence(
                call, [self._peers.mine], "continued without it", call.remedy or _MAKE_IT
            )
        )

    def _report_mismatch(self, calls: list[Call]) -> None:
        texts = {self._peers.table[call.rank]: str(call) for call in calls}
        self._peers.report(event_of_different_calls(texts, "began", calls))


def event_of_absence(
    call: Call, absent: Sequence[RankInfo], finding: str, remedy: str
) -> PeerEvent:
    """Return the event of ranks that have not started a call in which another one waits."""
    return event_of(
        "absent",
        absent[0],
        f"rank {call.rank} began {call}, but {listed(absent)} {finding}; {remedy}",
    )


def event_of_different_calls(
    texts: Mapping[RankInfo, str], verb: str, calls: Iterable[Call]
) -> PeerEvent:
    """Return the event of ranks that wait for each other, which accuses one in the rarest call.

    Args:
        texts: the call of each rank, with file and line.
        verb: what a rank did with its call, for the message.
        calls: those of the calls that are named barriers, which may have a remedy.
    """
    _, (odd, *_) = grouped(texts)[0]
    remedies = dict.fromkeys(call.remedy for call in calls if call.remedy)
    sentence = (
        f"ranks are waiting for each other in different calls: {activities_in_words(texts, verb)};"
        f" {'; '.join(remedies) or _SAME_CALLS}"
    )
    return event_of("absent", odd, sentence)
