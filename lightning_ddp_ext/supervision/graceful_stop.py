"""All ranks stop at the same place, because one of them was asked to.

A *place* is a point of the program that every rank passes in the same order: the end of a training step, a barrier
before training, the end of training. Each rank counts those that it has passed. A request reaches rank 0 over the
control channel, and rank 0 has all ranks hold: from then on none passes a place, and the channel's thread of each rank
reports how many it has passed by then. So the ranks agree on the first place that none of them has passed, and go on
until there.

Nothing waits for anything but these threads, so ranks that work together in a collective meanwhile always come out
of it; and until a signal comes, a place costs an addition and a look at a bool.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from signal import Signals

from lightning_ddp_ext.at_exit import end_at_once
from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.wire import Message
from lightning_ddp_ext.supervision.call_site import call_site_of_main_thread
from lightning_ddp_ext.supervision.signals import status_of
from lightning_ddp_ext.supervision.survey import Survey

# Seconds until a rank that was about to begin an evaluation is asked again.
_ASK_AGAIN_AFTER = 0.05


@dataclass(frozen=True)
class Request:
    """Which rank was asked to stop, and how."""

    signum: int
    rank: int
    host: str
    job: int
    """The ordinal of the work that the ranks have begun."""

    def __str__(self) -> str:
        return f"{Signals(self.signum).name} to rank {self.rank} (host {self.host})"


@dataclass(frozen=True)
class Place:
    """How far a rank is: places passed, steps passed of an evaluation since then, and how many steps that has."""

    passed: int
    steps: int = 0
    of_steps: int = 0

    def before(self) -> Place:
        """The place before this one."""
        return replace(self, steps=self.steps - 1) if self.steps else Place(self.passed - 1)


@dataclass(frozen=True)
class Agreement:
    """Where all ranks stop, at the latest."""

    target: Place
    is_final: bool = True
    """If not, there may soon be an earlier place."""


def agree(places: list[Place]) -> Agreement:
    """The first place, if possible within an evaluation, that no rank has passed and that every rank comes to.

    >>> agree([Place(4), Place(5)]).target
    Place(passed=6, steps=0, of_steps=0)
    >>> agree([Place(4, 17, 100), Place(4, 18, 99)]).target
    Place(passed=4, steps=19, of_steps=0)
    >>> agree([Place(4, 99, 100), Place(4, 99, 99)]).target
    Place(passed=5, steps=0, of_steps=0)
    >>> agree([Place(4, 17, 100), Place(4)])  # a rank that is about to begin the evaluation
    Agreement(target=Place(passed=5, steps=0, of_steps=0), is_final=False)
    """
    passed = max(place.passed for place in places)
    furthest = [place for place in places if place.passed == passed]
    if not any(place.of_steps for place in furthest):
        return Agreement(Place(passed + 1))
    if len(furthest) < len(places) or not all(place.of_steps for place in furthest):
        return Agreement(Place(passed + 1), is_final=False)
    steps = max(place.steps for place in places) + 1
    is_common = steps <= min(place.of_steps for place in places)
    return Agreement(Place(passed, steps) if is_common else Place(passed + 1))


class GracefulStop:
    """This rank's part in stopping together; one for the process, as the ranks count places over all Trainers.

    Args:
        context: this process among the ranks.
    """

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._rank = context.world.rank
        self._changed = context.peers.arrived
        self._place = Place(0)
        self._job = 0
        self._is_active = False
        self._is_asked_here = False
        self._signum = 0
        self._is_holding = False
        self._is_waiting = False
        self._has_stopped = False
        self._target: Place | None = None
        self._requests: list[Request] = []
        self._asked_job = 0
        self._places: dict[int, Place] = {}
        self._stopped_at: Place | None = None
        self._deadline: timedelta | None = None
        self._on_request: Callable[[Request], object] = lambda _: None
        self._timer: threading.Timer | None = None
        self._survey = context.component(Survey)
        context.listen("stop", self._hear)

    def expect(self, signum: int) -> None:
        """This rank got a signal: it passes no place before all hold. For signal handlers, as it takes no lock."""
        self._signum = signum
        self._is_asked_here = not self._is_holding and self._target is None

    def ask(self, signum: int) -> None:
        """Have all ranks stop; for any thread but that of a signal handler."""
        mine = self._context.table[self._rank]
        request = Request(signum, mine.rank, mine.host, self._job)
        self._bound(request)
        if self._rank == 0:
            self._take_request(request)
        else:
            self._context.send("stop", {"request": asdict(request)})

    def begin(self, deadline: timedelta, on_request: Callable[[Request], object] = lambda _: None) -> None:
        """From now on requests are heeded: the ranks have begun something that has places.

        Args:
            deadline: what the ranks have from the first signal until they are gone; they are ended then.
            on_request: called on rank 0 with the first of them, by a thread.
        """
        with self._changed:
            self._job += 1
            self._is_active = True
            self._has_stopped = False
            self._deadline = deadline
            self._on_request = on_request
            requests = self._requests.copy()  # of ranks that have begun before this one
        if requests:
            self._bound(requests[0])
        if requests and self._rank == 0:
            self._hold_all()

    def end(self) -> None:
        """The ranks have stopped, or there is no place any more."""
        with self._changed:
            self._is_active = self._is_asked_here = False
            self._requests = [request for request in self._requests if not self._is_over(request.job)]
            if not self._requests:
                self._is_holding, self._target = False, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    @property
    def is_active(self) -> bool:
        """Whether a Trainer of this process heeds requests."""
        return self._is_active

    @property
    def is_overruled(self) -> bool:
        """Whether a rank died or failed: then the others end because of that, whatever they are asked."""
        return self._context.peers.cause is not None

    # Places, in the main thread.

    def at_place(self) -> Request | None:
        """Why all ranks stop here, if they do. Every rank must call it at the same places.

        Raises:
            RankFailedError: one of its kinds; that a rank died or failed overrules every request.
        """
        self._place = Place(self._place.passed + 1)
        return self._decide() if self._is_holding or self._is_asked_here else None

    def at_step(self, of_steps: int) -> Request | None:
        """The same within an evaluation, before each of its steps.

        Args:
            of_steps: how many steps this rank makes in this evaluation, if it is known, else 1.
        """
        self._place = Place(self._place.passed, self._place.steps + 1, of_steps)
        return self._decide() if self._is_holding or self._is_asked_here else None

    def at_last_place(self) -> Request | None:
        """The same where no other place follows: whatever signal came before is heeded here. Collective."""
        self._make_sure_that_it_is_known()
        with self._changed:
            self._changed.wait_for(
                lambda: not self._is_asked_here or self._is_holding or self._context.peers.cause_or_departure
            )
        # Callbacks may take long at the end, and their rank answers all the same.
        self._context.barriers.enter("the end of its work", patience=self._survey.check_that_all_answer)
        # Who is asked only now must not wait for that to come round: rank 0 may be gone from here, and never answer.
        self._place = Place(self._place.passed + 1)
        return self._decide() if self._is_holding else None

    def _decide(self) -> Request | None:
        """Wait until the ranks have agreed where to stop, and see whether it is here."""
        self._make_sure_that_it_is_known()
        with self._changed:
            self._is_waiting = True
            self._changed.wait_for(self._is_decided)
            self._is_waiting = False
            event, target, here = self._context.peers.cause, self._target, self._place
            if event is not None:
                raise event.to_error()
            if target is None or (here.passed, here.steps) < (target.passed, target.steps):
                return None
            request = self._requests[0]
            self._is_active = self._is_asked_here = self._is_holding = False
            self._has_stopped = True
            self._target = None
            self._requests.clear()
            return request

    def _make_sure_that_it_is_known(self) -> None:
        """The thread that is to ask hears of a signal by Python's wake-up descriptor, which others may have taken."""
        if self._is_asked_here:
            self.ask(self._signum)

    def _is_decided(self) -> bool:
        is_open = self._is_asked_here or self._is_holding
        return self._target is not None or not is_open or self._context.peers.cause is not None

    # The agreement, in threads.

    def _hear(self, message: Message) -> None:
        """Called on the channel's thread."""
        if "request" in message:
            self._take_request(Request(**message["request"]))
        elif "hold" in message:
            self._hold(Request(**message["hold"]))
        elif "place" in message:
            self._collect(message["rank"], Place(**message["place"]), message["job"], message["has_stopped"])
        elif "target" in message:
            self._release(Place(**message["target"]), message["job"])

    def _is_over(self, job: int) -> bool:
        """Whether this rank is done with that job: what comes too late for it is not meant for the next one."""
        return job < self._job or (job == self._job and not self._is_active)

    def _take_request(self, request: Request) -> None:
        """On rank 0: the first one begins a round, as soon as there are places."""
        with self._changed:
            if self._is_over(request.job):
                return
            is_first = not self._requests
            self._requests.append(request)
            is_active = self._is_active
        if is_first and is_active:
            self._on_request(request)
            self._hold_all()

    def _hold_all(self) -> None:
        """On rank 0: have all ranks hold and say how far they are."""
        with self._changed:
            if not self._requests:  # they have stopped
                return
            self._places.clear()
            self._stopped_at = None
            request = self._requests[0]
            self._asked_job = request.job
        self._context.send("stop", {"hold": asdict(request)})
        self._hold(request)

    def _hold(self, request: Request) -> None:
        with self._changed:
            is_over = self._is_over(request.job)
            has_stopped = self._has_stopped and request.job == self._job
            if not is_over:
                if self._rank != 0:
                    self._requests = [request]
                self._is_holding = True
                self._is_asked_here = False
                self._target = None
            place = self._place  # after the flag: the main thread sets them the other way round
            if self._is_waiting:  # there, and not past it
                place = place.before()
            self._changed.notify_all()
        if not is_over:
            self._bound(request)
        if self._rank == 0:
            self._collect(0, place, request.job, has_stopped)
        else:
            answer = {"place": asdict(place), "rank": self._rank, "job": request.job, "has_stopped": has_stopped}
            self._context.send("stop", answer)

    def _collect(self, rank: int, place: Place, job: int, has_stopped: bool) -> None:
        """On rank 0: when all have answered, say where to stop."""
        with self._changed:
            if job != self._asked_job:
                return
            self._places[rank] = place
            self._stopped_at = place if has_stopped else self._stopped_at
            places = list(self._places.values())
        if len(places) < len(self._context.table.ranks):
            return
        agreement = agree(places) if self._stopped_at is None else Agreement(self._stopped_at)
        self._context.send("stop", {"target": asdict(agreement.target), "job": job})
        self._release(agreement.target, job)
        if not agreement.is_final:
            again = threading.Timer(_ASK_AGAIN_AFTER, self._hold_all)
            again.daemon = True
            again.start()

    def _release(self, target: Place, job: int) -> None:
        with self._changed:
            if not self._is_over(job):
                self._target = target
            self._changed.notify_all()

    # The end of patience.

    def _bound(self, request: Request) -> None:
        with self._changed:
            if self._timer is not None or self._deadline is None or not self._is_active:
                return
            self._timer = threading.Timer(self._deadline.total_seconds(), self._give_up, [request])
            self._timer.name = "ddpx-stop-deadline"
            self._timer.daemon = True
            self._timer.start()

    def _give_up(self, request: Request) -> None:
        assert self._deadline is not None
        silent = [info for info in self._context.table.ranks if info.rank not in self._places]
        who = f" ({', '.join(map(str, silent))} did not answer)" if self._rank == 0 and silent else ""
        sys.stderr.write(
            f"[rank {self._rank}] {request}: the ranks have not stopped within save_deadline "
            f"{self._deadline.total_seconds():g} s{who}, so this one is ended at {call_site_of_main_thread()}; "
            "what had been saved before is still there. Give them a longer save_deadline if they only need more time\n"
        )
        sys.stderr.flush()
        end_at_once(status_of(request.signum))
