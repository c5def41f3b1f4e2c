"""A duration is seconds or a timedelta, and everything else is refused by name."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ddp_ext.durations import LONGEST, SHORTEST, to_timedelta
from lightning_ddp_ext.errors import ConfigurationError

BOUNDED = (
    "must be a positive number of seconds, at least 0.001 (got {!r}); write timeout=60 for a minute"
)
TYPED = (
    "must be a number of seconds or a timedelta (got {0!r}, of type {0.__class__.__name__}); write"
    " timeout=60 or "
)


@given(st.integers(min_value=1, max_value=10**9))
def test_seconds_and_timedelta_of_the_same_length_are_equal(milliseconds: int) -> None:
    """Both ways to write a duration give the same timedelta."""
    delta = timedelta(milliseconds=milliseconds)
    assert (
        to_timedelta(delta.total_seconds(), field="timeout")
        == to_timedelta(delta, field="timeout")
        == delta
    )


def test_bounds_and_none_are_taken() -> None:
    """None means that the argument was not given; durations beyond the longest one are
    shortened to it.
    """
    for value in (SHORTEST, LONGEST, None):
        assert to_timedelta(value, field="timeout") == value
    for beyond in (math.inf, 1e30, timedelta.max):
        assert to_timedelta(beyond, field="timeout") == LONGEST


@pytest.mark.parametrize(
    ("rule", "values"),
    [
        (BOUNDED, (0, -0.5, 1e-9, math.nan, -math.inf, timedelta(0), timedelta(microseconds=1))),
        (TYPED + "timeout=timedelta(minutes=1)", (True, "60", [60], 1j)),
    ],
)
def test_values_that_are_not_durations_are_refused(rule: str, values: tuple[object, ...]) -> None:
    """The message has field, rule, value and remedy, also for durations that torch
    cannot count.
    """
    for value in values:
        with pytest.raises(ConfigurationError) as refused:
            to_timedelta(value, field="timeout")  # type: ignore[call-overload]
        assert str(refused.value) == f"timeout {rule.format(value)}"
