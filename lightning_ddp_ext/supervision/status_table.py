"""Push each rank's status to rank 0, and find there the rank that others wait for.

A thread of each rank pushes its ``status`` every second or two while

- the rank has waited in a call for long, a named barrier or a collective;
- any rank asks why its collective broke, or whether a late rank is alive.

Rank 0 keeps the last status of each rank. Its thread decides, and reports a rank to all
ranks (``rendezvous.peers``), which then raise:

=========================================================  =============================
The statuses show                                          Reported
=========================================================  =============================
ranks that wait for each other in different calls, twice,  one of them
without processor time in between
for a question: a rank pushes none                         that rank
for a question about a collective: a rank is in another    that rank
one, or elsewhere while ranks have waited for the timeout
=========================================================  =============================

NCCL does not raise when a collective exceeds its timeout, unlike gloo, so this module
then ends the wait.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from lightning_ddp_ext.rendezvous.peers import PeerEvent, event_of
from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.wire import Message
from lightning_ddp_ext.supervision.deadlock import (
    Deadlock,
    deadlock_in,
    rank_outside_collective,
    silent_rank,
)
from lightning_ddp_ext.supervision.flight_recorder import (
    groups_in_collectives,
    has_timed_out,
    read_progress,
)
from lightning_ddp_ext.supervision.status import Status, read_status
from lightning_ddp_ext.threads import start_thread

_PUSHES = 8  # at most, while a rank waits until the ranks are compared
# Seconds; a rank may just be returning from the collective. Once one does, all do.
_RETURNING = 1.0
# A question waits for statuses at most twice, and once for an earlier one.
_WAITS_FOR_STATUSES = 4


@dataclass(frozen=True)
class _Question:
    """A rank's question which rank it waits for.

    Attributes:
        rank: the rank that asks.
        number: counts its questions.
        wait: how long which rank has waited, for messages.
        is_about_collective: whether its collective broke; otherwise, others are late.
        asked_at: the ``time.monotonic()`` at which rank 0 received it.
    """

    rank: int
    number: int
    wait: str
    is_about_collective: bool
    asked_at: float


@dataclass(frozen=True)
class _Pushed:
    """A status, and the ``time.monotonic()`` at which rank 0 received it."""

    status: Message
    at: float


class StatusTable:
    """This rank's part in pushing, and on rank 0 the last status of each rank.

    A thread works until the ranks disconnect. A single rank needs none.
    """

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._peers = context.peers
        self._timeouts = context.peers.timeouts
        self._has_broken_collective = False
        self._pushed = 0
        self._looks = 0  # the number of requests of rank 0 to push
        self._is_watched = False  # since the last request, until the answer
        self._asked = 0  # the number of this rank's last question
        self._answered = 0  # the number of its last answered question
        # On rank 0.
        self._last: dict[int, _Pushed] = {}
        self._questions: list[_Question] = []
        self._suspected: Deadlock | None = None
        self._peers.on("status", self._record_status)
        self._peers.on("question", self._record_question)
        self._peers.on("look", self._start_to_push)
        self._peers.on("answers", self._record_answers)
        if len(context.table) > 1:
            start_thread("ddpx-status", self._run)

    # For any thread except the channel's; these calls take several seconds.

    def cause_of_broken_collective(self) -> PeerEvent | None:
        """Return the event that broke a collective or store, if a rank caused it.

        All ranks get the same event.
        """
        self._has_broken_collective = True
        is_timeout = has_timed_out(read_progress(), self._context.groups.timeout)
        event = None if is_timeout else self._peers.wait(self._timeouts.first_cause)
        if event is None:
            broken = f"a collective of rank {self._peers.rank} failed"
            wait = self._wait_in_words if is_timeout else broken
            event = self._ask(wait, is_about_collective=True)
        self._has_broken_collective = event is not None
        return event

    def raise_if_a_rank_is_silent(self) -> None:
        """Raise if a rank does not push its status.

        A rank that does may take as long as it needs.

        Raises:
            RankHungError: a rank does not push its status.
            RankFailedError: a rank died, failed or left; it may be a subclass.
        """
        wait = f"rank {self._peers.rank} has waited for {self._timeout}"
        event = self._ask(wait, is_about_collective=False)
        if event is not None:
            raise event.to_error()

    def _ask(self, wait: str, *, is_about_collective: bool) -> PeerEvent | None:
        """Ask rank 0 which rank this one waits for; return the event, if any."""
        looks = self._looks
        self._asked += 1
        number = self._asked
        question = {"number": number, "wait": wait, "is_about_collective": is_about_collective}
        self._peers.tell([0], "question", question)
        if self._peers.wait_for(lambda: self._looks > looks, self._timeouts.answer):
            longest = _WAITS_FOR_STATUSES * self._timeouts.answer
            self._peers.wait_for(lambda: self._answered >= number, longest)
        is_answered = self._answered >= number or self._peers.cause_or_departure is not None
        if not is_answered and self._peers.rank != 0:
            self._peers.report(silent_rank([self._peers.table[0]], wait))
        return self._peers.cause_or_departure

    @property
    def _wait_in_words(self) -> str:
        return (
            f"rank {self._peers.rank} has waited in a collective for its timeout of {self._timeout}"
        )

    @property
    def _timeout(self) -> str:
        return f"{self._context.groups.timeout.total_seconds():g} s"

    # This rank's thread.

    def _run(self) -> None:
        """Push this rank's status while it waits or is watched; decide on rank 0."""
        entered_at: dict[str, float] = {}  # for each call in which this rank waits
        while self._wait_for_turn():
            now = time.monotonic()
            entered_at = {call: entered_at.get(call, now) for call in self._open_calls()}
            seconds = now - min(entered_at.values(), default=now)
            if self._is_overdue(seconds):
                start_thread("ddpx-overdue", self._end_overdue_collective)
                entered_at.clear()
            if seconds >= self._timeouts.deadlock or self._is_watched:
                self._push()
            if self._peers.rank == 0:
                self._decide()

    def _wait_for_turn(self) -> bool:
        """Wait for the time between two pushes; return whether this thread is needed."""
        timeout = self._context.groups.timeout.total_seconds()
        seconds = min(self._timeouts.deadlock, timeout) / _PUSHES
        looks = self._looks
        self._peers.channel.wait_for(lambda: self._looks > looks or not self._is_needed(), seconds)
        return self._is_needed()

    def _is_needed(self) -> bool:
        return self._peers.cause is None and not self._context.has_closed

    def _open_calls(self) -> list[str]:
        """Return a key of each call in which this rank waits, or in which its device does.

        The key changes with the next call. Finding out does not disturb the main thread or
        the device.
        """
        call = self._context.barriers.awaited
        barriers = [] if call is None else [f"call {call.number}"]
        return groups_in_collectives() + barriers

    def _push(self) -> None:
        self._pushed += 1
        has_broken_collective = self._has_broken_collective
        status = read_status(
            self._context, self._pushed, has_broken_collective=has_broken_collective
        )
        self._peers.tell([0], "status", {"status": asdict(status)})

    def _is_overdue(self, seconds: float) -> bool:
        """Whether NCCL has waited for its timeout, or too long for a rank that left."""
        groups = self._context.groups
        has_departure = self._peers.cause_or_departure is not None
        limit = self._timeouts.answer if has_departure else groups.timeout.total_seconds()
        if not groups.uses_nccl or seconds < limit or not groups_in_collectives():
            return False
        return any(progress.pending for progress in read_progress())

    def _end_overdue_collective(self) -> None:
        """Report the rank that the collective waits for, which aborts the collective."""
        departure = self._peers.cause_or_departure
        event = self._ask(self._wait_in_words, is_about_collective=True)
        if departure is not None and event is departure:
            # NCCL has no connection that closes with that rank.
            left = self._peers.table[departure.rank]
            self._peers.report(event_of("absent", left, str(departure.to_error())))

    # Called by rank 0.

    def _start_to_push(self, body: Message) -> None:
        self._looks += 1
        self._is_watched = True

    def _record_answers(self, body: Message) -> None:
        self._is_watched = False
        for rank, number in body["answered"]:
            if rank == self._peers.rank:
                self._answered = max(self._answered, number)

    # On rank 0.

    def _record_status(self, body: Message) -> None:
        self._last[body["from"]] = _Pushed(body["status"], time.monotonic())

    def _record_question(self, body: Message) -> None:
        rank = body.pop("from")
        self._questions.append(_Question(rank, **body, asked_at=time.monotonic()))
        self._peers.tell(self._peers.everyone, "look", {})

    def _decide(self) -> None:
        with self._peers.arrived:
            now = time.monotonic()
            self._find_deadlock(self._statuses_since(now - self._timeouts.answer))
            if self._questions:
                self._answer(now)

    def _statuses_since(self, moment: float) -> list[Status]:
        return [
            Status.from_dict(pushed.status)
            for _, pushed in sorted(self._last.items())
            if pushed.at >= moment
        ]

    def _find_deadlock(self, statuses: Sequence[Status]) -> None:
        """Report a deadlock once each of its ranks has pushed the same again."""
        earlier = self._suspected
        deadlock = deadlock_in(statuses)
        if deadlock is None or earlier is None or deadlock.calls != earlier.calls:
            self._suspected = deadlock
        elif deadlock.is_pushed_after(earlier):
            self._suspected = deadlock
            if not deadlock.has_computed_since(earlier):
                self._peers.report(deadlock.event)

    def _answer(self, now: float) -> None:
        """Answer all questions, unless later statuses may show more."""
        asked_at = min(question.asked_at for question in self._questions)
        statuses = self._statuses_since(asked_at)
        if len(statuses) == len(self._peers.everyone) and not all(each.waits for each in statuses):
            asked_at += _RETURNING
            statuses = self._statuses_since(asked_at)
        present = {status.who for status in statuses}
        silent = [who for who in self._peers.table if who not in present]
        if silent and now < asked_at + self._timeouts.answer:
            return
        for question in self._questions:
            event = None
            if silent:
                event = silent_rank(silent, question.wait)
            elif question.is_about_collective:
                event = rank_outside_collective(statuses, question.wait)
            if event is not None and self._peers.cause_or_departure is None:
                self._peers.report(event)
        answered = [(question.rank, question.number) for question in self._questions]
        self._questions.clear()
        self._peers.tell(self._peers.everyone, "answers", {"answered": answered})
