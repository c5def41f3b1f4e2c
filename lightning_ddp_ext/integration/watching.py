"""A word before each iterator: loaders say when they are about to be iterated over, whoever does it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def watch(loader: Any, before: Callable[[Any], None]) -> bool:
    """Have ``before(loader)`` called whenever an iterator of ``loader`` is made.

    The loader stays the object that it is, and an instance of its class: it gets a class made from its own. What has
    no Python class of its own, such as a list of batches, is left alone.

    Returns:
        Whether that is so.
    """
    unwatch(loader)
    own = type(loader)

    def __iter__(self: Any) -> Iterator[Any]:
        before(self)
        return own.__iter__(self)  # type: ignore[no-any-return]

    body = {"__iter__": __iter__, "__module__": own.__module__, "__qualname__": own.__qualname__, "_ddpx_own": own}
    try:
        loader.__class__ = type(own)(own.__name__, (own,), body)  # type: ignore[misc]
    except TypeError:  # built-in types, and those with slots
        return False
    return True


def unwatch(loader: Any) -> None:
    """Give a loader its own class back."""
    own = getattr(type(loader), "_ddpx_own", None)
    if own is not None:
        loader.__class__ = own
