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
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from signal import Signals

from lightning_ddp_ext.forced_exit import ForcedExit
from lightning_ddp_ext.rank_lists import listed
from lightning_ddp_ext.rendezvous.channel import Message
from lightning_ddp_ext.rendezvous.runs import current_run
from lightning_ddp_ext.supervision.session import Session
from lightning_ddp_ext.supervision.signals import StopSignals, status_of
from lightning_ddp_ext.supervision.stacks import call_site_of, main_frame
from lightning_ddp_ext.threads import start_thread

_END_TOGETHER = (
    "if only some ranks set trainer.should_stop or return -1 from on_train_batch_start, let every"
    " rank do so with trainer.strategy.reduce_boolean_decision(stop, all=False); if the ranks have"
    " different numbers of batches, use DDPExtStrategy(uneven_inputs='stop_at_shortest')"
)
# A stop point: the number of those outside of evaluations so far, and the number of
# evaluation steps since the last of them; ordered as the program passes them.
_Position = tuple[int, int]
_SECONDS_AFTER_SAVES = 3.0  # from a finished save to the exit, after the deadline


@dataclass(frozen=True)
class StopRequest:
    """A request to stop, from the rank that received the signal."""

    signum: int
    rank: int
    host: str

    def __str__(self) -> str:
        return f"{Signals(self.signum).name} to rank {self.rank} (host {self.host})"


@dataclass(frozen=True)
class _Agreement:
    """How far the ranks have agreed to stop, as this rank knows.

    ===================  ===========  ==========
    state                ``request``  ``target``
    ===================  ===========  ==========
    no stop requested    ``None``     ``None``
    pausing              the first    ``None``
    agreed               the first    a position
    ===================  ===========  ==========

    The ranks stop at the first stop point from ``target`` on.
    """

    request: StopRequest | None = None
    target: _Position | None = None


class GracefulStop:
    """This rank's part in stopping together in one run, the Trainer's call.

    The topic of its messages has the number of the run. Those of ranks that have
    started it earlier are thus kept until this rank does, and later ones are dropped.

    Args:
        session: this rank's session, in which all ranks begin a run with stop points.
        deadline: the time from the first signal or an exception until ranks that are
            still running must exit.
        acknowledge: called on rank 0 with the first request, in a thread.

    Attributes:
        signals: this process's signal handlers, which the caller installs.
    """

    def __init__(
        self,
        session: Session,
        deadline: timedelta,
        acknowledge: Callable[[StopRequest], object],
    ) -> None:
        session.runs += 1
        session.limit_exit = self._limit_exit
        self.signals = StopSignals(self._request_stop, _run_has_ended)
        self._barriers = session.context.barriers
        self._peers = session.context.peers
        self._statuses = session.statuses
        self._seconds = deadline.total_seconds()
        # The longest wait for another rank; then there is time for one to save alone.
        self._half = self._seconds / 2
        self._acknowledge = acknowledge
        # The last stop point of the main thread, which alone sets it.
        self._position: _Position = (0, 0)
        # Messages set it, with the lock of ``arrived``, until the ranks have agreed. Then
        # the main thread may postpone the target, and resets it when it stops.
        self._agreement = _Agreement()
        self._positions: dict[int, _Position] = {}  # on rank 0: of each rank that has paused
        self._forced_exit = ForcedExit("ddpx-stop-deadline")
        self._topic = f"stop {session.runs}"
        self._peers.channel.on_message(self._topic, self._handle_message)

    def end(self) -> None:
        """Restore the signal handlers, and ignore requests from now on."""
        self.signals.restore()
        self._take_request()
        self._acknowledge = lambda request: None  # this object outlives the Trainer
        self._forced_exit.cancel()

    # Stop points, in the main thread.

    def at_point(self) -> StopRequest | None:
        """Return the request if all ranks stop here.

        Every rank must call it at the same points.

        Raises:
            RankFailedError: a rank died or failed, which takes precedence over a
                request; it may be a subclass.
        """
        return self._take_request() if self._is_due_at(self._next_outside) else None

    @property
    def _next_outside(self) -> _Position:
        """The next stop point outside of evaluation steps."""
        return (self._position[0] + 1, 0)

    def at_step(self, may_stop: Callable[[], bool]) -> StopRequest | None:
        """Return the request if all ranks stop here.

        Called before each step of an evaluation.

        Args:
            may_stop: called where all ranks would stop, with the same result on each.
                If it returns False, they stop at the next point outside of evaluation
                steps.
        """
        if not self._is_due_at(_next_step(self._position)):
            return None
        if may_stop():
            return self._take_request()
        self._agreement = replace(self._agreement, target=self._next_outside)
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

    def _is_due_at(self, position: _Position) -> bool:
        """Whether the ranks stop at this point; waits until they have agreed where.

        Raises:
            RankFailedError: a rank died or failed meanwhile; it may be a subclass.
        """
        # At the point before, so that the ranks can agree on this one.
        self._request_received_stop()
        self._position = position
        if self._agreement.request is None:
            return False
        with self._peers.arrived:
            if not self._peers.wait_for(lambda: self._agreement.target is not None, self._half):
                self._statuses.ask_and_wait(
                    f"rank {self._peers.rank} has waited at its stop point for half of"
                    f" save_deadline, {self._half:g} s"
                )
                self._peers.wait_for(lambda: self._agreement.target is not None)
            self._peers.check()
            return self._agreement.target is not None and self._position >= self._agreement.target

    def _take_request(self) -> StopRequest | None:
        """Return the request, and drop the messages of later ones in this run."""
        with self._peers.arrived:
            request = self._agreement.request
            self._agreement = _Agreement()
            self._statuses.lift_limit()
            self._peers.channel.forget(self._topic)
            return request

    # Requests, in other threads.

    def _request_stop(self, signum: int) -> None:
        """Have all ranks stop; for any thread, but not for a signal handler.

        Further requests have no effect, nor have those after a failure.
        """
        if self._peers.cause is None and current_run() is not None:
            request = StopRequest(signum, self._peers.rank, self._peers.mine.host)
            self._limit_stop(request)
            self._peers.tell([0], self._topic, {"request": asdict(request)})

    def _request_received_stop(self) -> None:
        """Request a stop for a received signal, in case no other thread was woken."""
        if self.signals.received is not None:
            self._request_stop(self.signals.received)

    def _handle_message(self, body: Message) -> None:
        """Handle a request, a rank's position (on rank 0), or the target."""
        if "target" in body:  # JSON has made a list of it
            self._agreement = replace(self._agreement, target=tuple(body["target"]))
        elif "position" in body:
            self._positions[body["from"]] = tuple(body["position"])
            if len(self._positions) == len(self._peers.everyone):
                target = _next_step(max(self._positions.values()))
                self._peers.tell(self._peers.everyone, self._topic, {"target": target})
        elif self._agreement.request is None:
            self._pause(StopRequest(**body["request"]))

    def _pause(self, request: StopRequest) -> None:
        """Wait at the next stop point, and send rank 0 this rank's position.

        On rank 0, first pause the other ranks.
        """
        if self._peers.rank == 0:
            self._peers.channel.send(self._topic, {"request": asdict(request)})
            start_thread("ddpx-stop", self._acknowledge, request)
        self._agreement = _Agreement(request)
        self._limit_stop(request)
        # Read after the request is set, while the main thread sets the position before
        # it reads the request: if that misses the request, this reads the new position.
        self._peers.tell([0], self._topic, {"position": self._position})

    # The deadline, after which this process exits in the middle of whatever it does.

    def _limit_exit(self, reason: str, is_needed: Callable[[], bool]) -> None:
        """Limit the time until this rank exits after an exception.

        It exits even if hooks or teardown block. :meth:`end` lifts the limit.

        Args:
            reason: the exception.
            is_needed: called when the time is up; if it returns False, the process
                continues.
        """
        self._forced_exit.start(
            self._seconds,
            1,
            partial(
                self._explain_exit,
                f"{reason}; the process raised an exception and has not exited",
            ),
            is_needed=is_needed,
            seconds_after_saves=_SECONDS_AFTER_SAVES,
        )

    def _limit_stop(self, request: StopRequest) -> None:
        """Limit the time until the ranks stop, and the waits of each for another one."""
        self._statuses.limit_waits(self._half, "half of save_deadline,")
        self._forced_exit.start(
            self._seconds,
            status_of(request.signum),
            partial(self._explain_exit, f"{request}: the ranks have not stopped"),
        )

    def _explain_exit(self, finding: str) -> str:
        """Return the last message of this process; on rank 0, it names silent ranks."""
        rank = self._peers.rank
        is_pausing = self._agreement.request is not None and self._agreement.target is None
        silent = [
            info
            for info in self._peers.table
            if rank == 0 and is_pausing and info.rank not in self._positions
        ]
        silence = f", and {listed(silent)} did not answer" if silent else ""
        return (
            f"[rank {rank}] {finding} within {self._seconds:g} s (save_deadline){silence}, so"
            f" rank {rank} exits at {call_site_of(main_frame())}; earlier checkpoints are"
            " intact. Pass a longer save_deadline if the ranks only need more time"
        )


def _next_step(position: _Position) -> _Position:
    """Return the first stop point after a position, if an evaluation is under way.

    >>> _next_step((3, 0)), _next_step((3, 1)) < (4, 0)
    ((3, 1), True)
    """
    point, step = position
    return (point, step + 1)


def _run_has_ended() -> bool:
    """Whether no run is under way, and no exception of one is being handled.

    Handlers that are then still installed belong to a run without a teardown.
    """
    return current_run() is None and sys.exc_info()[1] is None
