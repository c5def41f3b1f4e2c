"""Validate the arguments of samplers."""

from __future__ import annotations

import operator
from typing import Any, get_args

from lightning_ddp_ext.data.partition import Uneven
from lightning_ddp_ext.errors import ConfigurationError


def whole_number(value: Any, field: str, *, at_most: int | None = None, remedy: str) -> int:
    """Return ``value`` as an ``int``. Integers of NumPy and torch are accepted, booleans are not.

    Raises:
        ConfigurationError: the value is not an integer, is negative, or is above ``at_most``.

    >>> try:
    ...     whole_number(-1, "seed", remedy="pass seed=0")
    ... except ConfigurationError as error:
    ...     print(error)
    seed must be an integer, at least 0 (got -1); pass seed=0
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < 0 or (at_most is not None and number > at_most):
        bounds = "at least 0" if at_most is None else f"from 0 to {at_most}"
        raise ConfigurationError(f"{field} must be an integer, {bounds} (got {value!r}); {remedy}")
    return number


def seed_of(value: Any) -> int:
    """Return a seed that can be mixed with an epoch."""
    return whole_number(value, "seed", remedy="pass the same seed on every rank, such as seed=0")


def uneven_of(value: Any) -> Uneven:
    """Return ``value`` if it is a policy for lengths that are not a multiple of the number of ranks."""
    if not isinstance(value, str) or value not in get_args(Uneven):
        raise ConfigurationError(f"uneven must be 'pad', 'drop' or 'exact' (got {value!r}); torch's samplers pad")
    return value  # type: ignore[return-value]


def length_of(thing: Any, field: str, remedy: str) -> int:
    """Return ``len(thing)``.

    Raises:
        ConfigurationError: the object has no length.
    """
    try:
        return len(thing)
    except (TypeError, NotImplementedError):
        raise ConfigurationError(
            f"{field} must have a length (got {type(thing).__name__}, which has none); {remedy}"
        ) from None
