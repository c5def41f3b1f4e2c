"""On rank 0: keep the last status of each rank, and find the rank that others wait for.

Each rank pushes its ``status`` while it waits (``supervision.pusher``). The table reports a
rank to all ranks (``rendezvous.peers``), which then raise:

=========================================================  =============================
The statuses show                                          Reported
=========================================================  =============================
a deadlock, twice, without processor time in between       a rank in the rarest call
for a question: a rank pushes none                         that rank
for a question about a collective: a rank is in another    that rank
one, or elsewhere while ranks have waited for the timeout
for a question about a named barrier: a rank is late       that rank
=========================================================  =============================

In a **deadlock**, ranks are in different calls, so none of them can continue:

- a *mismatch*: ranks entered different collectives with the same number in a group;
- a *circular wait*: each rank is in a call that another one of them has not made.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from lightning_ddp_ext.rank_lists import listed
from lightning_ddp_ext.rendezvous.channel import Message
from lightning_ddp_ext.rendezvous.named_barrier import (
    Call,
    event_of_absence,
    event_of_different_calls,
)
from lightning_ddp_ext.rendezvous.peers import PeerEvent, Peers, event_of
from lightning_ddp_ext.rendezvous.request import RankInfo
from lightning_ddp_ext.supervision.flight_recorder import Collective, GroupProgress
from lightning_ddp_ext.supervision.status import Status

_RETURNING = 1.0  # seconds from the first rank that returns from a collective to the last
_LONGER = "pass a longer timeout (after a signal: save_deadline) to the strategy"
_BE_IN_TIME = f"find out what takes it so long, or {_LONGER}"
_TAKES_LONGER = f"make sure that every rank makes the same calls; if one takes longer, {_LONGER}"


class StatusTable:
    """The last status of each rank, and the questions that have no answer yet.

    The channel's thread records the statuses of other ranks, and the thread of
    ``StatusPusher`` rank 0's own, and decides; both hold the lock of ``peers.arrived``.

    Args:
        peers: the other ranks.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._last = {info.rank: Status(info) for info in peers.table}
        self._received_at: dict[int, float] = {}  # by rank
        self._asked_at: float | None = None  # the first question without an answer
        peers.channel.on_message("status", self._record_status)

    def _record_status(self, body: Message) -> None:
        rank = body["from"]
        self._received_at[rank] = time.monotonic()
        if body["status"] is not None:
            self._last[rank] = Status.from_dict(body["status"])
        if self._last[rank].question and self._asked_at is None:
            self._asked_at = self._received_at[rank]
            self._peers.tell(self._peers.everyone, "look", {"is_watched": True, "answered": []})

    def decide(self, now: float) -> None:
        """Report a deadlock, and answer questions; called at short intervals."""
        with self._peers.arrived:
            if deadlock := deadlock_in(self._since(now - self._peers.timeouts.answer)):
                self._peers.report(deadlock)
            if self._asked_at is not None:
                self._answer(now, self._asked_at)

    def _since(self, moment: float) -> list[Status]:
        """Return the statuses that ranks have pushed since a ``time.monotonic()``."""
        ranks = [rank for rank, received_at in self._received_at.items() if received_at > moment]
        return [self._last[rank] for rank in sorted(ranks)]

    def _answer(self, now: float, asked_at: float) -> None:
        """Answer all questions, unless later statuses may show more.

        Only statuses after the first question count. If each rank has pushed one and a
        rank is not waiting, it may just be returning from the collective, so only later
        ones count. Each rank has some seconds to push a status that counts.
        """
        first = self._since(asked_at)
        may_return = len(first) == len(self._peers.everyone) and not all(
            status.waits for status in first
        )
        counting_from = asked_at + _RETURNING if may_return else asked_at
        statuses = self._since(counting_from)
        present = [status.who for status in statuses]
        silent = [who for who in self._peers.table if who not in present]
        if silent and now < counting_from + self._peers.timeouts.answer:
            return
        # A status without a question has crossed an earlier answer.
        asking = [status for status in statuses if status.question]
        for status in asking:
            event = _answer_to(status, statuses, silent)
            if event is not None and self._peers.cause_or_departure is None:
                self._peers.report(event)
        self._asked_at = None
        self._peers.tell(
            self._peers.everyone,
            "look",
            {"is_watched": False, "answered": [status.question for status in asking]},
        )


# Answers to a rank that asks; ``wait`` is its question, a sentence about its wait.


def _answer_to(
    asking: Status, statuses: Sequence[Status], silent: Sequence[RankInfo]
) -> PeerEvent | None:
    """Return the event of the rank that the asking rank waits for, if any."""
    if silent:
        return silent_rank(silent, asking.question)
    if asking.awaited is not None:
        return _rank_outside_barrier(statuses, asking.awaited)
    return _rank_outside_collective(statuses, asking.question)


def silent_rank(silent: Sequence[RankInfo], wait: str) -> PeerEvent:
    """Return the event of the first of the ranks that did not push their status."""
    silence = listed((f"{who} has not answered" for who in silent), separator="; ")
    return event_of("hung", silent[0], f"{silence}; {wait}")


def _rank_outside_barrier(statuses: Sequence[Status], call: Call) -> PeerEvent | None:
    """Return the event of ranks that have not started a call in time, if any."""
    absent = [status.who for status in statuses if status.calls_made < call.number]
    if not absent or call.may_be_late:
        return None
    return event_of_absence(call, absent, "did not do so in time", _BE_IN_TIME)


def _rank_outside_collective(statuses: Sequence[Status], wait: str) -> PeerEvent | None:
    """Return the event of a rank that others wait for in a collective, if any.

    It entered another collective, or is not waiting while others time out.
    """
    if mismatch := _mismatch_in(statuses):
        return mismatch
    elsewhere = [status for status in statuses if not status.waits]
    has_timed_out = any(status.waits and status.has_timed_out for status in statuses)
    if not elsewhere or not has_timed_out:
        return None
    places = listed(
        (f"{status.who} is in {status.place or 'library code'}" for status in elsewhere),
        separator=" and ",
    )
    return event_of("absent", elsewhere[0].who, f"{wait}, but {places}; {_TAKES_LONGER}")


# Deadlocks.


def deadlock_in(statuses: Sequence[Status]) -> PeerEvent | None:
    """Return the event of a deadlock among ranks with settled calls, if any.

    A settled status repeats the pending calls of the rank's previous one, and a blocked
    main thread has used no processor time in between. A rank that is between two calls
    thus does not count.
    """
    settled = [status for status in statuses if status.is_settled]
    calls = {_call_of(status) for status in settled if status.awaited or status.unfinished}
    if len(calls) < 2:  # a common case, also with hundreds of ranks
        return None
    return _mismatch_in(settled) or _circular_wait_in(settled)


def _mismatch_in(statuses: Sequence[Status]) -> PeerEvent | None:
    """Return the event of a mismatch, if any.

    At least one of its ranks is waiting in its collective.
    """
    for group, number in _pending_in(statuses):
        entered = [
            (status, progress.recent[number])
            for status in statuses
            if (progress := status.progress_in(group)) is not None and number in progress.recent
        ]
        if len({collective.signature for _, collective in entered}) > 1:
            return _event_of([(status, _in_words(status, each)) for status, each in entered])
    return None


def _circular_wait_in(statuses: Sequence[Status]) -> PeerEvent | None:
    """Return the event of blocked ranks that wait for each other, if any.

    For example, rank 0 waits in an ``all_reduce`` that rank 1 has not entered, and rank
    1 in a named barrier that rank 0 has not entered. If rank 1 were computing, rank 0
    could continue later.
    """
    candidates = [status for status in statuses if status.is_blocked]
    stuck = _needing_another(candidates)
    # A candidate that is not stuck may later make the call that others wait for.
    while len(stuck) < len(candidates):
        candidates = stuck
        stuck = _needing_another(candidates)
    return _event_of([(status, _call_of(status)) for status in stuck]) if stuck else None


def _needing_another(statuses: Sequence[Status]) -> list[Status]:
    """Return the ranks in a call that another one of these ranks has not made."""
    # Without statuses, the result is empty with any default.
    fewest_calls = min((status.calls_made for status in statuses), default=0)
    # The pending collectives that a rank has not entered, by group and number.
    incomplete = {
        key
        for key, progress in _pending_in(statuses).items()
        if any(other.is_missing_in(progress) for other in statuses)
    }

    def needs_another(status: Status) -> bool:
        if status.awaited is not None:
            return status.awaited.number > fewest_calls
        return any((each.group, each.pending) in incomplete for each in status.unfinished)

    return [status for status in statuses if needs_another(status)]


def _pending_in(statuses: Sequence[Status]) -> dict[tuple[str, int], GroupProgress]:
    """Return one rank's progress in each pending collective, by group and number."""
    # Hundreds of ranks may be waiting in one collective.
    return {
        (progress.group, progress.pending): progress
        for status in statuses
        for progress in status.unfinished
    }


def _event_of(calls: Sequence[tuple[Status, str]]) -> PeerEvent:
    """Return the event of a deadlock, which accuses a rank in the rarest call.

    ``calls`` has the call of each rank in the deadlock, with file and line.
    """
    awaited = [status.awaited for status, _ in calls if status.awaited is not None]
    return event_of_different_calls({status.who: call for status, call in calls}, "is in", awaited)


def _call_of(status: Status) -> str:
    """Describe the call that a rank waits in, with file and line."""
    if status.awaited is not None:
        return f"{status.awaited.what}, {status.awaited.where or status.place}"
    progress = status.unfinished[0]
    return _in_words(status, progress.collective(progress.pending))


def _in_words(status: Status, collective: Collective) -> str:
    """Describe a collective that a rank has entered, with file and line."""
    return f"{collective.text}, {collective.place or status.place}"
