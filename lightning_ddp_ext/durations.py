"""Convert a duration to a timedelta."""

from __future__ import annotations

from datetime import timedelta
from numbers import Real
from typing import overload

from lightning_ddp_ext.errors import ConfigurationError

SHORTEST = timedelta(milliseconds=1)
# Sockets and polls count milliseconds as signed 32-bit integers, at most 24.8 days.
LONGEST = timedelta(days=24)


@overload
def to_timedelta(value: float | timedelta, *, field: str) -> timedelta: ...
@overload
def to_timedelta(value: None, *, field: str) -> None: ...
def to_timedelta(value: float | timedelta | None, *, field: str) -> timedelta | None:
    """Convert a duration to a ``timedelta`` of at most 24 days.

    A longer duration is shortened; ``None`` stays ``None``.

    Args:
        value: seconds (a number), a ``timedelta``, or ``None``.
        field: the argument's name, for messages.

    Raises:
        ConfigurationError: ``value`` is neither a number nor a ``timedelta``, or is
            shorter than a millisecond.

    >>> to_timedelta(90, field="init_timeout")
    datetime.timedelta(seconds=90)
    """
    if value is None:
        return None
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, Real):
        raise ConfigurationError(
            f"{field} must be a number of seconds or a timedelta (got {value!r}, of type"
            f" {type(value).__name__}); write {field}=60 or {field}=timedelta(minutes=1)"
        )
    if not seconds >= SHORTEST.total_seconds():  # also refuses NaN
        raise ConfigurationError(
            f"{field} must be a positive number of seconds, at least 0.001 (got {value!r}); "
            f"write {field}=60 for a minute"
        )
    return timedelta(seconds=min(float(seconds), LONGEST.total_seconds()))
