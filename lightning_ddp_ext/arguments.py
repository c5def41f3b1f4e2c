"""Validate arguments, and raise errors that name the field, the rule and the value."""

from __future__ import annotations

import operator
from datetime import timedelta
from numbers import Real
from typing import Any

from lightning_ddp_ext.errors import ConfigurationError

SHORTEST = timedelta(milliseconds=1)
# Sockets and polls count milliseconds as signed 32-bit integers, at most 24.8 days.
LONGEST = timedelta(days=24)


def integer(
    value: Any, field: str, *, at_least: int = 0, at_most: int | None = None, remedy: str
) -> int:
    """Return ``value`` as an ``int``.

    NumPy and torch integers are accepted; booleans are not.

    Raises:
        ConfigurationError: the value is not an integer, or is out of bounds.

    >>> try:
    ...     integer(-1, "seed", remedy="pass seed=0")
    ... except ConfigurationError as error:
    ...     print(error)
    seed must be an integer of at least 0 (got -1); pass seed=0
    """
    is_boolean = isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool"
    try:
        number = None if is_boolean else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < at_least or (at_most is not None and number > at_most):
        bounds = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise ConfigurationError(f"{field} must be an integer {bounds} (got {value!r}); {remedy}")
    return number


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


def check_choice(field: str, value: object, *allowed: object) -> None:
    """Raise if the value is not one of those allowed.

    Args:
        field: the argument's name, for messages.
        value: its value.
        allowed: the allowed values; messages show the first as the default.

    Raises:
        ConfigurationError: it is another value.

    >>> try:
    ...     check_choice("uneven", "stop", "pad", "drop")
    ... except ConfigurationError as error:
    ...     print(error)
    uneven must be 'pad' or 'drop' (got 'stop'); the default is 'pad'
    """
    # 1 equals True, but is not a bool.
    is_allowed = any(type(value) is type(choice) and value == choice for choice in allowed)
    if not is_allowed:
        *others, last = map(repr, allowed)
        raise ConfigurationError(
            f"{field} must be {', '.join(others)} or {last} (got {value!r}); the default is"
            f" {allowed[0]!r}"
        )


def length_of(value: Any, field: str, remedy: str) -> int:
    """Return ``len(value)``.

    Args:
        value: an object of the user's, such as a dataset.
        field: the argument's name, for messages.
        remedy: advice for the user, for messages.

    Raises:
        ConfigurationError: the object has no length.
    """
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        raise ConfigurationError(
            f"{field} must have a length (got {type(value).__name__}, which has none); {remedy}"
        ) from None
