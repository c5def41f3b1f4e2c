"""Read an index sampler from an item in its middle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

from torch.utils.data import Sampler


class SkippingSampler(Sampler[Any]):
    """Yields what another sampler yields, without the first items; :meth:`skip` says how many.

    A loader has one of these for good, since torch keeps the sampler of a loader's first pass in persistent workers.
    Its length is that of a whole epoch, because loops count batches from the beginning of the epoch.

    Args:
        batch_sampler: a batch sampler, or, for a loader without batches, a sampler. Its attributes are this one's, too.

    >>> sampler = SkippingSampler(["a", "b", "c"])
    >>> sampler.skip(2)
    >>> list(sampler), len(sampler)
    (['c'], 3)
    >>> sampler.skip(0)
    >>> list(sampler)
    ['a', 'b', 'c']
    """

    def __init__(self, batch_sampler: Iterable[Any]) -> None:
        self.batch_sampler = batch_sampler
        self.skip(0)

    def skip(self, items: int, *, generators: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """Say where iterators begin from now on.

        Args:
            items: how many are left out.
            generators: a context with the random numbers from which the sampler drew its order, entered while the
                order is drawn and items are left out.
        """
        self._skipped = items
        self._generators = generators

    def __iter__(self) -> Iterator[Any]:
        # A generator, because a loader with workers makes two iterators for a pass, and reads the second.
        with self._generators():
            items = iter(self.batch_sampler)
            for _ in islice(items, self._skipped):
                pass
        yield from items

    def __len__(self) -> int:
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "batch_sampler" not in vars(self):  # a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)
