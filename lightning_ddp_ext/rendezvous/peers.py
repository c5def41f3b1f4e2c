"""Report the death, failure or departure of a rank to all others, and react to it.

1. The channel detects a closed connection, or a rank reports another **event**.
2. Rank 0 decides which event was first, and sends it to all ranks.
3. If the ranks cannot continue after it, it is the **cause** of their errors. Each rank
   aborts pending collectives, which unblocks its main thread with an error.
4. If nothing unblocks that thread during a run, the process is forced to exit.

An orderly departure is not a cause: only a rank that still waits for the others raises.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from typing import Literal

from lightning_ddp_ext.errors import RankAbsentError, RankDiedError, RankFailedError
from lightning_ddp_ext.forced_exit import ForcedExit
from lightning_ddp_ext.ranks import RemoteTraceback, shortened
from lightning_ddp_ext.rendezvous.channel import ENDED, Channel, Message
from lightning_ddp_ext.rendezvous.request import RankInfo, Timeouts
from lightning_ddp_ext.rendezvous.runs import current_run

Kind = Literal["died", "failed", "left", "absent", "hung"]

_ERRORS: dict[Kind, type[RankFailedError]] = {
    "died": RankDiedError,
    "failed": RankFailedError,
    "left": RankFailedError,
    "absent": RankAbsentError,
    "hung": RankAbsentError,
}
_LONGEST_TEXT = 1 << 15  # characters of a reason or a traceback


@dataclass(frozen=True)
class PeerEvent:
    """A rank's death, failure, departure or hang, or a call that it did not make."""

    kind: Kind
    who: RankInfo
    reason: str = ""
    traceback_text: str = ""

    def to_error(self) -> RankFailedError:
        """Return the exception that other ranks raise because of this event.

        Its cause is the rank's traceback, if there is one.
        """
        error = _ERRORS[self.kind](
            self._sentence(),
            rank=self.who.rank,
            host=self.who.host,
            pid=self.who.pid,
            traceback_text=self.traceback_text,
        )
        error.__cause__ = RemoteTraceback(self.traceback_text) if self.traceback_text else None
        return error

    def _sentence(self) -> str:
        return {
            "died": f"{self.who} died: {self.reason}; every rank stops. Look for the reason in its"
            " own output (gloo aborts a process if ranks pass tensors of different sizes to a"
            " collective), or in its host's log (out of memory?)",
            "failed": f"{self.who} failed, so this rank stops: {self.reason}",
            "left": f"{self.who} finished and exited, but this rank still needs it for"
            f" {self.reason or 'a collective'}; make sure that every rank makes the same calls in"
            " the same order",
            "absent": self.reason,
            "hung": f"{self.reason}; every rank stops",
        }[self.kind]


def event_of(kind: Kind, info: RankInfo, reason: str = "", traceback_text: str = "") -> PeerEvent:
    """Return the event of a rank in the table, short enough for one message."""
    return PeerEvent(kind, info, reason[:_LONGEST_TEXT], shortened(traceback_text, _LONGEST_TEXT))


class Peers:
    """The other ranks, and their failures and departures.

    Args:
        abort: called after the first failure, to unblock the main thread. For the other
            arguments, see the attributes.

    Attributes:
        rank: this process's rank.
        table: all ranks, in order.
        everyone: the numbers of all ranks.
        mine: this process, as in the table.
        channel: the channel to rank 0, or on rank 0 to all other ranks.
        timeouts: the timeouts of the control channel.
        arrived: the channel's condition, which is also notified at each event.
        cause: the first event after which the ranks cannot continue together: a death,
            a failure (even this rank's own), a hang, or a missed call. Once set, it
            does not change.
        has_raised: whether the main thread has raised an error because of the cause.
            :meth:`record_raised` sets it; the forced exit, ``sys.excepthook`` and
            :func:`join` for a further Trainer read it.
    """

    def __init__(
        self,
        rank: int,
        table: tuple[RankInfo, ...],
        channel: Channel,
        timeouts: Timeouts,
        abort: Callable[[], None],
    ) -> None:
        self.cause: PeerEvent | None = None
        self.has_raised = False
        self.rank = rank
        self.table = table
        self.everyone = range(len(table))
        self.mine = table[rank]
        self.channel = channel
        self.arrived = channel.arrived
        self.timeouts = timeouts
        self._abort = abort
        self._departed: PeerEvent | None = None  # the first orderly departure
        self._forced_exit = ForcedExit("ddpx-exit")

    def handle_events(self) -> None:
        """Handle events from now on, and on this thread those that arrived earlier."""
        self.channel.on_message("event", self._handle_message)
        self.channel.on_message(ENDED, self._handle_end)

    @property
    def cause_or_departure(self) -> PeerEvent | None:
        """The cause, otherwise the first orderly departure of a rank."""
        return self.cause or self._departed

    def check(self) -> None:
        """Raise the error of the cause, if any."""
        if self.cause is not None:
            raise self.cause.to_error()

    def check_unhandled(self) -> None:
        """Raise the error of the cause, unless the script has handled it.

        It has if this rank has raised the error. The ranks can then connect again,
        except after a death.
        """
        if not self.has_raised or (self.cause is not None and self.cause.kind == "died"):
            self.check()

    def wait(self, seconds: float) -> PeerEvent | None:
        """Wait up to ``seconds`` for a cause or a departure, and return it, if any."""
        self.wait_for(lambda: False, seconds)
        return self.cause_or_departure

    def wait_for(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until the condition holds or an event arrives; return whether it holds.

        Args:
            condition: checked after each message.
            seconds: the longest wait; ``None`` for no limit.
        """
        with self.arrived:
            self.arrived.wait_for(
                lambda: condition() or self.cause_or_departure is not None, seconds
            )
            return condition()

    def tell(self, ranks: Collection[int], topic: str, body: Message) -> None:
        """Send a message to ranks, of which this one may be one. Never waits.

        Rank 0 sends to any rank, every other rank only to ``[0]``.
        """
        self.channel.send(topic, body, ranks)
        if self.rank in ranks:
            self.channel.deliver(topic, {**body, "from": self.rank})

    def report(self, event: PeerEvent) -> None:
        """Report to all ranks, including this one, why they cannot continue.

        Rank 0 decides which event is the cause. Other ranks wait for it, and use their
        own event if rank 0 does not answer; the channel's thread does not wait, since it
        has to receive the answer.
        """
        if self.rank != 0:
            self.channel.send("event", {"event": asdict(event)})
            if self.channel.is_current_thread:
                return
            self.channel.wait_for(lambda: self.cause is not None, self.timeouts.first_cause)
        self._record_cause(event)

    def record_raised(self) -> None:
        """Record that the main thread is raising because of the cause.

        This process then need not be forced to exit.
        """
        with self.arrived:
            self.has_raised = True
            self.arrived.notify_all()
        self._forced_exit.cancel()

    # On the channel's thread, or on the thread that reports or handles earlier events.

    def _handle_message(self, body: Message) -> None:
        values = body["event"]
        self._record(PeerEvent(**{**values, "who": RankInfo(**values["who"])}))

    def _handle_end(self, body: Message) -> None:
        kind: Kind = "died" if body["reason"] else "left"
        self._record(event_of(kind, self.table[body["from"]], body["reason"]))

    def _record(self, event: PeerEvent) -> None:
        """Record an event that a message reports; only the first of both sorts counts."""
        if event.kind == "left":
            self._record_departure(event)
        else:
            self._record_cause(event)

    def _record_departure(self, event: PeerEvent) -> None:
        """Record a departure; only a rank that waits reacts to it."""
        with self.arrived:
            if self._departed is not None:
                return
            self._departed = event
            self.arrived.notify_all()
        self._pass_on(event)

    def _record_cause(self, event: PeerEvent) -> None:
        """Record a cause, and unblock the main thread or force the exit."""
        with self.arrived:
            if self.cause is not None:
                return
            self.cause = event
            self.arrived.notify_all()
        self._pass_on(event)
        self._exit_if_blocked(event)  # before the abort, which may block
        if self.channel.is_current_thread:
            # It may take seconds, so the thread sends the event before it.
            self.channel.call(self._abort)
        else:
            self._abort()

    def _pass_on(self, event: PeerEvent) -> None:
        """On rank 0, send an event to the other ranks, which then have the same one."""
        if self.rank == 0:
            self.channel.send("event", {"event": asdict(event)})

    def _exit_if_blocked(self, event: PeerEvent) -> None:
        """Start to force the exit of a main thread that stays blocked in a run.

        The exit skips clean-up, which could also block.
        """
        error = event.to_error()
        seconds = self.timeouts.grace[event.kind]
        sentence = f"[rank {self.rank}] {type(error).__name__}: {error}"
        with self.arrived:
            # Outside of a run the process continues. Since Python 3.12, no thread can
            # start during shutdown.
            if not self.has_raised and current_run() is not None:
                self._forced_exit.start(
                    seconds,
                    1,
                    lambda: sentence,
                    is_needed=lambda: current_run() is not None,
                    seconds_after_saves=seconds,
                )
