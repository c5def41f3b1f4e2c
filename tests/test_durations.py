"""A duration is seconds or a timedelta, and everything else is refused by name."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ddp_ext.durations import LONGEST, SHORTEST, to_timedelta
from lightning_ddp_ext.errors import DurationError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (90, timedelta(seconds=90)),
        (0.5, timedelta(milliseconds=500)),
        (timedelta(minutes=30), timedelta(minutes=30)),
        (SHORTEST, SHORTEST),
        (LONGEST, LONGEST),
    ],
)
def test_numbers_are_seconds_and_timedeltas_stay(value: float | timedelta, expected: timedelta) -> None:
    """A number counts seconds; a timedelta is what it is."""
    assert to_timedelta(value, field="timeout") == expected


def test_none_stays_none() -> None:
    """An argument that was not given stays not given."""
    assert to_timedelta(None, field="timeout") is None


@given(st.integers(min_value=1, max_value=10**9))
def test_seconds_and_timedelta_of_the_same_length_are_equal(milliseconds: int) -> None:
    """Both ways to write a duration give the same one."""
    delta = timedelta(milliseconds=milliseconds)
    assert to_timedelta(delta.total_seconds(), field="timeout") == to_timedelta(delta, field="timeout") == delta


@pytest.mark.parametrize(
    "value",
    [
        0,
        0.0,
        -1,
        -0.5,
        1e-9,
        math.nan,
        -math.inf,
        -(10**400),
        timedelta(0),
        timedelta(seconds=-1),
        timedelta(microseconds=1),
    ],
)
def test_what_is_not_positive_is_refused(value: float | timedelta) -> None:
    """Zero, negative, not-a-number and less than torch can count name the field, the value and a remedy."""
    with pytest.raises(DurationError) as refused:
        to_timedelta(value, field="init_timeout")
    assert str(refused.value) == (
        f"init_timeout must be a positive number of seconds, at least 0.001 (got {value!r});"
        " write init_timeout=60 for a minute"
    )


@pytest.mark.parametrize("value", [math.inf, 1e30, timedelta.max, 10**400])
def test_what_overflows_is_refused(value: float | timedelta) -> None:
    """For ever, and anything that would overflow a clock, names the limit and a remedy."""
    with pytest.raises(DurationError) as refused:
        to_timedelta(value, field="timeout")
    assert str(refused.value) == (
        f"timeout must be at most 36500 days (got {value!r}); write timeout=timedelta(days=365) for a year"
    )


@pytest.mark.parametrize(("value", "kind"), [(True, "bool"), ("60", "str"), ([60], "list"), (1j, "complex")])
def test_what_is_no_duration_is_refused(value: object, kind: str) -> None:
    """A wrong type names itself, the field and both ways to write a duration."""
    with pytest.raises(DurationError) as refused:
        to_timedelta(value, field="init_timeout")  # type: ignore[call-overload]
    assert str(refused.value) == (
        f"init_timeout must be seconds or a timedelta (got {value!r}, of type {kind});"
        " write init_timeout=60 or init_timeout=timedelta(minutes=1)"
    )
