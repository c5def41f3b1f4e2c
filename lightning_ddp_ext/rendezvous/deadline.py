"""Share one deadline among all parts of a start-up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import TypeVar

from lightning_ddp_ext.threads import start_thread

T = TypeVar("T")

# In seconds: the pauses between two attempts, and how often ``bound`` checks.
_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.25
_CHECK_EVERY = 0.1
# The seconds that ``bound`` leaves to C++ code to report its own timeout.
_EXCEEDS_BY = 1.5


class Deadline:
    """A moment in the future, counted on the monotonic clock.

    Attributes:
        seconds: the time from its creation to this moment.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._moment = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """The remaining seconds, never negative."""
        return max(0.0, self._moment - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return self.remaining == 0.0

    def ticks(self) -> Iterator[None]:
        """Yield until the deadline, with growing and random pauses in between.

        Ranks thus do not retry in lockstep.
        """
        while not self.expired:
            yield
            pause = min(max(0.3 * (self.seconds - self.remaining), _FIRST_PAUSE), _LONGEST_PAUSE)
            time.sleep(min(pause * random.uniform(0.75, 1.25), self.remaining))

    def bound(self, work: Callable[[], T], *, check: Callable[[], None] = lambda: None) -> T:
        """Call ``work`` in a thread, and return its result or raise its exception.

        Calls into C++ need this, since their own timeouts are imprecise or missing.

        Args:
            work: the function to call.
            check: called repeatedly while waiting; it may raise if waiting is
                pointless.

        Raises:
            TimeoutError: ``work`` is still running some time after the deadline; its
                thread is abandoned.
        """
        outcome: Future[T] = Future()

        def call() -> None:
            try:
                outcome.set_result(work())
            except BaseException as error:
                outcome.set_exception(error)

        start_thread("ddpx-bounded", call)
        limit = Deadline(self.remaining + _EXCEEDS_BY)
        while not limit.expired:
            wait([outcome], min(_CHECK_EVERY, limit.remaining))
            if outcome.done():
                return outcome.result()
            check()
        raise TimeoutError(
            f"still running {_EXCEEDS_BY:g} s after a deadline of {self.seconds:g} s"
        )
