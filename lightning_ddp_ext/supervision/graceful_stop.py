"""Stop all ranks at the same point of the program after one of them received a signal.

Every rank passes the same stop points in the same order: the end of each training step,
each step of an evaluation, and the end of training. Each rank counts those that it has
passed. A rank that receives a signal sends a request to rank 0 over the control
channel, and rank 0 pauses all ranks: each main thread waits at its next stop point, and
each channel thread replies with the rank's count. The ranks thus agree on the first
stop point that none of them has passed.

Only the channel threads reply, so ranks that are in a collective at that time always
complete it. Until a signal arrives, a stop point costs one addition and one comparison.

The request and the target of a rank show its state:

=========  =======  ==============  ====================================================
State      Request  Target          Meaning
=========  =======  ==============  ====================================================
running    none     none            no rank has received a signal
requested  set      none            rank 0 has not begun the job of the request yet
pausing    set      ``_UNDECIDED``  the main thread waits at its next stop point
agreed     set      a stop point    all ranks stop there
=========  =======  ==============  ====================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from signal import Signals
from typing import Any

from lightning_ddp_ext.forced_exit import ForcedExit
from lightning_ddp_ext.rank_lists import listed
from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.remote_calls import RemoteCalls, Replies
from lightning_ddp_ext.supervision.signals import status_of
from lightning_ddp_ext.supervision.stacks import call_site_of, main_frame
from lightning_ddp_ext.threads import start_thread

_AFTER_SAVES = 3.0  # seconds from a finished save to the exit, after the deadline


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


Acknowledge = Callable[[StopRequest], object]
Target = tuple[int, int]  # a stop point, and a step of the evaluation after it
_UNDECIDED: Target = (-1, -1)
# The numbers of stop points that a rank has passed, of evaluation steps started since,
# and of steps in that evaluation.
Position = tuple[int, int, int]


def next_common(positions: Sequence[Position]) -> Target:
    """Return the first stop point that no rank has passed and that all will reach.

    If the evaluation is shorter on some rank, this is the next point outside of
    evaluation steps.

    >>> next_common([(4, 17, 100), (4, 18, 99)])
    (4, 19)
    >>> next_common([(4, 99, 100), (4, 99, 99)])
    (5, 0)
    >>> next_common([(4, 0, 0), (5, 0, 0)])  # in an evaluation, if one starts next
    (5, 1)
    """
    points, steps, _ = max(positions)
    shortest = min(
        (of_steps for passed, _, of_steps in positions if passed == points and of_steps),
        default=steps + 1,
    )
    return (points, steps + 1) if steps < shortest else (points + 1, 0)


def _ignore(request: StopRequest) -> None:
    pass


class GracefulStop:
    """This rank's part in stopping together, for all Trainers that use the connections.

    Args:
        context: the connections to the other ranks.
        raise_if_a_rank_is_silent: raises if a rank does not reply.

    Attributes:
        is_active: whether a Trainer of this process handles requests.
    """

    def __init__(
        self, context: ProcessContext, raise_if_a_rank_is_silent: Callable[[], None]
    ) -> None:
        self._raise_if_a_rank_is_silent = raise_if_a_rank_is_silent
        self._context = context
        self._peers = context.peers
        self._position: Position = (0, 0, 0)
        self._job = 0
        self.is_active = False
        self._request: StopRequest | None = None
        self._target: Target | None = None
        self._replies = Replies()
        self._seconds = 0.0  # from the first signal to the deadline
        self._acknowledge: Acknowledge = _ignore
        self._forced_exit = ForcedExit("ddpx-stop-deadline")
        self._remote = RemoteCalls(
            context.peers,
            "stop",
            handle_request=self._handle_request,
            pause=self._pause,
            set_target=self._set_target,
        )

    def request_stop(self, signum: int) -> None:
        """Have all ranks stop; for any thread, but not for a signal handler.

        Further requests have no effect.
        """
        request = StopRequest(signum, self._peers.rank, self._peers.mine.host, self._job)
        self._limit_stop(request)
        self._remote.call([0], "handle_request", asdict(request))

    def start(self, deadline: timedelta, acknowledge: Acknowledge | None = None) -> None:
        """Handle requests from now on: the ranks have begun a job with stop points.

        Args:
            deadline: the time from the first signal or an exception until ranks that
                are still running must exit.
            acknowledge: called on rank 0 with the first request, in a thread.
        """
        self._forced_exit.lift()  # a run whose ``on_exception`` raised has skipped teardown
        with self._peers.arrived:
            self._job += 1
            # After an exception, the ranks' counts may differ.
            self._position = (self._job << 32, 0, 0)
            self.is_active = True
            self._seconds = deadline.total_seconds()
            self._acknowledge = acknowledge or _ignore
            if self._request is not None:  # a rank that started before this one sent it
                self._limit_stop(self._request)
                self._start_agreement(self._request)

    def end(self) -> None:
        """Ignore requests from now on, after a stop or the last stop point."""
        with self._peers.arrived:
            self.is_active = False
            self._acknowledge = _ignore  # this object outlives the Trainer
            if self._request is None or self._has_finished(self._request.job):
                self._request = None
                self._target = None
        self._forced_exit.lift()

    # Stop points, in the main thread.

    def at_point(self) -> StopRequest | None:
        """Return the request if all ranks stop here.

        Every rank must call it at the same points.

        Raises:
            RankFailedError: a rank died or failed, which takes precedence over a
                request; it may be a subclass.
        """
        self._position = (self._position[0] + 1, 0, 0)
        return None if self._target is None else self._decide()

    def at_step(
        self, count_steps: Callable[[], int], may_stop: Callable[[], bool] = lambda: True
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
        points, steps, of_steps = self._position
        self._position = (points, steps + 1, of_steps if steps else count_steps())
        return None if self._target is None else self._decide(may_stop)

    def at_last_point(self) -> StopRequest | None:
        """Return the request if all ranks stop at their last stop point. Collective.

        A rank sends its request before it enters the barrier, so all ranks pause before
        the barrier opens. A rank that is still in slow callbacks may be late, as long
        as it replies.
        """
        self._context.barriers.enter(
            "the final stop check", if_late=self._raise_if_a_rank_is_silent
        )
        return self.at_point()

    def _decide(self, may_stop: Callable[[], bool] = lambda: True) -> StopRequest | None:
        """Return the request if the ranks stop here, after they have agreed where."""
        if self._is_agreed_on() and not may_stop():
            self._target = (self._position[0] + 1, 0)
        with self._peers.arrived:
            if not self._is_agreed_on():
                return None
            request = self._request
            self.is_active = False
            self._request = self._target = None
            return request

    def _is_agreed_on(self) -> bool:
        """Whether the ranks stop here; waits until they have agreed where."""
        with self._peers.arrived:
            self._peers.wait_for(lambda: self._target != _UNDECIDED)
            self._peers.check()
            target = self._target
            if target is None or target == _UNDECIDED:
                return False
            return self._position[:2] >= target

    # The agreement, in other threads.

    def _has_finished(self, job: int) -> bool:
        """Whether this rank has finished that job.

        A late message must not stop the next one.
        """
        return job < self._job or (job == self._job and not self.is_active)

    def _handle_request(self, values: dict[str, Any]) -> None:
        """Handle a request on rank 0.

        After the first one, all ranks pause as soon as rank 0 has started that job.
        """
        request = StopRequest(**values)
        if self._request is None and not self._has_finished(request.job):
            self._request = request
            if self.is_active and request.job == self._job:
                self._start_agreement(request)

    def _start_agreement(self, request: StopRequest) -> None:
        """On rank 0, pause all ranks and find their stop point in a thread.

        The ranks pause before another barrier opens.
        """
        if self._peers.rank == 0:
            self._replies = self._remote.call(self._peers.everyone, "pause", asdict(request))
            start_thread("ddpx-stop", self._agree, request)

    def _agree(self, request: StopRequest) -> None:
        self._acknowledge(request)
        replies = self._replies
        if self._peers.wait_for(lambda: len(replies) == len(self._peers.everyone), self._seconds):
            target = next_common([tuple(reply) for reply in replies.values()])
            self._remote.call(self._peers.everyone, "set_target", target, request.job)

    def _pause(self, values: dict[str, Any]) -> Position:
        request = StopRequest(**values)
        if not self._has_finished(request.job):
            self._request = request
            self._target = _UNDECIDED
            self._limit_stop(request)
        return self._position  # read after the flag is set; the main thread uses the opposite order

    def _set_target(self, target: Sequence[int], job: int) -> None:
        if not self._has_finished(job):
            self._target = (target[0], target[1])

    # The deadline.

    def limit_exit(self, *, is_void: Callable[[], bool] = lambda: False) -> None:
        """Limit the time until this rank exits after an exception.

        It exits even if hooks or teardown block. :meth:`end` lifts the limit.
        """
        if self._seconds:  # otherwise no Trainer has run
            finding = "the process raised an exception and has not exited"
            self._start_limit(1, finding, is_void=is_void, after_saves=_AFTER_SAVES)

    def _limit_stop(self, request: StopRequest) -> None:
        if self.is_active:
            self._start_limit(status_of(request.signum), f"{request}: the ranks have not stopped")

    def _start_limit(self, status: int, finding: str, **options: Any) -> None:
        def sentence() -> str:
            rank = self._peers.rank
            is_agreeing = rank == 0 and self._target is not None
            silent = [
                info
                for info in self._context.table
                if is_agreeing and info.rank not in self._replies
            ]
            who = f", and {listed(silent)} did not answer" if silent else ""
            return (
                f"[rank {rank}] {finding} within {self._seconds:g} s (save_deadline){who}, so"
                f" rank {rank} exits at {call_site_of(main_frame())}; earlier checkpoints are"
                " intact. Pass a longer save_deadline if the ranks only need more time"
            )

        self._forced_exit.start(self._seconds, status, sentence, **options)
