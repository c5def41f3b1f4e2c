"""Share one deadline among all parts of a start-up."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from datetime import timedelta

_FIRST_PAUSE = 0.001
_LONGEST_PAUSE = 0.25


class Deadline:
    """A moment in the future, counted on the monotonic clock."""

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

    def as_timedelta(self) -> timedelta:
        """Return the remaining time, at least one second, since stores and groups count
        in whole seconds.
        """
        return timedelta(seconds=max(1.0, self.remaining))

    def ticks(self) -> Iterator[None]:
        """Yield until the deadline, with growing pauses and jitter, so that ranks do
        not retry in lockstep.
        """
        pause = _FIRST_PAUSE
        while not self.expired:
            yield
            time.sleep(min(pause * random.uniform(0.75, 1.25), self.remaining))
            pause = min(pause * 1.5, _LONGEST_PAUSE)
