"""What happens on this rank when another one dies, fails or leaves.

Rank 0 decides which event was first, and sends it to all. Each rank then aborts pending collectives, which unblocks its
main thread with an error. If nothing wakes it, the process is ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict

from lightning_ddp_ext.at_exit import Limit
from lightning_ddp_ext.rendezvous.handshake import Connections
from lightning_ddp_ext.rendezvous.peer_event import PeerEvent, event_of
from lightning_ddp_ext.rendezvous.request import Timeouts
from lightning_ddp_ext.rendezvous.run import current_run
from lightning_ddp_ext.rendezvous.wire import Message


class PeerFailure:
    """The other ranks, and what has happened to them.

    Args:
        rank: of this process.
        connections: to the others.
        timeouts: of the control channel.
        abort: called after the first event, by the channel's thread, to wake the main thread.

    Attributes:
        rank: of this process.
        table: all ranks in their order.
        channel: to rank 0, or on rank 0 to all others.
        timeouts: of the control channel.
        arrived: notified at each event; what waits for the channel's messages also uses it.
        cause: the first death or failure, also of this rank, or call that ranks did not make together; the ranks have
            parted then.
        has_raised: whether the main thread knows of the cause, and raises because of it.
    """

    def __init__(self, rank: int, connections: Connections, timeouts: Timeouts, abort: Callable[[], None]) -> None:
        self.arrived = threading.Condition(threading.RLock())
        self.cause: PeerEvent | None = None
        self.has_raised = False
        self.rank = rank
        self.table, self.channel = connections.table, connections.channel
        self.timeouts = timeouts
        self._abort = abort
        self._departed: PeerEvent | None = None
        self._limit = Limit("ddpx-exit")

    def start(self) -> None:
        """Hear of events from now on, and of those that have come before."""
        self.channel.listen("event", self._handle_message)
        self.channel.start(self._on_closed)

    @property
    def cause_or_departure(self) -> PeerEvent | None:
        """The cause, or else the first rank that has left in good order."""
        return self.cause or self._departed

    def wait(self, seconds: float) -> PeerEvent | None:
        """The cause, or else a departure, waiting up to ``seconds`` for it."""
        self.wait_for(lambda: False, seconds)
        return self.cause_or_departure

    def wait_for(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until the condition holds, or something has happened to a rank; return whether it holds.

        Args:
            condition: asked whenever a message has been handled.
            seconds: the longest wait; ``None`` for no limit.
        """
        with self.arrived:
            self.arrived.wait_for(lambda: condition() or self.cause_or_departure is not None, seconds)
            return condition()

    def report(self, event: PeerEvent) -> PeerEvent:
        """Tell all ranks, this one included, why they cannot go on; returns the first event, which all of them use."""
        if self.rank != 0:
            self.channel.send("event", asdict(event))
            if self.channel.is_current_thread:
                return event  # the thread is needed for rank 0's answer
            with self.arrived:
                self.arrived.wait_for(lambda: self.cause, timeout=self.timeouts.first_cause)
        return self._record(event)

    def note_raised(self) -> None:
        """The main thread knows of the event and raises; the process need not be ended."""
        with self.arrived:
            self.has_raised = True
            self.arrived.notify_all()
        self._limit.lift()

    # On the channel's thread, or on the one that reports.

    def _handle_message(self, body: Message) -> None:
        del body["from"]
        self._record(PeerEvent(**body))

    def _on_closed(self, rank: int, reason: str) -> None:
        self._record(event_of("died" if reason else "left", self.table[rank], reason))

    def _record(self, event: PeerEvent) -> PeerEvent:
        """Note an event; the first failure and the first departure are what all ranks are told."""
        is_departure = event.kind == "left"
        with self.arrived:
            is_first = (self._departed if is_departure else self.cause) is None
            if is_first and is_departure:
                self._departed = event
            elif is_first:
                self.cause = event
            self.arrived.notify_all()
        if is_first and self.rank == 0:
            self.channel.send("event", asdict(event))
        if is_first and not is_departure:
            self._end_later(event)
            self._abort()
        return self.cause or event

    def _end_later(self, event: PeerEvent) -> None:
        """End the process if nothing wakes its main thread. No cleaning up: it could block, too."""
        error, seconds = event.to_error(), self.timeouts.grace[event.kind]
        sentence = f"[rank {self.rank}] {type(error).__name__}: {error}"
        with self.arrived:
            # Outside of a run nothing is ended; from Python 3.12 on no thread can start while the interpreter ends.
            if not self.has_raised and current_run() is not None:
                self._limit.start(
                    seconds, 1, lambda: sentence, is_void=lambda: current_run() is None, after_saves=seconds
                )
