"""What happens on this rank when another one dies, fails or leaves.

Rank 0 decides which event came first, and tells all. The main thread learns of it where it waits for other ranks: their
connections are cut, so that it gets an error. If nothing wakes it, the process is ended.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from lightning_ddp_ext.at_exit import end_at_once, is_end_delayed, wait_for_delays
from lightning_ddp_ext.rendezvous.channel import Channel
from lightning_ddp_ext.rendezvous.peer_event import PeerEvent, event_of
from lightning_ddp_ext.rendezvous.rank_table import RankInfo, RankTable
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
        table: all ranks.
        channel: to rank 0; ``None`` in a world of one rank.
        timeouts: of the control channel.
        release: called by the channel's thread with the first event, to wake the main thread.

    Attributes:
        arrived: notified at each event; components wait on it for their own changes, too.
        cause: the first death or failure, or call that ranks did not make together.
        is_forming: whether the main thread forms a group.
    """

    def __init__(
        self,
        rank: int,
        table: RankTable,
        channel: Channel | None,
        timeouts: Timeouts,
        release: Callable[[PeerEvent], None],
    ) -> None:
        self.arrived = threading.Condition(threading.RLock())
        self.cause: PeerEvent | None = None
        self.is_forming = False
        self._rank = rank
        self._table = table
        self._channel = channel
        self._timeouts = timeouts
        self._release = release
        self._departed: PeerEvent | None = None
        self._ended: set[int] = set()
        self._has_raised = False
        self._exit_timer: threading.Timer | None = None

    def start(self) -> None:
        """Hear of events from now on, and of those that have come before."""
        if self._channel is not None:
            self._channel.listen("event", self._hear)
            self._channel.on_closed(self._on_closed)

    @property
    def cause_or_departure(self) -> PeerEvent | None:
        """The cause, or else the first rank that has left in good order."""
        return self.cause or self._departed

    @property
    def unheard_cause(self) -> PeerEvent | None:
        """The cause, if the main thread has not raised because of it."""
        return None if self._has_raised else self.cause

    def has_ended(self, rank: int) -> bool:
        """Whether a rank's process is known to have ended."""
        return rank in self._ended

    @property
    def ended(self) -> list[RankInfo]:
        """The ranks whose processes are known to have ended."""
        return [self._table[rank] for rank in sorted(self._ended)]

    def wait(self, seconds: float) -> PeerEvent | None:
        """The cause, or else a departure, waiting up to ``seconds`` for it."""
        with self.arrived:
            self.arrived.wait_for(lambda: self.cause_or_departure, timeout=seconds)
            return self.cause_or_departure

    def report(self, event: PeerEvent) -> PeerEvent:
        """Tell all ranks, this one included, why they cannot go on; returns the first event, which all of them use."""
        if self._rank != 0 and self._channel is not None:
            self._channel.send("event", asdict(event))
            if self._channel.is_current_thread:
                return event  # the thread is needed for rank 0's answer
            with self.arrived:
                self.arrived.wait_for(lambda: self.cause, timeout=self._timeouts.first_cause)
        return self._take(event)

    def report_own_failure(self, event: PeerEvent) -> PeerEvent:
        """The same for this rank's own failure: its main thread raises already."""
        self.note_raised()
        return self.report(event)

    def note_raised(self) -> None:
        """The main thread knows of the event and raises; the process need not be ended."""
        with self.arrived:
            self._has_raised = True
            self.arrived.notify_all()
            if self._exit_timer is not None:
                self._exit_timer.cancel()

    def close(self) -> None:
        """Forget the others."""
        self.note_raised()
        self._release = _nothing

    # On the channel's thread.

    def _hear(self, body: Message) -> None:
        sender = body.pop("from")
        event = PeerEvent(**body)
        if event.kind == "left":
            self._note_departure(event)
        else:
            if event.kind == "died" and sender == 0:
                self._ended.add(event.rank)
            self._take(event)

    def _on_closed(self, rank: int, reason: str) -> None:
        self._ended.add(rank)
        event = event_of("died" if reason else "left", self._table[rank], reason)
        if reason:
            self._take(event)
        else:
            self._note_departure(event)

    def _note_departure(self, event: PeerEvent) -> None:
        with self.arrived:
            is_first = self._departed is None
            self._departed = self._departed or event
            self.arrived.notify_all()
        if is_first and self._rank == 0:
            self._tell(event)

    # On any thread.

    def _take(self, event: PeerEvent) -> PeerEvent:
        with self.arrived:
            is_first = self.cause is None
            self.cause = self.cause or event
            self.arrived.notify_all()
        if is_first:
            if self._rank == 0:
                self._tell(event)
            self._end_later(event)
            self._release(event)
        return self.cause

    def _tell(self, event: PeerEvent) -> None:
        if self._channel is not None:
            self._channel.send("event", asdict(event))

    def _end_later(self, event: PeerEvent) -> None:
        with self.arrived:
            if self._has_raised:
                return
            self._exit_timer = threading.Timer(self._timeouts.grace[event.kind], self._end_process, [event])
            self._exit_timer.name = "ddpx-exit"
            self._exit_timer.daemon = True
            self._exit_timer.start()

    def _end_process(self, event: PeerEvent) -> None:
        """The main thread is somewhere that nothing can wake it from. No cleaning up: it could block, too."""
        if _supervised == 0 and not self.is_forming:
            return
        if is_end_delayed():
            self._say(f"{event.to_error()}; this rank finishes the checkpoint that it is writing")
            wait_for_delays()
            with self.arrived:
                if self.arrived.wait_for(lambda: self._has_raised, self._timeouts.grace[event.kind]):
                    return
        self._say(f"{type(event.to_error()).__name__}: {event.to_error()}")
        end_at_once(1)

    def _say(self, sentence: str) -> None:
        sys.stderr.write(f"[rank {self._rank}] {sentence}\n")
        sys.stderr.flush()


def _nothing(_event: PeerEvent) -> None:
    """There is nobody left to wake."""


def alone(info: RankInfo) -> RankTable:
    """The table of a world of one rank."""
    return RankTable("alone", (info,))
