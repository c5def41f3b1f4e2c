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
from collections.abc import Callable, Collection, Mapping
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
from lightning_ddp_ext.supervision.status import Status, silent_rank
from lightning_ddp_ext.supervision.status_table import StatusTable
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
class _Reading:
    """A status of this rank, and the processor time that its main thread had used, in seconds."""

    status: Status
    cpu_seconds: float = 0.0


@dataclass
class _Inquiry:
    """This rank's question to rank 0, and rank 0's request for statuses.

    All threads use it: the main thread and the one that pushes ask, and the channel's
    thread receives rank 0's messages. To change it, they hold the lock of ``arrived``.

    Attributes:
        arrived: notified when a message has arrived, or a status must be pushed.
        question: a sentence about this rank's wait, for rank 0 to find the rank that it
            waits for. Empty once rank 0 has answered it, and without one.
        call: the key of the open call that the question is about, if any.
        heard_at: when rank 0 last sent a message, or the question began.
        is_watched: whether rank 0 needs statuses, for an answer to any rank.
        is_due: whether a status must be pushed without a pause.
    """

    arrived: threading.Condition
    question: str = ""
    call: str = ""
    heard_at: float = 0.0
    is_watched: bool = False
    is_due: bool = False

    def ask(self, question: str, *, call: str = "") -> None:
        """Have a question pushed to rank 0, in place of an earlier one; does not wait.

        Args:
            question: the sentence.
            call: the key of the open call that it is about, with which it becomes
                obsolete; empty if that call has ended with an error, or the wait is at
                a stop point.
        """
        with self.arrived:
            if not self.question:  # else rank 0 owes an answer, and may be silent
                self.heard_at = time.monotonic()
            self.question = question
            self.call = call
            self.is_due = True
            self.arrived.notify_all()

    def withdraw(self, *, unless_about: Collection[str] = ()) -> None:
        """Drop the question, unless it is about one of these calls."""
        with self.arrived:
            if self.call not in unless_about:
                self.question = ""
                self.arrived.notify_all()  # the main thread may wait for an answer

    def pause(self, seconds: float, is_over: Callable[[], bool]) -> None:
        """Wait some seconds, or until a status must be pushed, or the pause is over."""
        with self.arrived:
            self.arrived.wait_for(lambda: self.is_due or is_over(), seconds)
            self.is_due = False

    def handle_look(self, body: Message) -> None:
        """Handle a message of rank 0: that it looks for a rank, or has answered questions.

        The channel calls this with the lock.
        """
        self.heard_at = time.monotonic()
        self.is_watched = body["is_watched"]
        # Another question may have followed the answered one, or the wait may have ended.
        if self.question in body["answered"]:
            self.question = ""
        self.is_due = self.is_due or self.is_watched


class StatusPusher:
    """Pushes this rank's status, and ends its waits that take too long.

    A thread works until the ranks disconnect, or one of them has failed. A single rank needs none.
    """

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._peers = context.peers
        self._table = StatusTable(self._peers) if self._peers.rank == 0 else None
        self._inquiry = _Inquiry(self._peers.arrived)
        # While the ranks have to stop; each thread only replaces it as a whole.
        self._stop_limit: _Limit | None = None
        self._peers.channel.on_message("look", self._inquiry.handle_look)
        if len(self._peers.table) > 1:
            start_thread("ddpx-status", self._run)

    # For other threads.

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
        self._inquiry.ask(question)
        self._peers.wait_for(lambda: not self._inquiry.question)
        self._inquiry.withdraw()  # in case an event has arrived instead of the answer

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

    @property
    def _limit(self) -> _Limit:
        """How long this rank waits for another one."""
        timeout = _Limit(self._context.groups.timeout, "its timeout of")
        stop = self._stop_limit or timeout
        has_begun = time.monotonic() >= stop.begins_at
        return stop if has_begun and stop.wait < timeout.wait else timeout

    @property
    def _waited_in_collective(self) -> str:
        limit = self._limit
        return (
            f"rank {self._peers.rank} has waited in a collective for {limit.name}"
            f" {limit.wait.total_seconds():g} s"
        )

    # This object's thread.

    def _run(self) -> None:
        """Push statuses, end overdue waits, and on rank 0 decide, until the ranks disconnect."""
        last = _Reading(Status(self._peers.mine))
        entered_at: dict[str, float] = {}  # by open call, from when its wait counts
        while self._wait_for_turn():
            now = time.monotonic()
            entered_at = {call: entered_at.get(call, now) for call in self._open_calls()}
            waited = {call: now - moment for call, moment in entered_at.items()}
            if self._end_overdue_barrier(waited) or self._end_overdue_collective(waited):
                entered_at.clear()  # so that this is done once in each limit
            longest = max(waited.values(), default=0.0)
            is_asked = self._inquiry.is_watched or self._inquiry.question
            if is_asked or longest >= self._peers.timeouts.deadlock:
                last = self._push(last)
            # Rank 0 itself may be silent. It has twice as long as other ranks, which have to
            # answer it first. The question is read again, since a push may withdraw it.
            question = self._inquiry.question
            if question and now - self._inquiry.heard_at >= 2 * self._peers.timeouts.answer:
                self._peers.report(silent_rank([self._peers.table[0]], question))
            if self._table is not None:
                self._table.decide(now)

    def _wait_for_turn(self) -> bool:
        """Wait until a push is due, or a moment; return whether this thread is needed."""
        seconds = min(self._peers.timeouts.deadlock, self._context.groups.timeout.total_seconds())
        self._inquiry.pause(seconds / _LOOKS, is_over=lambda: not self._is_needed)
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

    # Overdue waits. The rank that another one waits for is found and reported, which
    # aborts the wait. ``waited`` has the seconds for which this rank has waited, by
    # open call.

    def _end_overdue_barrier(self, waited: Mapping[str, float]) -> bool:
        """Ask about a named barrier that takes too long; return whether one does."""
        call = self._context.barriers.awaited
        if call is None or waited.get(str(call.number), 0.0) < self._limit.wait.total_seconds():
            return False
        self._inquiry.ask(f"rank {call.rank} began {call}", call=str(call.number))
        return True

    def _end_overdue_collective(self, waited: Mapping[str, float]) -> bool:
        """Ask about a collective that takes too long; return whether one does.

        A rank that has left never enters the collective, so it is soon reported instead.
        """
        groups = self._context.groups
        # gloo raises after its timeout, and after a departure, which closes connections.
        if not groups.uses_nccl and self._limit.wait == groups.timeout:
            return False
        departure = self._peers.cause_or_departure
        limit = self._peers.timeouts.answer if departure else self._limit.wait.total_seconds()
        longest = max(waited, key=waited.__getitem__, default="")
        # With NCCL, calls also seem to be open after sends, so look into the collectives.
        if waited.get(longest, 0.0) < limit or not any(each.pending for each in read_progress()):
            return False
        if departure is None:
            self._inquiry.ask(self._waited_in_collective, call=longest)
        else:
            self._peers.report(event_of("absent", departure.who, str(departure.to_error())))
        return True

    # The status.

    def _push(self, last: _Reading) -> _Reading:
        """Push this rank's status to rank 0, and return it; ``last`` is the last one pushed."""
        reading = self._read_status(last)
        # Hundreds of ranks may be waiting for long, without a change.
        is_same = reading.status == last.status
        self._peers.tell([0], "status", {"status": None if is_same else asdict(reading.status)})
        return reading

    def _read_status(self, last: _Reading) -> _Reading:
        """Return this rank's status; not for the main thread, whose stack it reads."""
        frame = main_frame()
        groups = read_progress()
        awaited = self._context.barriers.awaited
        # After the calls are read: if the question's call has ended meanwhile, all ranks have
        # made it, and rank 0 would count one that has returned from it as late.
        self._inquiry.withdraw(unless_about=["", *self._open_calls()])
        status = Status(
            self._peers.mine,
            question=self._inquiry.question,
            place=call_site_of(frame),
            is_in_collective=is_in_collective(frame) or is_in_backward(frame),
            groups=groups,
            has_timed_out=has_timed_out(groups, self._limit.wait),
            calls_made=self._context.barriers.made,
            awaited=awaited,
        )
        cpu_seconds = _cpu_seconds()
        has_computed = status.is_blocked and cpu_seconds - last.cpu_seconds >= _COMPUTING
        is_settled = status.calls == last.status.calls and not has_computed
        return _Reading(replace(status, is_settled=is_settled), cpu_seconds)


def _cpu_seconds() -> float:
    """Return the processor time of the main thread; 0 with CUDA, which polls as it waits."""
    if torch.cuda.is_initialized():
        return 0.0
    main_thread = threading.main_thread().ident or 0  # never 0, since it has started
    return time.clock_gettime(time.pthread_getcpuclockid(main_thread))
