"""What happens on this rank when another one dies, fails or leaves.

Rank 0 decides which event came first, and tells all. The main thread learns of it where it waits for other ranks: their
connections are cut, so that it gets an error. If nothing wakes it, the process is ended.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from lightning_ddp_ext.at_exit import end_at_once, is_end_delayed, wait_for_delays
from lightning_ddp_ext.rendezvous.handshake import Connections
from lightning_ddp_ext.rendezvous.peer_event import PeerEvent, event_of
from lightning_ddp_ext.rendezvous.request import Timeouts
from lightning_ddp_ext.rendezvous.wire import Message

_supervised = 0


@contextmanager
def supervised_work() -> Iterator[None]:
    """While the block runs, this process is ended if another rank has died and it cannot go on.

    Outside, in the user's own code after ``fit``, a death is only remembered.
    """
    global _supervised
    _supervised += 1
    try:
        yield
    finally:
        _supervised -= 1


class PeerFailure:
    """What this rank knows of the others' ends.

    Args:
        rank: of this process.
        connections: to the others.
        timeouts: of the control channel.
        release: called by the channel's thread with the first event, to wake the main thread.

    Attributes:
        arrived: notified at each event; components wait on it for their own changes, too.
        cause: the first death or failure, or call that ranks did not make together.
        has_raised: whether the main thread knows of the cause, and raises because of it.
    """

    def __init__(
        self, rank: int, connections: Connections, timeouts: Timeouts, release: Callable[[PeerEvent], None]
    ) -> None:
        self.arrived = threading.Condition(threading.RLock())
        self.cause: PeerEvent | None = None
        self.has_raised = False
        self._rank = rank
        self._table, self._channel = connections.table, connections.channel
        self._timeouts = timeouts
        self._release = release
        self._departed: PeerEvent | None = None
        self._exit_timer: threading.Timer | None = None

    def start(self) -> None:
        """Hear of events from now on, and of those that have come before."""
        self._channel.listen("event", self._hear)
        self._channel.start(self._on_closed)

    @property
    def ended(self) -> Collection[int]:
        """On rank 0: the ranks whose connections have ended."""
        return self._channel.ended.keys()

    @property
    def cause_or_departure(self) -> PeerEvent | None:
        """The cause, or else the first rank that has left in good order."""
        return self.cause or self._departed

    def wait(self, seconds: float) -> PeerEvent | None:
        """The cause, or else a departure, waiting up to ``seconds`` for it."""
        with self.arrived:
            self.arrived.wait_for(lambda: self.cause_or_departure, timeout=seconds)
            return self.cause_or_departure

    def report(self, event: PeerEvent) -> PeerEvent:
        """Tell all ranks, this one included, why they cannot go on; returns the first event, which all of them use."""
        if self._rank != 0:
            self._channel.send("event", asdict(event))
            if self._channel.is_current_thread:
                return event  # the thread is needed for rank 0's answer
            with self.arrived:
                self.arrived.wait_for(lambda: self.cause, timeout=self._timeouts.first_cause)
        return self._take(event)

    def note_raised(self) -> None:
        """The main thread knows of the event and raises; the process need not be ended."""
        with self.arrived:
            self.has_raised = True
            self.arrived.notify_all()
            if self._exit_timer is not None:
                self._exit_timer.cancel()

    def close(self) -> None:
        """Forget the others."""
        self.note_raised()
        self._release = lambda event: None

    # On the channel's thread, or on the one that reports.

    def _hear(self, body: Message) -> None:
        del body["from"]
        self._take(PeerEvent(**body))

    def _on_closed(self, rank: int, reason: str) -> None:
        self._take(event_of("died" if reason else "left", self._table[rank], reason))

    def _take(self, event: PeerEvent) -> PeerEvent:
        """Note an event; the first failure and the first departure are what all ranks are told."""
        is_departure = event.kind == "left"
        with self.arrived:
            is_first = (self._departed if is_departure else self.cause) is None
            if is_first and is_departure:
                self._departed = event
            elif is_first:
                self.cause = event
            self.arrived.notify_all()
        if is_first and self._rank == 0:
            self._channel.send("event", asdict(event))
        if is_first and not is_departure:
            self._end_later(event)
            self._release(event)
        return self.cause or event

    def _end_later(self, event: PeerEvent) -> None:
        with self.arrived:
            if self.has_raised:
                return
            self._exit_timer = threading.Timer(self._timeouts.grace[event.kind], self._end_process, [event])
            self._exit_timer.name = "ddpx-exit"
            self._exit_timer.daemon = True
            self._exit_timer.start()

    def _end_process(self, event: PeerEvent) -> None:
        """The main thread is somewhere that nothing can wake it from. No cleaning up: it could block, too."""
        if _supervised == 0:
            return
        if is_end_delayed():
            self._say(f"{event.to_error()}; this rank finishes the checkpoint that it is writing")
            wait_for_delays()
            with self.arrived:
                if self.arrived.wait_for(lambda: self.has_raised, self._timeouts.grace[event.kind]):
                    return
        self._say(f"{type(event.to_error()).__name__}: {event.to_error()}")
        end_at_once(1)

    def _say(self, sentence: str) -> None:
        sys.stderr.write(f"[rank {self._rank}] {sentence}\n")
        sys.stderr.flush()
