"""Push each rank's status to rank 0, and find there the rank that others wait for.

A thread of each rank pushes its ``status`` about every second while

- the rank has waited in a call for long, a named barrier or a collective;
- any rank has a question: why its collective broke, or which rank it has waited for in
  vain until the timeout.

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
for a question about a named barrier: a rank is late       that rank
=========================================================  =============================

NCCL does not raise when a collective exceeds its timeout, unlike gloo, so this thread
then asks, as it does for named barriers. After a signal it asks earlier, with any
backend, so that time is left for another rank to save.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta

import torch

from lightning_ddp_ext.rendezvous.channel import Message
from lightning_ddp_ext.rendezvous.peers import PeerEvent, event_of
from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.supervision.flight_recorder import (
    groups_in_collectives,
    has_timed_out,
    read_progress,
)
from lightning_ddp_ext.supervision.stacks import (
    call_site_of,
    is_in_backward,
    is_in_collective,
    main_frame,
)
from lightning_ddp_ext.supervision.status import (
    Status,
    deadlock_in,
    rank_outside_barrier,
    rank_outside_collective,
    silent_rank,
)
from lightning_ddp_ext.threads import start_thread

_TURNS = 16  # of a rank's thread, while the rank waits until it pushes its status
# Seconds; a rank may just be returning from the collective. Once one does, all do.
_RETURNING = 1.0
# Seconds of processor time between two statuses; a thread that waits takes none.
_COMPUTING = 0.01


@dataclass(frozen=True)
class _Limit:
    """The longest wait for another rank, and the ``time.monotonic()`` from which it applies."""

    wait: timedelta
    name: str
    begins_at: float = 0.0


class StatusTable:
    """This rank's part in pushing, and on rank 0 the last status of each rank.

    A thread works until the ranks disconnect. A single rank needs none.
    """

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._peers = context.peers
        self._timeouts = context.peers.timeouts
        self._sent = Status(self._peers.mine)  # the last one
        self._question = ""  # how long which rank has waited, until rank 0 has answered
        self._overdue = ""  # the open call of which the question is, if it may end meanwhile
        self._stop_limit: _Limit | None = None  # while the ranks have to stop
        self._cpu_seconds = 0.0  # of the main thread when it was sent
        self._heard_at = 0.0  # when rank 0 last sent something, or a question began
        self._is_watched = False  # while rank 0 needs the statuses for an answer
        self._is_due = False  # ends the pause of the thread
        # On rank 0, by rank.
        self._last = {info.rank: Status(info) for info in self._peers.table}
        self._received_at: dict[int, float] = {}
        self._asked_at: float | None = None  # the first question without an answer
        self._peers.channel.on_message("status", self._record_status)
        self._peers.channel.on_message("look", self._handle_look)
        if len(self._peers.table) > 1:
            start_thread("ddpx-status", self._run)

    def cause_of_broken_collective(self) -> PeerEvent | None:
        """Return the event that broke a collective or store, if a rank caused it.

        All ranks get the same event. For the main thread; takes several seconds.
        """
        is_timeout = has_timed_out(read_progress(), self._context.groups.timeout)
        failed = f"a collective of rank {self._peers.rank} failed"
        self.ask_and_wait(self._waited_in_collective if is_timeout else failed)
        return self._peers.wait(self._timeouts.first_cause)  # a rank may be about to report it

    def ask_and_wait(self, question: str) -> None:
        """Have rank 0 find and report the rank that this one waits for.

        For the main thread; takes several seconds if a rank is silent. Without any, the
        wait may go on.

        Args:
            question: where and how long this rank has waited.
        """
        self._ask(question)
        self._peers.wait_for(lambda: not self._question)
        self._question = ""

    def limit_waits(self, seconds: float, name: str) -> None:
        """End waits for another rank that last this long, once this time has passed.

        The rank that did not come is reported, as after the timeout. The message gives
        the limit's ``name``.
        """
        if self._stop_limit is None:
            self._stop_limit = _Limit(timedelta(seconds=seconds), name, time.monotonic() + seconds)

    def lift_limit(self) -> None:
        """End no further wait before the timeout."""
        self._stop_limit = None

    def _ask(self, question: str, overdue: str = "") -> None:
        """Have rank 0 find the rank that this one waits for, as long as ``overdue`` is open."""
        with self._peers.arrived:
            self._heard_at = time.monotonic()
            self._question = question
            self._overdue = overdue
            self._is_due = True
            self._peers.arrived.notify_all()

    @property
    def _limit(self) -> _Limit:
        """How long this rank waits for another one."""
        timeout = _Limit(self._context.groups.timeout, "its timeout of")
        stop = self._stop_limit or timeout
        return stop if stop.wait < timeout.wait and time.monotonic() >= stop.begins_at else timeout

    @property
    def _waited_in_collective(self) -> str:
        limit = self._limit
        return (
            f"rank {self._peers.rank} has waited in a collective for {limit.name}"
            f" {limit.wait.total_seconds():g} s"
        )

    # This rank's thread.

    def _run(self) -> None:
        entered_at: dict[str, float] = {}  # for each call in which this rank waits
        while self._wait_for_turn():
            now = time.monotonic()
            entered_at = {call: entered_at.get(call, now) for call in self._open_calls()}
            waited = {call: now - moment for call, moment in entered_at.items()}
            if self._has_ended_overdue_call(waited):
                entered_at.clear()
            longest = max(waited.values(), default=0.0)
            if self._question or self._is_watched or longest >= self._timeouts.deadlock:
                self._push()
            if self._question and now - self._heard_at >= 2 * self._timeouts.answer:
                self._peers.report(silent_rank([self._peers.table[0]], self._question))
            if self._peers.rank == 0:
                self._decide(now)

    def _wait_for_turn(self) -> bool:
        """Wait until a push is due, or a moment; return whether this thread is needed."""
        timeout = self._context.groups.timeout.total_seconds()
        seconds = min(self._timeouts.deadlock, timeout) / _TURNS
        self._peers.channel.wait_for(lambda: self._is_due or not self._is_needed, seconds)
        self._is_due = False
        return self._is_needed

    @property
    def _is_needed(self) -> bool:
        return self._peers.cause is None and not self._peers.channel.is_closing

    def _open_calls(self) -> list[str]:
        """Return a key of each call in which this rank waits, or in which its device does.

        The key changes with the next call. Finding out does not disturb the main thread or
        the device.
        """
        call = self._context.barriers.awaited
        barriers = [] if call is None else [str(call.number)]
        return groups_in_collectives() + barriers

    def _push(self) -> None:
        status = self._read_status()
        # Hundreds of ranks may be waiting for long, without a change.
        is_same = status == self._sent
        self._sent = status
        self._peers.tell([0], "status", {"status": None if is_same else asdict(status)})

    def _read_status(self) -> Status:
        """Return this rank's status; not for the main thread, whose stack it reads."""
        frame = main_frame()
        groups = read_progress()
        awaited = self._context.barriers.awaited
        with self._peers.arrived:
            if self._overdue and self._overdue not in self._open_calls():  # the rank came
                self._question = ""
                self._overdue = ""
        status = Status(
            self._peers.mine,
            question=self._question,
            place=call_site_of(frame),
            is_in_collective=is_in_collective(frame) or is_in_backward(frame),
            groups=groups,
            has_timed_out=has_timed_out(groups, self._limit.wait),
            calls_made=self._context.barriers.made,
            awaited=awaited,
        )
        cpu_seconds = _cpu_seconds()
        has_computed = status.is_blocked and cpu_seconds - self._cpu_seconds >= _COMPUTING
        self._cpu_seconds = cpu_seconds
        is_settled = status.calls == self._sent.calls and not has_computed
        return replace(status, is_settled=is_settled)

    def _has_ended_overdue_call(self, waited: dict[str, float]) -> bool:
        """End a wait that is too long.

        Find and report the rank that this one waits for, which aborts the call.

        Args:
            waited: the seconds for which this rank has waited, for each call.
        """
        call = self._context.barriers.awaited
        if call is None or waited.get(str(call.number), 0.0) < self._limit.wait.total_seconds():
            return self._has_ended_overdue_collective(waited)
        self._ask(f"rank {call.rank} began {call}", overdue=str(call.number))
        return True

    def _has_ended_overdue_collective(self, waited: dict[str, float]) -> bool:
        """End a wait of NCCL, or any that is too long for a stop.

        With NCCL, also one for a rank that left, as no connection closes with that rank.
        Otherwise, gloo raises by itself.
        """
        groups = self._context.groups
        if not groups.uses_nccl and self._limit.wait == groups.timeout:
            return False
        departure = self._peers.cause_or_departure
        longest = max(waited, key=waited.__getitem__, default="")
        limit = self._timeouts.answer if departure else self._limit.wait.total_seconds()
        if waited.get(longest, 0.0) < limit:
            return False
        if not any(progress.pending for progress in read_progress()):
            return False
        if departure is None:
            self._ask(self._waited_in_collective, overdue=longest)
        else:
            self._peers.report(event_of("absent", departure.who, str(departure.to_error())))
        return True

    # Called by rank 0.

    def _handle_look(self, body: Message) -> None:
        self._heard_at = time.monotonic()
        self._is_watched = body["is_watched"]
        if self._question in body["answered"]:  # another one may have followed it
            self._question = ""
        self._is_due = self._is_due or self._is_watched

    # On rank 0.

    def _record_status(self, body: Message) -> None:
        rank = body["from"]
        self._received_at[rank] = time.monotonic()
        if body["status"] is not None:
            self._last[rank] = Status.from_dict(body["status"])
        if self._last[rank].question and self._asked_at is None:
            self._asked_at = self._received_at[rank]
            self._peers.tell(self._peers.everyone, "look", {"is_watched": True, "answered": []})

    def _decide(self, now: float) -> None:
        with self._peers.arrived:
            deadlock = deadlock_in(self._since(now - self._timeouts.answer))
            if deadlock is not None:
                self._peers.report(deadlock)
            if self._asked_at is not None:
                self._answer(now, self._asked_at)

    def _since(self, moment: float) -> list[Status]:
        """Return the statuses that ranks have pushed since a ``time.monotonic()``."""
        ranks = [rank for rank, received_at in self._received_at.items() if received_at > moment]
        return [self._last[rank] for rank in sorted(ranks)]

    def _answer(self, now: float, asked_at: float) -> None:
        """Answer all questions, unless later statuses may show more."""
        statuses = self._since(asked_at)
        if len(statuses) == len(self._peers.everyone) and not all(each.waits for each in statuses):
            asked_at += _RETURNING
            statuses = self._since(asked_at)
        present = [status.who for status in statuses]
        silent = [who for who in self._peers.table if who not in present]
        if silent and now < asked_at + self._timeouts.answer:
            return
        # A status without a question has crossed an earlier answer.
        asking = [status for status in statuses if status.question]
        for status in asking:
            if silent:
                event: PeerEvent | None = silent_rank(silent, status.question)
            elif status.awaited is not None:
                event = rank_outside_barrier(statuses, status.awaited)
            else:
                event = rank_outside_collective(statuses, status.question)
            if event is not None and self._peers.cause_or_departure is None:
                self._peers.report(event)
        self._asked_at = None
        answered = [status.question for status in asking]
        self._peers.tell(self._peers.everyone, "look", {"is_watched": False, "answered": answered})


def _cpu_seconds() -> float:
    """Return the processor time of the main thread; 0 with CUDA, which polls as it waits."""
    if torch.cuda.is_initialized():
        return 0.0
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    return time.clock_gettime(time.pthread_getcpuclockid(main_thread))
