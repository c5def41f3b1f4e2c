"""Stop all ranks at the same point of the program after one of them received a signal.

Every rank passes the same stop points in the same order: the end of each training step,
each step of an evaluation, and the end of training. Each rank counts those that it has
passed. A rank that receives a signal sends a request to rank 0 over the control
channel, and rank 0 pauses all ranks: each main thread waits at its next stop point, and
each channel thread replies with the rank's count. The ranks thus agree on the first
stop point that none of them has passed.

Only the channel threads reply, so ranks that are in a collective at that time always
complete it. Until a signal arrives, a stop point costs an addition and a comparison.

A rank with a request for its current job waits for the target at its next stop point.
Once it has the target, it stops there. It forgets both when it stops, and after its
last stop point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from signal import Signals
from typing import NamedTuple, cast

from lightning_ddp_ext.forced_exit import ForcedExit
from lightning_ddp_ext.rank_lists import listed
from lightning_ddp_ext.rendezvous.channel import Message
from lightning_ddp_ext.rendezvous.process_context import ProcessContext, current, join
from lightning_ddp_ext.rendezvous.request import Request
from lightning_ddp_ext.supervision.signals import status_of
from lightning_ddp_ext.supervision.stacks import call_site_of, main_frame
from lightning_ddp_ext.supervision.status_table import StatusTable
from lightning_ddp_ext.threads import start_thread

_END_TOGETHER = (
    "if only some ranks set trainer.should_stop or return -1 from on_train_batch_start, let every"
    " rank do so with trainer.strategy.reduce_boolean_decision(stop, all=False); if the ranks have"
    " different numbers of batches, use DDPExtStrategy(uneven_inputs='stop_at_shortest')"
)
_SECONDS_AFTER_SAVES = 3.0  # from a finished save to the exit, after the deadline


@dataclass(frozen=True)
class StopRequest:
    """A request to stop, from the rank that received the signal.

    ``job`` is the ordinal of the ranks' current job.
    """

    signum: int
    rank: int
    host: str
    job: int

    def __str__(self) -> str:
        return f"{Signals(self.signum).name} to rank {self.rank} (host {self.host})"


class StopPoint(NamedTuple):
    """A stop point outside of evaluations, or a step of the evaluation after it."""

    point: int
    step: int = 0  # 0 is the point itself
    # The length of the evaluation on the rank that is in it. It is 0 in a target, so a
    # rank that has reached the target compares as greater or equal.
    evaluation_steps: int = 0


def next_common(positions: Sequence[StopPoint]) -> StopPoint:
    """Return the first stop point that no rank has passed and that all will reach.

    If the evaluation is shorter on some rank, this is the next point outside of
    evaluation steps.

    >>> next_common([StopPoint(4, 17, 100), StopPoint(4, 18, 99)])[:2]
    (4, 19)
    >>> next_common([StopPoint(4, 99, 100), StopPoint(4, 99, 99)])[:2]
    (5, 0)

    The result may be in an evaluation that none has started. If none starts, ranks
    stop at the next point.

    >>> next_common([StopPoint(4), StopPoint(5)])[:2]
    (5, 1)
    """
    furthest = max(positions)
    lengths = [
        position.evaluation_steps
        for position in positions
        if position.point == furthest.point and position.evaluation_steps > 0
    ]
    next_step = furthest.step + 1
    if next_step <= min(lengths, default=next_step):
        return StopPoint(furthest.point, next_step)
    return StopPoint(furthest.point + 1)


class GracefulStop:
    """This rank's part in stopping together, for all Trainers that use the connections.

    Args:
        context: the connections to the other ranks.
        raise_if_a_rank_is_silent: raises if a rank does not push its status.

    Attributes:
        is_active: whether a Trainer of this process handles requests.
    """

    def __init__(
        self, context: ProcessContext, raise_if_a_rank_is_silent: Callable[[], None]
    ) -> None:
        self._raise_if_a_rank_is_silent = raise_if_a_rank_is_silent
        self._context = context
        self._peers = context.peers
        self._position = StopPoint(0)
        self._job = 0
        self.is_active = False
        self._request: StopRequest | None = None  # of this job, or of the next one
        self._target: StopPoint | None = None  # once the ranks have agreed
        self._positions: dict[int, StopPoint] = {}  # on rank 0, of the ranks that have paused
        self._seconds = 0.0  # from the first signal to the deadline
        self._acknowledge: Callable[[StopRequest], object] = lambda request: None
        self._forced_exit = ForcedExit("ddpx-stop-deadline")
        context.peers.channel.on_message("stop", self._handle_request)
        context.peers.channel.on_message("pause", self._pause)
        context.peers.channel.on_message("position", self._record_position)
        context.peers.channel.on_message("target", self._set_target)

    def request_stop(self, signum: int) -> None:
        """Have all ranks stop; for any thread, but not for a signal handler.

        Further requests have no effect, nor have those after a failure.
        """
        if self._peers.cause is not None:
            return
        request = StopRequest(signum, self._peers.rank, self._peers.mine.host, self._job)
        self._limit_stop(request)
        self._peers.tell([0], "stop", {"request": asdict(request)})

    def start(self, deadline: timedelta, acknowledge: Callable[[StopRequest], object]) -> None:
        """Handle requests from now on: the ranks have begun a job with stop points.

        Args:
            deadline: the time from the first signal or an exception until ranks that
                are still running must exit.
            acknowledge: called on rank 0 with the first request, in a thread.
        """
        self._forced_exit.cancel()  # a run whose ``on_exception`` raised has skipped teardown
        with self._peers.arrived:
            self._job += 1
            self._position = StopPoint(self._job << 32)  # counts may differ after an exception
            self.is_active = True
            self._seconds = deadline.total_seconds()
            self._acknowledge = acknowledge
            if self._request is not None:  # a rank that started before this one sent it
                self._limit_stop(self._request)
                self._start_agreement(self._request)

    def end(self) -> None:
        """Ignore requests from now on, after a stop or the last stop point."""
        with self._peers.arrived:
            self.is_active = False
            self._acknowledge = lambda request: None  # this object outlives the Trainer
            if self._request is not None and self._has_finished(self._request.job):
                self._reset()
        self._forced_exit.cancel()

    # Stop points, in the main thread.

    def at_point(self) -> StopRequest | None:
        """Return the request if all ranks stop here.

        Every rank must call it at the same points.

        Raises:
            RankFailedError: a rank died or failed, which takes precedence over a
                request; it may be a subclass.
        """
        self._position = StopPoint(self._position.point + 1)
        return self._take_request() if self._is_due() else None

    def at_step(
        self, count_steps: Callable[[], int], may_stop: Callable[[], bool]
    ) -> StopRequest | None:
        """Return the request if all ranks stop here.

        Called before each step of an evaluation.

        Args:
            count_steps: returns this rank's number of evaluation steps, or 1 if
                unknown; called in the first step.
            may_stop: called where all ranks would stop, with the same result on each.
                If it returns False, they stop at the next point outside of evaluation
                steps.
        """
        point, step, evaluation_steps = self._position
        if step == 0:
            evaluation_steps = count_steps()
        self._position = StopPoint(point, step + 1, evaluation_steps)
        if not self._is_due():
            return None
        if may_stop():
            return self._take_request()
        self._target = StopPoint(point + 1)
        return None

    def at_last_point(self) -> StopRequest | None:
        """Return the request if all ranks stop at their last stop point. Collective.

        A rank sends its request before it enters the barrier, so all ranks pause before
        the barrier opens. A rank that is still in slow callbacks may be late, as long
        as it replies.
        """
        self._context.barriers.enter(
            "the final barrier of the Trainer's run",
            remedy=_END_TOGETHER,
            if_late=self._raise_if_a_rank_is_silent,
        )
        return self.at_point()

    def _is_due(self) -> bool:
        """Whether the ranks stop here; waits until they have agreed where.

        Raises:
            RankFailedError: a rank died or failed meanwhile; it may be a subclass.
        """
        if self._request is None or self._request.job != self._job:
            return False
        with self._peers.arrived:
            self._peers.wait_for(lambda: self._target is not None)
            self._peers.check()
            return self._target is not None and self._position >= self._target

    def _take_request(self) -> StopRequest | None:
        """Return the request, and forget it."""
        with self._peers.arrived:
            request = self._request
            self.is_active = False
            self._reset()
            return request

    def _reset(self) -> None:
        self._request = None
        self._target = None

    # The agreement, in other threads.

    def _has_finished(self, job: int) -> bool:
        """Whether this rank has finished that job.

        A late message must not stop the next one.
        """
        return job < self._job or (job == self._job and not self.is_active)

    def _handle_request(self, body: Message) -> None:
        """Handle a request on rank 0.

        After the first one, all ranks pause as soon as rank 0 has started that job.
        """
        request = StopRequest(**body["request"])
        if self._request is None and not self._has_finished(request.job):
            self._request = request
            if request.job == self._job:
                self._start_agreement(request)

    def _start_agreement(self, request: StopRequest) -> None:
        """On rank 0, pause all ranks before another barrier opens."""
        if self._peers.rank == 0:
            self._positions.clear()
            self._peers.tell(self._peers.everyone, "pause", {"request": asdict(request)})
            start_thread("ddpx-stop", self._acknowledge, request)

    def _pause(self, body: Message) -> None:
        request = StopRequest(**body["request"])
        if not self._has_finished(request.job):
            self._request = request
            self._limit_stop(request)
        # Read after the request is set; the main thread uses the opposite order.
        self._peers.tell([0], "position", {"position": self._position, "job": request.job})

    def _record_position(self, body: Message) -> None:
        """On rank 0, let all ranks stop at their next common point once all have paused."""
        if self._request is None or body["job"] != self._request.job:
            return
        self._positions[body["from"]] = StopPoint(*body["position"])
        if len(self._positions) == len(self._peers.everyone):
            target = next_common(list(self._positions.values()))
            self._peers.tell(self._peers.everyone, "target", {"target": target, "job": body["job"]})

    def _set_target(self, body: Message) -> None:
        if not self._has_finished(body["job"]):
            self._target = StopPoint(*body["target"])

    # The deadline.

    def limit_exit(self, *, is_needed: Callable[[], bool] = lambda: True) -> None:
        """Limit the time until this rank exits after an exception.

        It exits even if hooks or teardown block. :meth:`end` lifts the limit.

        Args:
            is_needed: called when the time is up; if it returns False, the process
                continues.
        """
        if self._seconds:  # otherwise no Trainer has run
            finding = "the process raised an exception and has not exited"
            self._forced_exit.start(
                self._seconds,
                1,
                partial(self._explain_exit, finding),
                is_needed=is_needed,
                seconds_after_saves=_SECONDS_AFTER_SAVES,
            )

    def _limit_stop(self, request: StopRequest) -> None:
        if self.is_active:
            finding = f"{request}: the ranks have not stopped"
            self._forced_exit.start(
                self._seconds, status_of(request.signum), partial(self._explain_exit, finding)
            )

    def _explain_exit(self, finding: str) -> str:
        rank = self._peers.rank
        is_pausing = rank == 0 and self._request is not None and self._target is None
        silent = [
            info for info in self._context.table if is_pausing and info.rank not in self._positions
        ]
        silence = f", and {listed(silent)} did not answer" if silent else ""
        return (
            f"[rank {rank}] {finding} within {self._seconds:g} s (save_deadline){silence}, so"
            f" rank {rank} exits at {call_site_of(main_frame())}; earlier checkpoints are"
            " intact. Pass a longer save_deadline if the ranks only need more time"
        )


class Session:
    """This rank's part in statuses and stops.

    A session is built when the ranks have connected, and lasts until they disconnect.
    Messages of other ranks that arrive earlier are kept for it.

    Attributes:
        context: the connections and process groups.
        statuses: finds the rank that others wait for.
        stops: stops all ranks together after a signal.
    """

    def __init__(self, context: ProcessContext) -> None:
        self.context = context
        self.statuses = StatusTable(context)
        self.stops = GracefulStop(context, self.statuses.raise_if_a_rank_is_silent)


def start_session(request: Request) -> Session | None:
    """Connect the ranks with :func:`join`, and return the session of their connections.

    Connections that are used again keep their session. Collective: every rank must call
    it. Return ``None`` if other code opened the process group.
    """
    context = join(request)
    if context is not None and context.session is None:
        context.session = Session(context)
    return current_session()


def current_session() -> Session | None:
    """Return this process's session; ``None`` while it is not connected."""
    context = current()
    return None if context is None else cast(Session | None, context.session)
