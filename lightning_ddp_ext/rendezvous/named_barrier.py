"""Wait for all ranks in calls that each must make, and name a rank that misses one.

A barrier does not use a collective. Each rank reports the start of a call to rank 0
over the channel, and rank 0 opens the barrier for all ranks after the last report. A
rank that is elsewhere, even in another collective, is therefore named, and does not mix
up the data of two calls.

A call has an ordinal, and the number of steps that its rank started before it. In a
correct program, all ranks make the same calls in the same order, between the same
steps. A rank will never make a call if its own call with this ordinal has another name,
or if it has started more steps and made fewer calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

from lightning_ddp_ext.rank_lists import activities_in_words, listed
from lightning_ddp_ext.rendezvous.channel import Message
from lightning_ddp_ext.rendezvous.peers import PeerEvent, Peers, event_of

_LONGEST_TEXT = 500  # characters of each text in a call

_MAKE_IT = (
    "make this call on every rank; if the ranks have different numbers of batches, use "
    "DDPExtStrategy(uneven_inputs='stop_at_shortest')"
)
SAME_CALLS = "make sure that every rank makes the same calls in the same order"
_BE_IN_TIME = "find out what takes it so long, or pass a longer timeout to the strategy"


@dataclass(frozen=True)
class Call:
    """The start of a call on one rank.

    Attributes:
        rank: the rank that makes it.
        number: its ordinal on that rank, counted from 1.
        steps: the number of steps that the rank started before it.
        name: the name that must be the same on all ranks.
        what: the call, as messages show it.
        where: file and line in the user's code, if known.
        remedy: advice for a rank that skips it; empty for the usual one.
    """

    rank: int
    number: int
    steps: int
    name: str
    what: str
    where: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.what} ({self.where})" if self.where else self.what


class NamedBarriers:
    """This rank's part in all barriers, and on rank 0 the record of all ranks' calls.

    Args:
        peers: the other ranks.
        timeout: returns the collective timeout.

    Attributes:
        made: the number of calls that this rank has started.
        awaited: the call in which this rank is waiting for the others, if any.
    """

    def __init__(self, peers: Peers, timeout: Callable[[], timedelta]) -> None:
        self._peers = peers
        self._timeout = timeout
        # By number: the calls of all ranks on rank 0, and elsewhere only those of rank 0.
        self._waiting: dict[int, list[Call]] = {}
        self.awaited: Call | None = None
        self.made = 0
        self._steps = 0  # that this rank has started
        self._open = 0  # the number of the last call that all ranks have started
        peers.channel.on_message("call", self._record_call)
        peers.channel.on_message("open", self._open_barrier)
        peers.channel.on_message("overdue", self._report_overdue)

    def advance(self) -> None:
        """Advance this rank's step counter, so that a skipped call can be detected.

        Every rank must call it at the same points, such as the beginning of a training
        step.

        Raises:
            RankAbsentError: another rank is waiting in a call that this rank should
                already have made.
        """
        self._steps += 1
        call = self._skipped_call()
        if call is not None:
            raise self._report_absence(call, [self._peers.rank]).to_error()

    def _skipped_call(self) -> Call | None:
        """Return a call that this rank skipped and another one waits in, if any."""
        waiting = self._waiting.get(self.made + 1, [])
        earliest = min(waiting, key=lambda call: call.steps, default=None)
        return earliest if earliest is not None and self._steps > earliest.steps else None

    def enter(
        self,
        what: str,
        where: str = "",
        *,
        name: str = "",
        remedy: str = "",
        if_late: Callable[[], None] | None = None,
    ) -> None:
        """Report the start of a call, and wait until every rank has started it.

        Collective: every rank must call it.

        Args:
            what: the call, as messages show it.
            where: file and line in the user's code, if known.
            name: the name that must be the same on every rank; by default ``what``.
            remedy: advice for a rank that skips it, if the user does not make the call.
            if_late: called after each collective timeout to continue the wait, unless
                it raises; by default, ranks that have not started the call by then are
                absent.

        Raises:
            RankAbsentError: a rank skipped this call, started another one, or did not
                start it in time.
            RankFailedError: a rank failed, died or left; it may be a subclass.
        """
        texts = [text[:_LONGEST_TEXT] for text in (name or what, what, where, remedy)]
        with self._peers.arrived:
            self.made += 1
            call = Call(self._peers.rank, self.made, self._steps, *texts)
        receivers = self._peers.everyone if self._peers.rank == 0 else [0]
        self._peers.tell(receivers, "call", {"call": asdict(call)})
        self.awaited = call
        try:
            while not self._is_open(call, self._timeout().total_seconds()):
                if if_late is None:
                    self._end_wait(call)
                else:
                    if_late()
        finally:
            self.awaited = None

    def _end_wait(self, call: Call) -> None:
        """Have rank 0 name the absent ranks, or name rank 0 if it does not reply."""
        self._peers.tell([0], "overdue", {"call": asdict(call)})
        if not self._is_open(call, self._peers.timeouts.answer):
            raise self._report_absence(call, [0], "did not answer", _BE_IN_TIME).to_error()

    def _is_open(self, call: Call, seconds: float) -> bool:
        """Wait up to ``seconds``, and return whether all ranks have started the call.

        Raise an error if one of them cannot.
        """
        if self._peers.wait_for(lambda: self._open >= call.number, seconds):
            # Rank 0 may exit next, and must first have opened the barrier for the others.
            self._peers.channel.wait_until_sent()
            return True
        event = self._peers.cause_or_departure
        if event is not None:
            raise replace(event, reason=event.reason or str(call)).to_error()
        return False

    # Called by other ranks.

    def _record_call(self, body: Message) -> None:
        """Record a call, and report it if this rank skipped it.

        Rank 0, which alone has the calls of several ranks, opens the barrier, or names a
        differing rank.
        """
        call = Call(**body["call"])
        calls = self._waiting.setdefault(call.number, [])
        calls.append(call)
        missed = self._skipped_call()
        if len({each.name for each in calls}) > 1:
            self._report_mismatch(calls)
        elif len(calls) == len(self._peers.everyone):
            self._peers.tell(self._peers.everyone, "open", {"number": call.number})
        elif missed is not None:
            self._report_absence(missed, [self._peers.rank])

    def _open_barrier(self, body: Message) -> None:
        number = body["number"]
        self._open = max(self._open, number)
        self._waiting.pop(number, None)

    def _report_overdue(self, body: Message) -> None:
        """Report the ranks that have not started a call; for rank 0."""
        call = Call(**body["call"])
        started = {other.rank for other in self._waiting.get(call.number, [])}
        absent = [rank for rank in self._peers.everyone if rank not in started]
        if absent and self._open < call.number:
            self._report_absence(call, absent, "did not do so in time", _BE_IN_TIME)

    def _report_absence(
        self,
        call: Call,
        absent: list[int],
        finding: str = "continued without it",
        remedy: str = "",
    ) -> PeerEvent:
        remedy = remedy or call.remedy or _MAKE_IT
        infos = [self._peers.table[rank] for rank in absent]
        sentence = f"rank {call.rank} began {call}, but {listed(infos)} {finding}; {remedy}"
        return self._peers.report(event_of("absent", infos[0], sentence))

    def _report_mismatch(self, calls: list[Call]) -> None:
        names = Counter(call.name for call in calls)
        odd = min(calls, key=lambda call: (names[call.name], call.name, call.rank))
        table = self._peers.table
        places = activities_in_words({table[call.rank]: str(call) for call in calls}, "began")
        remedies = "; ".join([SAME_CALLS, *remedies_of(calls)])
        sentence = f"ranks are waiting for each other in different calls: {places}; {remedies}"
        self._peers.report(event_of("absent", table[odd.rank], sentence))


def remedies_of(calls: Iterable[Call]) -> list[str]:
    """Return what the calls advise, without the usual advice."""
    return list(dict.fromkeys(call.remedy for call in calls if call.remedy))
