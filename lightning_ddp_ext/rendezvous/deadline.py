"""How much time is left: one moment that a whole start-up shares."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

T = TypeVar("T")

_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.02


class Deadline:
    """A moment in the future, counted on the monotonic clock.

    Args:
        seconds: how far away it is.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._moment = time.monotonic() + seconds

    @property
    def remaining(self) -> float:
        """Seconds that are left, never negative."""
        return max(0.0, self._moment - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether no time is left."""
        return self.remaining == 0.0

    def as_timedelta(self) -> timedelta:
        """What is left, at least a second, as stores and groups count in whole seconds."""
        return timedelta(seconds=max(1.0, self.remaining))

    def ticks(self, longest: float = _LONGEST_PAUSE) -> Iterator[None]:
        """Yield again and again until the deadline, after pauses that grow to ``longest`` seconds.

        The pauses are jittered, so that many ranks that poll one store do not do it in step.
        """
        pause = _FIRST_PAUSE
        while not self.expired:
            yield
            time.sleep(min(pause * random.uniform(0.75, 1.25), self.remaining))
            pause = min(pause * 1.5, longest)

    def bound(self, work: Callable[[], T], *, extra: float = 0.0) -> T:
        """What ``work`` returns or raises, called in a thread: calls into C++ may know no timeout of their own.

        Raises:
            TimeoutError: it is still running ``extra`` seconds after the deadline; its thread is left to itself.
        """
        outcome: Future[T] = Future()

        def call() -> None:
            try:
                outcome.set_result(work())
            except BaseException as error:
                outcome.set_exception(error)

        thread = threading.Thread(target=call, name="ddpx-bounded", daemon=True)
        thread.start()
        thread.join(self.remaining + extra)
        if not outcome.done():
            raise TimeoutError(f"still running {extra:g} s after a deadline of {self.seconds:g} s")
        error = outcome.exception()
        if error is not None:
            raise error
        return outcome.result()
