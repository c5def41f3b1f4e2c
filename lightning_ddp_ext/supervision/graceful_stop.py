"""All ranks stop at the same point of the program, because one of them was asked to.

A stop point is passed by every rank in the same order: the end of a training step, a step of an evaluation, a barrier
before training, the end of training. Each rank counts those that it has passed. A request goes to rank 0 over the
control channel, and rank 0 has all ranks pause: the main thread of each waits at its next stop point, and the channel's
thread of each reports how many it has passed. So the ranks agree on the first one that none of them has passed.

Only these threads have to answer, so ranks that work together in a collective meanwhile always come out of it. Until a
signal comes, a stop point costs an addition and a look at a bool.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from signal import Signals

from lightning_ddp_ext.at_exit import end_at_once
from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.wire import Message
from lightning_ddp_ext.supervision.call_site import call_site_of, main_frame
from lightning_ddp_ext.supervision.signals import status_of
from lightning_ddp_ext.supervision.survey import Survey


@dataclass(frozen=True)
class StopRequest:
    """Which rank was asked to stop, by which signal, and in which ``job``: the ordinal of the work of all ranks."""

    signum: int
    rank: int
    host: str
    job: int

    def __str__(self) -> str:
        return f"{Signals(self.signum).name} to rank {self.rank} (host {self.host})"


@dataclass(frozen=True)
class Position:
    """How far a rank is: stop points passed, steps begun of an evaluation since then, and how many steps that has."""

    points: int
    steps: int = 0
    of_steps: int = 0

    def has_reached(self, target: Position) -> bool:
        """Whether this is the target, or beyond it."""
        return (self.points, self.steps) >= (target.points, target.steps)


def next_common(positions: Sequence[Position]) -> Position:
    """The first stop point that no rank has passed, but no step of an evaluation that ends before it on some rank.

    Ranks that reach none of the steps stop at the next point that is no step.

    >>> next_common([Position(4, 17, 100), Position(4, 18, 99)])
    Position(points=4, steps=19, of_steps=0)
    >>> next_common([Position(4, 99, 100), Position(4, 99, 99)])
    Position(points=5, steps=0, of_steps=0)
    >>> next_common([Position(4), Position(5)])  # in an evaluation, if one begins next
    Position(points=5, steps=1, of_steps=0)
    """
    points = max(position.points for position in positions)
    furthest = [position for position in positions if position.points == points]
    steps = max(position.steps for position in furthest) + 1
    shortest = min((position.of_steps for position in furthest if position.of_steps), default=steps)
    return Position(points, steps) if steps <= shortest else Position(points + 1)


class GracefulStop:
    """This rank's part in stopping together; one for the process, as the ranks count over all Trainers."""

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._peers = context.peers
        self._rank = context.world.rank
        self._changed = context.peers.arrived
        self._position = Position(0)
        self._job = 0
        self._is_active = False
        self._is_pausing = False
        self._request: StopRequest | None = None
        self._target: Position | None = None
        self._asked_job = 0
        self._positions: dict[int, Position] = {}
        self._deadline: timedelta | None = None
        self._on_request: Callable[[StopRequest], object] = lambda request: None
        self._timer: threading.Timer | None = None
        self._survey = context.component(Survey)
        context.listen("stop", self._hear)

    def ask(self, signum: int) -> None:
        """Have all ranks stop; for any thread, but not within a signal handler. Asking again changes nothing."""
        mine = self._context.table[self._rank]
        request = StopRequest(signum, mine.rank, mine.host, self._job)
        self._start_timer(request)
        if self._rank == 0:
            self._take_request(request)
        else:
            self._context.send("stop", {"request": asdict(request)})

    def begin(self, deadline: timedelta, on_request: Callable[[StopRequest], object] = lambda request: None) -> None:
        """From now on requests are heeded: the ranks have begun a job, which has stop points.

        Args:
            deadline: what the ranks have from the first signal until they are gone; they are ended then.
            on_request: called on rank 0 with the first request, by a thread.
        """
        with self._changed:
            self._job += 1
            self._is_active = True
            self._deadline = deadline
            self._on_request = on_request
            request = self._request  # of a rank that has begun before this one
        if request is not None:
            self._start_timer(request)
            if self._rank == 0:
                self._pause_all(request)

    def end(self) -> None:
        """The ranks have stopped, or there is no stop point any more."""
        with self._changed:
            self._is_active = False
            if self._request is None or self._is_over(self._request.job):
                self._request, self._target, self._is_pausing = None, None, False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def is_active(self) -> bool:
        """Whether a Trainer of this process heeds requests."""
        return self._is_active

    # Stop points, in the main thread.

    def at_point(self) -> StopRequest | None:
        """Why all ranks stop here, if they do. Every rank must call it at the same points.

        Raises:
            RankFailedError: one of its kinds; that a rank died or failed overrules every request.
        """
        self._position = Position(self._position.points + 1)
        return self._decide() if self._is_pausing else None

    def at_step(self, of_steps: int) -> StopRequest | None:
        """The same within an evaluation, before each of its steps.

        Args:
            of_steps: how many steps this rank makes in this evaluation, if it is known, else 1.
        """
        self._position = replace(self._position, steps=self._position.steps + 1, of_steps=of_steps)
        return self._decide() if self._is_pausing else None

    def at_last_point(self) -> StopRequest | None:
        """The same where no other point follows. Collective.

        A rank's request is on its way before its part in the barrier, so all ranks pause before the barrier opens.
        Callbacks may take long before it, and their rank answers all the same.
        """
        self._context.barriers.enter("the end of its work", check=self._survey.check_that_all_answer, is_patient=True)
        return self.at_point()

    def _decide(self) -> StopRequest | None:
        """Wait until the ranks have agreed where to stop, and see whether it is here."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._target is not None or not self._is_pausing or self._peers.cause_or_departure is not None
            )
            if self._peers.cause is not None:
                raise self._peers.cause.to_error()
            if self._target is None or not self._position.has_reached(self._target):
                return None
            request = self._request
            self._is_active = self._is_pausing = False
            self._request = self._target = None
            return request

    # The agreement, in threads.

    def _hear(self, message: Message) -> None:
        """Called on the channel's thread."""
        if "request" in message:
            self._take_request(StopRequest(**message["request"]))
        elif "pause" in message:
            self._pause(StopRequest(**message["pause"]))
        elif "position" in message:
            self._collect(message["from"], Position(**message["position"]), message["job"])
        elif "target" in message:
            self._set_target(Position(**message["target"]), message["job"])

    def _is_over(self, job: int) -> bool:
        """Whether this rank is done with that job: what comes too late for it is not meant for the next one."""
        return job < self._job or (job == self._job and not self._is_active)

    def _take_request(self, request: StopRequest) -> None:
        """On rank 0: the first one makes all ranks pause, as soon as rank 0 has begun that job, too."""
        with self._changed:
            if self._request is not None or self._is_over(request.job):
                return
            self._request = request
            has_begun = self._is_active and request.job == self._job
        if has_begun:
            self._pause_all(request)

    def _pause_all(self, request: StopRequest) -> None:
        """On rank 0: have all ranks pause and say how far they are."""
        self._on_request(request)
        with self._changed:
            self._positions.clear()
            self._asked_job = request.job
        self._context.send("stop", {"pause": asdict(request)})
        self._pause(request)

    def _pause(self, request: StopRequest) -> None:
        with self._changed:
            is_over = self._is_over(request.job)
            if not is_over:
                self._request, self._is_pausing, self._target = request, True, None
            position = self._position  # after the flag: the main thread sets them the other way round
        if not is_over:
            self._start_timer(request)
        if self._rank == 0:
            self._collect(0, position, request.job)
        else:
            self._context.send("stop", {"position": asdict(position), "job": request.job})

    def _collect(self, rank: int, position: Position, job: int) -> None:
        """On rank 0: when all have answered, say where to stop."""
        with self._changed:
            if job != self._asked_job:
                return
            self._positions[rank] = position
            positions = list(self._positions.values())
        if len(positions) == len(self._context.table):
            target = next_common(positions)
            self._context.send("stop", {"target": asdict(target), "job": job})
            self._set_target(target, job)

    def _set_target(self, target: Position, job: int) -> None:
        with self._changed:
            if not self._is_over(job):
                self._target = target
            self._changed.notify_all()

    # The deadline.

    def _start_timer(self, request: StopRequest) -> None:
        with self._changed:
            if self._timer is not None or self._deadline is None or not self._is_active:
                return
            self._timer = threading.Timer(self._deadline.total_seconds(), self._give_up, [request])
            self._timer.name = "ddpx-stop-deadline"
            self._timer.daemon = True
            self._timer.start()

    def _give_up(self, request: StopRequest) -> None:
        assert self._deadline is not None
        silent = [info for info in self._context.table if info.rank not in self._positions]
        who = f" ({', '.join(map(str, silent))} did not answer)" if self._rank == 0 and silent else ""
        sys.stderr.write(
            f"[rank {self._rank}] {request}: the ranks have not stopped within save_deadline "
            f"{self._deadline.total_seconds():g} s{who}, so this one is ended at {call_site_of(main_frame())}; "
            "what had been saved before is still there. Give them a longer save_deadline if they only need more time\n"
        )
        sys.stderr.flush()
        end_at_once(status_of(request.signum))
