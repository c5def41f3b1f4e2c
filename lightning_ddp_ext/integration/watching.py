"""Who reads a loader: a word before and after each iterator is made, and whether it is the Trainer that makes it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_ddp_ext.data.disguise import disguise, own_class, undisguise


class Watch:
    """Has something called whenever an iterator of one of its loaders is made.

    A loader stays the object that it is, and an instance of its class: it gets a class made from its own. Copies of it
    are not watched. What has no Python class of its own, such as a list of batches, is left alone.

    Args:
        before: called with the loader, just before its iterator is made.
        after: called with the loader, just after.
    """

    def __init__(self, before: Callable[[Any], None], after: Callable[[Any], None] = lambda _: None) -> None:
        self._before = before
        self._after = after
        self._loaders: list[Callable[[], Any]] = []

    def add(self, loader: Any) -> None:
        """Watch a loader; whoever has watched it before does so no longer."""
        undisguise(loader)
        try:
            disguise(loader, {"__iter__": _watched(own_class(loader), self._before, self._after)})
        except TypeError:  # built-in types
            return
        self._loaders = [known for known in self._loaders if known() is not None] + [_reference(loader)]

    def end(self) -> list[Any]:
        """Give the loaders their own classes back, and return them."""
        loaders = [loader for known in self._loaders if (loader := known()) is not None]
        self._loaders = []
        for loader in loaders:
            undisguise(loader)
        return loaders


class Reads:
    """Whether the Trainer itself is asking its loaders, and not a callback that looks at a batch in between.

    Attributes:
        are_under_way: that it is.
    """

    def __init__(self) -> None:
        self.are_under_way = False
        self._combined: Any = None

    def follow(self, combined: Any, begin: Callable[[Any, Callable[[], Any]], Any] | None = None) -> None:
        """From now on it is what is read through this combined loader, and none else.

        Args:
            combined: what the Trainer iterates over.
            begin: makes the iterator, given the combined loader and what makes it as ever; ``None``: as ever.
        """
        self.end()
        own: Any = own_class(combined)

        def __iter__(combined: Any) -> Any:
            with self._under_way():
                return own.__iter__(combined) if begin is None else begin(combined, lambda: own.__iter__(combined))

        def __next__(combined: Any) -> Any:  # a loader that is combined with a longer one is begun again here
            with self._under_way():
                return own.__next__(combined)

        disguise(combined, {"__iter__": __iter__, "__next__": __next__})
        self._combined = combined

    def end(self) -> None:
        """Give the combined loader its own class back."""
        if self._combined is not None:
            undisguise(self._combined)
            self._combined = None

    @contextmanager
    def _under_way(self) -> Iterator[None]:
        before, self.are_under_way = self.are_under_way, True
        try:
            yield
        finally:
            self.are_under_way = before


def _watched(own: Any, before: Callable[[Any], None], after: Callable[[Any], None]) -> Callable[[Any], Iterator[Any]]:
    iterate: Callable[[Any], Iterator[Any]] = getattr(own, "__iter__", _by_number)

    def watched(loader: Any) -> Iterator[Any]:
        before(loader)
        iterator = iterate(loader)
        after(loader)
        return iterator

    return watched


def _by_number(loader: Any) -> Iterator[Any]:
    """What ``iter`` makes of an object that has ``__getitem__`` and no ``__iter__``."""
    number = 0
    while True:
        try:
            item = loader[number]
        except IndexError:
            return
        yield item
        number += 1


def _reference(loader: Any) -> Callable[[], Any]:
    """A weak one, since loaders that are replaced each epoch are not to be kept; unless its class has slots alone."""
    try:
        return weakref.ref(loader)
    except TypeError:
        return lambda: loader
