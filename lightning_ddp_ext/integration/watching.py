"""A word before and after each iterator is made: loaders say so, whoever iterates over them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any


class Watch:
    """Has something called whenever an iterator of one of its loaders is made.

    A loader stays the object that it is, and an instance of its class: it gets a class made from its own. What has no
    Python class of its own, such as a list of batches, is left alone.

    Args:
        before: called with the loader, just before its iterator is made.
        after: called with the loader, just after.
    """

    def __init__(self, before: Callable[[Any], None], after: Callable[[Any], None] = lambda _: None) -> None:
        self._before = before
        self._after = after
        self._loaders: list[weakref.ref[Any]] = []  # those that are reloaded each epoch are not to be kept

    def add(self, loader: Any) -> None:
        """Watch a loader; whoever has watched it before does so no longer."""
        _give_back(loader)
        try:
            loader.__class__ = _watched(type(loader), self._before, self._after)
        except TypeError:  # built-in types, and those with slots
            return
        self._loaders = [known for known in self._loaders if known() is not None] + [weakref.ref(loader)]

    def end(self) -> list[Any]:
        """Give the loaders their own classes back, and return them."""
        loaders = [loader for known in self._loaders if (loader := known()) is not None]
        self._loaders = []
        for loader in loaders:
            _give_back(loader)
        return loaders


def _watched(own: Any, before: Callable[[Any], None], after: Callable[[Any], None]) -> Any:
    def __iter__(self: Any) -> Iterator[Any]:
        before(self)
        iterator: Iterator[Any] = own.__iter__(self)
        after(self)
        return iterator

    body = {"__iter__": __iter__, "__module__": own.__module__, "__qualname__": own.__qualname__, "_ddpx_own": own}
    return type(own)(own.__name__, (own,), body)


def _give_back(loader: Any) -> None:
    own = getattr(type(loader), "_ddpx_own", None)
    if own is not None:
        loader.__class__ = own
