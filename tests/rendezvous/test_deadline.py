"""A deadline is one moment that everything in a start-up shares."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from lightning_ddp_ext.rendezvous.deadline import Deadline


def test_torch_gets_a_whole_second_at_least() -> None:
    """Stores and groups count whole seconds, and take zero for no limit or refuse it."""
    assert timedelta(seconds=7) < Deadline(7.5).as_timedelta() <= timedelta(seconds=7.5)
    assert Deadline(0.0).as_timedelta() == timedelta(seconds=1)


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
