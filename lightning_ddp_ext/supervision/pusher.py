"""Push this rank's status to rank 0 while it waits, and ask there which rank it waits for.

A thread of each rank pushes its ``status``, again and again, while

- the rank has waited in a call for long, a named barrier or a collective;
- any rank has a question: why its collective broke, or which rank it has waited for in
  vain until the timeout.

Named barriers have no timeout of their own, and NCCL does not raise when a collective
exceeds its timeout, so this thread asks about both. After a signal it asks earlier,
with any backend, so that time is left for another rank to save.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
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
from lightning_ddp_ext.supervision.status import Status
from lightning_ddp_ext.supervision.status_table import StatusTable, silent_rank
from lightning_ddp_ext.threads import start_thread

# How often a rank's thread looks while the rank waits, before its first status.
_LOOKS = 16
# Seconds of processor time between two statuses; a thread that waits takes none.
_COMPUTING = 0.01


@dataclass(frozen=True)
class _Limit:
    """The longest wait for another rank, and the ``time.monotonic()`` from which it applies."""

    wait: timedelta
    name: str
    begins_at: float = 0.0


@dataclass(frozen=True)
class _Question:
    """A sentence about this rank's wait, for rank 0 to find the rank that it waits for.

    ``call`` is the key of the open call that it is about, with which it becomes
    obsolete; empty if the call has ended with an error, or the wait is at a stop point.
    """

    text: str
    call: str = ""


class StatusPusher:
    """Pushes this rank's status, and ends its waits that take too long.

    A thread works until the ranks disconnect. A single rank needs none.
    """

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._peers = context.peers
        self._table = StatusTable(self._peers) if self._peers.rank == 0 else None
        # Only for this object's thread: the last status that it pushed, and the
        # processor time of the main thread at that time, in seconds.
        self._pushed = Status(self._peers.mine)
        self._cpu_seconds = 0.0
        # For all threads.
        self._question: _Question | None = None  # until rank 0 has answered it
        self._heard_at = 0.0  # when rank 0 last sent something, or a question began
        self._stop_limit: _Limit | None = None  # while the ranks have to stop
        self._is_watched = False  # while rank 0 needs the statuses for an answer
        self._is_due = False  # ends the pause of this object's thread
        self._peers.channel.on_message("look", self._handle_look)
        if len(self._peers.table) > 1:
            start_thread("ddpx-status", self._run)

    def cause_of_broken_collective(self) -> PeerEvent | None:
        """Return the event that broke a collective or store, if a rank caused it.

        All ranks get the same event. For the main thread; takes several seconds.
        """
        is_timeout = has_timed_out(read_progress(), self._context.groups.timeout)
        self.ask_and_wait(
            self._waited_in_collective
            if is_timeout
            else f"a collective of rank {self._peers.rank} failed"
        )
        # A rank may be about to report it.
        return self._peers.wait(self._peers.timeouts.first_cause)

    def ask_and_wait(self, question: str) -> None:
        """Have rank 0 find and report the rank that this one waits for.

        For the main thread; takes several seconds if a rank is silent. If rank 0 finds
        no rank, the caller may continue to wait.

        Args:
            question: where and how long this rank has waited.
        """
        self._ask(_Question(question))
        self._peers.wait_for(lambda: self._question is None)
        self._question = None

    def limit_waits(self, seconds: float, name: str) -> None:
        """End waits for another rank that last this long, once this time has passed.

        The late rank is reported, as after the timeout. The message gives the limit's
        ``name``.
        """
        if self._stop_limit is None:
            self._stop_limit = _Limit(timedelta(seconds=seconds), name, time.monotonic() + seconds)

    def lift_limit(self) -> None:
        """Remove this limit; waits then end after the timeout again."""
        self._stop_limit = None

    def _ask(self, question: _Question) -> None:
        """Have rank 0 find the rank that this one waits for; does not wait."""
        with self._peers.arrived:
            if self._question is None:  # else rank 0 owes an answer, and may be silent
                self._heard_at = time.monotonic()
            self._question = question
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

    # This object's thread.

    def _run(self) -> None:
        entered_at: dict[str, float] = {}  # by open call
        while self._wait_for_turn():
            now = time.monotonic()
            entered_at = {call: entered_at.get(call, now) for call in self._open_calls()}
            waited = {call: now - moment for call, moment in entered_at.items()}
            if self._end_overdue_barrier(waited) or self._end_overdue_collective(waited):
                entered_at.clear()  # this is done once in each limit
            longest = max(waited.values(), default=0.0)
            if self._question or self._is_watched or longest >= self._peers.timeouts.deadlock:
                self._push()
            question = self._question  # read again: a push drops an obsolete one
            if question and now - self._heard_at >= 2 * self._peers.timeouts.answer:
                self._peers.report(silent_rank([self._peers.table[0]], question.text))
            if self._table is not None:
                self._table.decide(now)

    def _wait_for_turn(self) -> bool:
        """Wait until a push is due, or a moment; return whether this thread is needed."""
        timeout = self._context.groups.timeout.total_seconds()
        seconds = min(self._peers.timeouts.deadlock, timeout) / _LOOKS
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
        is_same = status == self._pushed
        self._pushed = status
        self._peers.tell([0], "status", {"status": None if is_same else asdict(status)})

    def _read_status(self) -> Status:
        """Return this rank's status; not for the main thread, whose stack it reads."""
        frame = main_frame()
        groups = read_progress()
        awaited = self._context.barriers.awaited
        with self._peers.arrived:
            question = self._question
            if question and question.call and question.call not in self._open_calls():
                self._question = question = None  # all ranks have made the call meanwhile
        status = Status(
            self._peers.mine,
            question=question.text if question else "",
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
        is_settled = status.calls == self._pushed.calls and not has_computed
        return replace(status, is_settled=is_settled)

    # Overdue waits. The rank that another one waits for is found and reported, which
    # aborts the wait. ``waited`` has the seconds for which this rank has waited, by
    # open call.

    def _end_overdue_barrier(self, waited: Mapping[str, float]) -> bool:
        """Ask about a named barrier that takes too long; return whether one does."""
        call = self._context.barriers.awaited
        if call is None or waited.get(str(call.number), 0.0) < self._limit.wait.total_seconds():
            return False
        self._ask(_Question(f"rank {call.rank} began {call}", call=str(call.number)))
        return True

    def _end_overdue_collective(self, waited: Mapping[str, float]) -> bool:
        """Ask about a collective that takes too long; return whether one does.

        Before a signal, this is only necessary with NCCL, since gloo raises after its
        timeout. With NCCL, a collective with a rank that left also counts, since no
        connection closes with that rank.
        """
        groups = self._context.groups
        if not groups.uses_nccl and self._limit.wait == groups.timeout:
            return False
        departure = self._peers.cause_or_departure
        limit = self._peers.timeouts.answer if departure else self._limit.wait.total_seconds()
        longest = max(waited, key=waited.__getitem__, default="")
        is_overdue = waited.get(longest, 0.0) >= limit
        if not is_overdue or not any(progress.pending for progress in read_progress()):
            return False
        if departure is None:
            self._ask(_Question(self._waited_in_collective, call=longest))
        else:
            self._peers.report(event_of("absent", departure.who, str(departure.to_error())))
        return True

    # Called by rank 0.

    def _handle_look(self, body: Message) -> None:
        self._heard_at = time.monotonic()
        self._is_watched = body["is_watched"]
        # Another question may have followed the answered one, or the wait may have ended.
        question = self._question
        if question is not None and question.text in body["answered"]:
            self._question = None
        self._is_due = self._is_due or self._is_watched


def _cpu_seconds() -> float:
    """Return the processor time of the main thread; 0 with CUDA, which polls as it waits."""
    if torch.cuda.is_initialized():
        return 0.0
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    return time.clock_gettime(time.pthread_getcpuclockid(main_thread))
