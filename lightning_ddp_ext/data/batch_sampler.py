"""The permanent batch sampler of a loader: its next order can be given, and it can be filled up to a length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any


class PermanentBatchSampler:
    """Yields the items of another sampler, or an order given for the next iterator, padded at the end.

    A loader keeps one of these, since torch keeps the sampler of the first iterator in persistent workers.
    Its length is that of a whole epoch, because loops count batches from the beginning of the epoch.

    Args:
        batch_sampler: a batch sampler, or, for a loader without batches, a sampler.
        padded_to: the total number of items, reached by repeating the last one; ``None`` for no repeats.
        spare: the item to repeat if the sampler is empty.

    >>> sampler = PermanentBatchSampler(["a", "b", "c"])
    >>> sampler.draw_next_by(lambda: iter(["c"]))
    >>> list(sampler), list(sampler), len(sampler)
    (['c'], ['a', 'b', 'c'], 3)
    >>> list(PermanentBatchSampler([[1, 3], [5]], padded_to=3))
    [[1, 3], [5], [5]]
    """

    def __init__(self, batch_sampler: Iterable[Any], *, padded_to: int | None = None, spare: Any = None) -> None:
        self.batch_sampler = batch_sampler
        self._padded_to = padded_to
        self._spare = spare
        self._draw: Callable[[], Iterator[Any]] | None = None

    def draw_next_by(self, draw: Callable[[], Iterator[Any]]) -> None:
        """Have the next iterator yield the items of ``draw()``, called when its first item is requested."""
        self._draw = draw

    def __iter__(self) -> Iterator[Any]:
        # A generator, because a loader with workers makes two iterators, and reads the second.
        draw, self._draw = self._draw, None
        items = iter(self.batch_sampler) if draw is None else draw()
        given = 0
        item = self._spare
        for item in items:
            given += 1
            yield item
        for _ in range(given, self._padded_to or 0):
            yield item

    def __len__(self) -> int:
        return len(self.batch_sampler) if self._padded_to is None else self._padded_to  # type: ignore[arg-type]
