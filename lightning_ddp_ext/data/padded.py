"""Repeat the last item of a rank's index sampler until all ranks have equally many."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import Sampler


class PaddedSampler(Sampler[Any]):
    """Yields what another sampler yields, and then its last item again, up to a length.

    Args:
        batch_sampler: a batch sampler, or, for a loader without batches, a sampler. Its attributes are this one's, too.
        length: items in all, which the sampler does not exceed.
        spare: the item to repeat where the sampler has none.

    >>> list(PaddedSampler([[1, 3], [5]], length=3)), list(PaddedSampler([], length=2, spare=[0]))
    ([[1, 3], [5], [5]], [[0], [0]])
    """

    def __init__(self, batch_sampler: Any, *, length: int, spare: Any = None) -> None:
        self.batch_sampler = batch_sampler
        self._length = length
        self._spare = spare

    def __iter__(self) -> Iterator[Any]:
        given, item = 0, self._spare
        for item in self.batch_sampler:
            given += 1
            yield item
        for _ in range(given, self._length):
            yield item

    def __len__(self) -> int:
        return self._length

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "batch_sampler" not in vars(self):  # a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)
