"""Validate arguments that are integers."""

from __future__ import annotations

import operator
from typing import Any

from lightning_ddp_ext.errors import ConfigurationError


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
