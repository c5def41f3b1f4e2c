"""Stop all ranks at the same point of the program after one of them received a signal.

Every rank passes the same stop points in the same order: before each request of a training
batch, before each step of an evaluation, and at the end of the run. Each rank counts those
that it has passed, and the steps of an evaluation separately: the position after an
evaluation does not depend on the steps in it. A rank that receives a signal sends a request
to rank 0 over the control channel, and rank 0 pauses all ranks: each main thread waits at
its next stop point, and each channel thread replies with the rank's position. The ranks
thus agree on the first stop point that none of them has passed, and stop there.

Only the channel threads reply, so ranks that are in a collective at that time always
complete it. Until a signal arrives, a stop point only counts.

If ranks have evaluations of different lengths, that stop point may be a step that a
rank does not have. The ranks are then in different calls, which ends the run as usual.

If a rank neither stops in time, nor exits in time after an exception, its
:class:`SaveDeadline` ends the process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from signal import Signals
from typing import NamedTuple

from lightning_ddp_ext.forced_exit import ForcedExit
from lightning_ddp_ext.rank_lists import listed
from lightning_ddp_ext.rendezvous.channel import Message
from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.request import RankInfo
from lightning_ddp_ext.rendezvous.runs import current_run
from lightning_ddp_ext.supervision.pusher import StatusPusher
from lightning_ddp_ext.supervision.signals import StopSignals, status_of
from lightning_ddp_ext.supervision.stacks import call_site_of, main_frame
from lightning_ddp_ext.threads import start_thread

_END_TOGETHER = (
    "if only some ranks set trainer.should_stop or return -1 from on_train_batch_start, let every"
    " rank do so with trainer.strategy.reduce_boolean_decision(stop, all=False); if the ranks have"
    " different numbers of batches, use DDPExtStrategy(uneven_inputs='stop_at_shortest')"
)
_SECONDS_AFTER_SAVES = 3.0  # from a finished save to the exit, after the deadline


@dataclass(frozen=True)
class StopRequest:
    """A request to stop, from the rank that received the signal."""

    signum: int
    rank: int
    host: str

    def __str__(self) -> str:
        return f"{Signals(self.signum).name} to rank {self.rank} (host {self.host})"


class _Position(NamedTuple):
    """A stop point, ordered as the program passes them.

    >>> _Position(3).next_step()
    _Position(point=3, step=1)
    >>> _Position(3, step=1).next_step() < _Position(3, step=1).next_point()
    True
    """

    point: int  # the number of those outside of evaluations so far
    step: int = 0  # the number of evaluation steps since the last of them

    def next_point(self) -> _Position:
        """Return the next stop point outside of evaluations."""
        return _Position(self.point + 1)

    def next_step(self) -> _Position:
        """Return the very next stop point, which exists if an evaluation is under way."""
        return _Position(self.point, self.step + 1)


class GracefulStop:
    """This rank's part in stopping together in one run, the Trainer's call.

    Args:
        context: this rank's connections.
        statuses: finds the rank that others wait for.
        run: the number of the run, the same on all ranks. The topic of the messages has
            it, so those of ranks that have started the run earlier are kept until this
            rank does.
        limit: the time from the first signal or an exception until ranks that are still
            running must exit.
        acknowledge: called on rank 0 with the first request, in a thread.

    Attributes:
        signals: this process's signal handlers, which the caller installs.
        deadline: makes this process exit when the limit has passed.
    """

    def __init__(
        self,
        context: ProcessContext,
        statuses: StatusPusher,
        *,
        run: int,
        limit: timedelta,
        acknowledge: Callable[[StopRequest], object],
    ) -> None:
        self.signals = StopSignals(self._request_stop, _run_has_ended)
        self.deadline = SaveDeadline(context, limit, self._silent_ranks)
        self._barriers = context.barriers
        self._peers = context.peers
        self._statuses = statuses
        # The longest wait for another rank; then there is time for one to save alone.
        self._half = limit.total_seconds() / 2
        self._acknowledge = acknowledge
        self._topic = f"stop {run}"
        # The state, in the order in which it is set. The main thread and the handler of
        # messages read and change it with the lock of ``arrived``, so that a rank pauses
        # either before or after it passes a stop point.
        self._position = _Position(0)  # at which the main thread is, or the last one it passed
        self._request: StopRequest | None = None  # the first one; from then on, ranks pause
        self._paused_at: dict[int, _Position] = {}  # on rank 0: by rank
        self._target: _Position | None = None  # ranks stop at the first point from it on
        self._peers.channel.on_message(self._topic, self._handle_message)

    def end(self) -> None:
        """Restore the signal handlers, and ignore requests from now on."""
        self.signals.restore()
        self._take_request()
        self._acknowledge = lambda request: None  # this object outlives the Trainer
        self.deadline.cancel()

    # Stop points, in the main thread.

    def at_point(self) -> StopRequest | None:
        """Return the request if all ranks stop here.

        Every rank must call it at the same points.

        Raises:
            RankFailedError: a rank died or failed, which takes precedence over a
                request; it may be a subclass.
        """
        return self._take_request() if self._stops_at(self._position.next_point()) else None

    def at_step(self, may_stop: Callable[[], bool]) -> StopRequest | None:
        """Return the request if all ranks stop here.

        Called before each step of an evaluation.

        Args:
            may_stop: called where all ranks would stop, with the same result on each.
                If it returns False, they stop at the next point outside of evaluation
                steps.
        """
        if not self._stops_at(self._position.next_step()):
            return None
        if may_stop():
            return self._take_request()
        with self._peers.arrived:
            self._target = self._position.next_point()
        return None

    def at_last_point(self) -> StopRequest | None:
        """Return the request if all ranks stop at their last stop point. Collective.

        A rank sends its request before it enters the barrier, so all ranks pause before
        the barrier opens. A rank that is still in slow callbacks may be late, as long
        as it replies.
        """
        self._request_received_stop()
        self._barriers.enter(
            "the final barrier of the Trainer's run",
            remedy=_END_TOGETHER,
            may_be_late=True,
        )
        return self.at_point()

    def _stops_at(self, position: _Position) -> bool:
        """Whether the ranks stop at this point; waits until they have agreed where.

        Raises:
            RankFailedError: a rank died or failed meanwhile; it may be a subclass.
        """
        # Before the position changes, so that the ranks can agree on this point.
        self._request_received_stop()
        with self._peers.arrived:
            self._position = position
            if self._request is None:
                return False
            if not self._peers.wait_for(lambda: self._target is not None, self._half):
                self._statuses.ask_and_wait(
                    f"rank {self._peers.rank} has waited at its stop point for half of"
                    f" save_deadline, {self._half:g} s"
                )
                self._peers.wait_for(lambda: self._target is not None)
            self._peers.check()
            # It is still missing if a rank left in order, which ends the wait.
            return self._target is not None and position >= self._target

    def _take_request(self) -> StopRequest | None:
        """Return the request, and drop the messages of later ones in this run."""
        with self._peers.arrived:
            request = self._request
            self._request = None
            self._target = None
            self._statuses.lift_limit()
            self._peers.channel.forget(self._topic)
            return request

    # Requests and their messages, in other threads.

    def _request_stop(self, signum: int) -> None:
        """Have all ranks stop; for any thread, but not for a signal handler.

        Further requests have no effect, nor have those after a failure.
        """
        if self._peers.cause is None and current_run() is not None:
            request = StopRequest(signum, self._peers.rank, self._peers.mine.host)
            self._limit_stop(request)  # now, in case rank 0 does not reply
            self._peers.tell([0], self._topic, {"request": asdict(request)})

    def _request_received_stop(self) -> None:
        """Request a stop for a received signal, in case no other thread was woken."""
        if self.signals.received:
            self._request_stop(self.signals.received[-1])

    def _handle_message(self, body: Message) -> None:
        """Handle a message; the cases are in the order in which messages are sent."""
        match body:
            case {"request": request}:  # to rank 0, which sends the first one to all others
                if self._request is None:
                    self._pause(StopRequest(**request))
            case {"position": position}:  # of a rank that has paused, to rank 0
                self._paused_at[body["from"]] = _Position(*position)
                if len(self._paused_at) == len(self._peers.everyone):
                    target = max(self._paused_at.values()).next_step()
                    self._peers.tell(self._peers.everyone, self._topic, {"target": target})
            case {"target": target}:  # to all ranks
                self._target = _Position(*target)

    def _pause(self, request: StopRequest) -> None:
        """Let the main thread pass no stop point, and send rank 0 the last one it passed.

        On rank 0, first pause the other ranks.
        """
        if self._peers.rank == 0:
            self._peers.channel.send(self._topic, {"request": asdict(request)})
            start_thread("ddpx-stop", self._acknowledge, request)
        self._request = request
        self._limit_stop(request)
        self._peers.tell([0], self._topic, {"position": self._position})

    def _limit_stop(self, request: StopRequest) -> None:
        """Limit the time until the ranks stop, and the waits of each for another one."""
        self._statuses.limit_waits(self._half, "half of save_deadline,")
        self.deadline.limit_stop(request)

    def _silent_ranks(self) -> list[RankInfo]:
        """Return the ranks that have not paused, if this is rank 0, which waits for them."""
        # Without the lock, since a process whose threads are stuck also has to exit.
        is_waiting = self._request is not None and self._target is None and self._peers.rank == 0
        return [
            info for info in self._peers.table if is_waiting and info.rank not in self._paused_at
        ]


class SaveDeadline:
    """Makes this process exit in the middle of whatever it does, after a time limit.

    The limit begins with the first signal or exception, and is called ``save_deadline``
    in the message.

    Args:
        context: this rank's connections.
        limit: the time until the exit.
        silent_ranks: returns the ranks that delay a stop, for the message.
    """

    def __init__(
        self,
        context: ProcessContext,
        limit: timedelta,
        silent_ranks: Callable[[], list[RankInfo]],
    ) -> None:
        self._rank = context.peers.rank
        self._seconds = limit.total_seconds()
        self._silent_ranks = silent_ranks
        self._forced_exit = ForcedExit("ddpx-stop-deadline")

    def limit_stop(self, request: StopRequest) -> None:
        """Limit the time until the ranks stop."""
        self._forced_exit.start(
            self._seconds,
            status_of(request.signum),
            partial(self._message, f"{request}: the ranks have not stopped"),
        )

    def limit_exit(self, reason: str, is_needed: Callable[[], bool]) -> None:
        """Limit the time until this rank exits after an exception.

        It exits even if hooks or teardown block.

        Args:
            reason: the exception.
            is_needed: called when the time is up; if it returns False, the process
                continues.
        """
        self._forced_exit.start(
            self._seconds,
            1,
            partial(self._message, f"{reason}; the process raised an exception and has not exited"),
            is_needed=is_needed,
            seconds_after_saves=_SECONDS_AFTER_SAVES,
        )

    def cancel(self) -> None:
        """Lift the limit; a later exception sets it again."""
        self._forced_exit.cancel()

    def _message(self, finding: str) -> str:
        """Return the last message of this process."""
        silent = self._silent_ranks()
        silence = f", and {listed(silent)} did not answer" if silent else ""
        return (
            f"[rank {self._rank}] {finding} within {self._seconds:g} s (save_deadline){silence},"
            f" so rank {self._rank} exits at {call_site_of(main_frame())}; earlier checkpoints are"
            " intact. Pass a longer save_deadline if the ranks only need more time"
        )


def _run_has_ended() -> bool:
    """Whether no run is under way, and no exception of one is being handled.

    Handlers that are then still installed belong to a run without a teardown.
    """
    return current_run() is None and sys.exc_info()[1] is None
