"""Validate the arguments of samplers."""

from __future__ import annotations

import operator
from typing import Any, get_args

import torch

from lightning_ddp_ext.data.partition import Uneven
from lightning_ddp_ext.errors import ConfigurationError


def whole_number(value: Any, field: str, *, at_most: int | None = None, remedy: str) -> int:
    """Return ``value`` as an ``int``.

    NumPy and torch integers are accepted; booleans are not.

    Raises:
        ConfigurationError: the value is not an integer, is negative, or is above
            ``at_most``.

    >>> try:
    ...     whole_number(-1, "seed", remedy="pass seed=0")
    ... except ConfigurationError as error:
    ...     print(error)
    seed must be an integer of at least 0 (got -1); pass seed=0
    """
    is_boolean = isinstance(value, bool) or getattr(value, "dtype", None) is torch.bool
    try:
        number = None if is_boolean else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < 0 or (at_most is not None and number > at_most):
        bounds = "of at least 0" if at_most is None else f"from 0 to {at_most}"
        raise ConfigurationError(f"{field} must be an integer {bounds} (got {value!r}); {remedy}")
    return number


def seed_of(value: Any) -> int:
    """Return ``value`` as a seed, or raise if it is not a non-negative integer."""
    return whole_number(value, "seed", remedy="pass a seed such as seed=0, the same on every rank")


def epoch_of(value: Any) -> int:
    """Return ``value`` as an epoch, or raise if it is not a non-negative integer."""
    return whole_number(value, "epoch", remedy="count epochs from 0")


def uneven_of(value: Any) -> Uneven:
    """Return ``value``, or raise if it is not an ``Uneven`` policy."""
    if not isinstance(value, str) or value not in get_args(Uneven):
        remedy = "use 'pad' to match torch's DistributedSampler"
        raise ConfigurationError(
            f"uneven must be 'pad', 'drop' or 'exact' (got {value!r}); {remedy}"
        )
    return value  # type: ignore[return-value]


def length_of(value: Any, field: str, remedy: str) -> int:
    """Return ``len(value)``.

    Raises:
        ConfigurationError: the object has no length.
    """
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        raise ConfigurationError(
            f"{field} must have a length (got {type(value).__name__}, which has none); {remedy}"
        ) from None
