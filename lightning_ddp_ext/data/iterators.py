"""Read an iterator without starting it again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_END = object()


def each_of(iterator: Iterator[T]) -> Iterator[T]:
    """Yield the items that are left in an iterator.

    A ``for`` loop over the iterator would call its ``__iter__``, which starts a loader
    anew if that is its own iterator.

    >>> list(each_of(iter("abc")))
    ['a', 'b', 'c']
    """
    item: Any
    while (item := next(iterator, _END)) is not _END:
        yield item
