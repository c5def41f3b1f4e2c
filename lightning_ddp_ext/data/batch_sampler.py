"""The permanent batch sampler of a loader: it can begin in its middle, and be filled up to a length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any


class PermanentBatchSampler:
    """Yields what another sampler yields, without the first items that :meth:`skip` leaves out, and padded at the end.

    A loader keeps one of these, since torch keeps the sampler of the first iterator in persistent workers.
    Its length is that of a whole epoch, because loops count batches from the beginning of the epoch.

    Args:
        batch_sampler: a batch sampler, or, for a loader without batches, a sampler.
        padded_to: items in all, reached by repeating the last one; ``None`` to repeat nothing.
        spare: the item to repeat where the sampler has none.

    >>> sampler = PermanentBatchSampler(["a", "b", "c"])
    >>> sampler.skip(2)
    >>> list(sampler), len(sampler)
    (['c'], 3)
    >>> list(PermanentBatchSampler([[1, 3], [5]], padded_to=3))
    [[1, 3], [5], [5]]
    """

    def __init__(self, batch_sampler: Iterable[Any], *, padded_to: int | None = None, spare: Any = None) -> None:
        self.batch_sampler = batch_sampler
        self._padded_to = padded_to
        self._spare = spare
        self.skip(0)

    def skip(self, items: int, *, generators: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Set where the next iterators start.

        Args:
            items: how many are left out.
            generators: a context with the random numbers from which the sampler drew its order, active while the
                order is drawn and items are left out.
        """
        self._skipped = items
        self._generators = generators

    def __iter__(self) -> Iterator[Any]:
        # A generator, because a loader with workers makes two iterators, and reads the second.
        with self._generators():
            items = iter(self.batch_sampler)
            for _ in islice(items, self._skipped):
                pass
        given, item = self._skipped, self._spare
        for item in items:
            given += 1
            yield item
        for _ in range(given, self._padded_to or 0):
            yield item

    def __len__(self) -> int:
        return len(self.batch_sampler) if self._padded_to is None else self._padded_to  # type: ignore[arg-type]
