"""A deadline is one moment that everything in a start-up shares."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from lightning_ddp_ext.rendezvous import deadline as module
from lightning_ddp_ext.rendezvous.deadline import Deadline


class Clock:
    """Time that passes only where the code sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pauses: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_what_remains_shrinks_to_nothing(clock: Clock) -> None:
    """The remaining seconds fall with the clock and are never negative."""
    deadline = Deadline(3.0)
    assert (deadline.remaining, deadline.expired) == (3.0, False)
    clock.now += 2.0
    assert (deadline.remaining, deadline.expired) == (1.0, False)
    clock.now += 2.0
    assert (deadline.remaining, deadline.expired) == (0.0, True)


def test_torch_gets_a_whole_second_at_least(clock: Clock) -> None:
    """Stores and groups count whole seconds, and take zero for no limit or refuse it."""
    assert Deadline(7.5).as_timedelta() == timedelta(seconds=7.5)
    assert Deadline(0.0).as_timedelta() == timedelta(seconds=1)


def test_ticks_end_at_the_deadline(clock: Clock) -> None:
    """Pauses grow to the longest one, and the last one ends at the deadline itself."""
    count = sum(1 for _ in Deadline(2.0).ticks(longest=0.1))
    assert clock.now == pytest.approx(102.0)
    assert max(clock.pauses) == pytest.approx(0.1, rel=0.25)
    assert clock.pauses[0] < 0.002
    assert 20 < count < 60


def test_many_ranks_do_not_tick_in_step(clock: Clock) -> None:
    """Two deadlines of the same length pause for different times."""
    first = [clock.now for _ in Deadline(1.0).ticks()]
    start = clock.now
    second = [clock.now - start + 100.0 for _ in Deadline(1.0).ticks()]
    assert first[1:4] != second[1:4]


def test_bounded_work_gives_its_result_or_its_error() -> None:
    """Work that ends in time, extra seconds included, is as if it had been called directly."""
    assert Deadline(10.0).bound(lambda: 6 * 7) == 42
    assert Deadline(0.0).bound(lambda: 6 * 7, extra=10.0) == 42
    with pytest.raises(ZeroDivisionError):
        Deadline(10.0).bound(lambda: 1 // 0)


def test_work_that_does_not_end_is_left_to_itself() -> None:
    """After the deadline and the extra seconds the caller goes on with a TimeoutError."""
    release = threading.Event()
    with pytest.raises(TimeoutError, match=r"0\.1 s after a deadline of 0\.05 s"):
        Deadline(0.05).bound(release.wait, extra=0.1)
    release.set()
