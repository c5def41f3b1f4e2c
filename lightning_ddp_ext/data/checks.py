"""Validate the arguments of samplers."""

from __future__ import annotations

from typing import Any, get_args

from lightning_ddp_ext.data.partition import Uneven
from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.integers import integer


def seed_of(value: Any) -> int:
    """Return ``value`` as a seed, or raise if it is not a non-negative integer."""
    return integer(value, "seed", remedy="pass a seed such as seed=0, the same on every rank")


def epoch_of(value: Any) -> int:
    """Return ``value`` as an epoch, or raise if it is not a non-negative integer."""
    return integer(value, "epoch", remedy="count epochs from 0")


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
