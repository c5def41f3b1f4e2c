"""Parse a duration into a timedelta."""

from __future__ import annotations

from datetime import timedelta
from numbers import Real
from typing import overload

from lightning_ddp_ext.errors import ConfigurationError

# torch counts timeouts in milliseconds and adds them to a clock of 64-bit nanoseconds, which ends after 292 years.
SHORTEST = timedelta(milliseconds=1)
LONGEST = timedelta(days=36500)


@overload
def to_timedelta(value: float | timedelta, *, field: str) -> timedelta: ...
@overload
def to_timedelta(value: None, *, field: str) -> None: ...
def to_timedelta(value: float | timedelta | None, *, field: str) -> timedelta | None:
    """Return the duration that ``value`` means; ``None`` stays ``None``.

    Args:
        value: seconds (a number), a ``timedelta``, or ``None``.
        field: the argument's name, for messages.

    Raises:
        ConfigurationError: ``value`` is not a number or ``timedelta``, or not between a millisecond and a hundred
            years.

    >>> to_timedelta(90, field="init_timeout")
    datetime.timedelta(seconds=90)
    """
    if value is None:
        return None
    seconds = _seconds(value, field)
    if not SHORTEST.total_seconds() <= seconds <= LONGEST.total_seconds():  # nor NaN
        raise ConfigurationError(
            f"{field} must be a positive number of seconds, from 0.001 to a hundred years (got {value!r}); write "
            f"{field}=60 for a minute"
        )
    return value if isinstance(value, timedelta) else timedelta(seconds=seconds)


def _seconds(value: object, field: str) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    if not isinstance(value, bool) and isinstance(value, Real):
        return float(value)
    raise ConfigurationError(
        f"{field} must be seconds or a timedelta (got {value!r}, of type {type(value).__name__});"
        f" write {field}=60 or {field}=timedelta(minutes=1)"
    )
