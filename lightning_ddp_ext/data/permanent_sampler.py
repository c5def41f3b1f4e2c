"""Let a loader's next iterator read other indices, while the loader keeps its sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from lightning_ddp_ext.data.loader_properties import index_sampler_of
from lightning_ddp_ext.data.proxy import show


class PermanentBatchSampler:
    """Yields the items of another sampler, or of an order set for the next iterator.

    A loader always keeps the same one, because with persistent workers torch keeps the
    sampler of the first iterator. The length is that of a whole epoch, because loops
    count batches from the beginning of the epoch.

    Args:
        batch_sampler: a batch sampler, or a sampler if the loader does not make
            batches.

    >>> sampler = PermanentBatchSampler(["a", "b", "c"])
    >>> sampler.draw_next_by(lambda: iter(["c"]))
    >>> list(sampler), list(sampler), len(sampler)
    (['c'], ['a', 'b', 'c'], 3)
    """

    def __init__(self, batch_sampler: Iterable[Any]) -> None:
        self.batch_sampler = batch_sampler
        self._draw: Callable[[], Iterator[Any]] | None = None

    def draw_next_by(self, draw: Callable[[], Iterator[Any]]) -> None:
        """Make the next iterator yield the items of ``draw()``.

        ``draw`` is called when the first item is requested.
        """
        self._draw = draw

    def __iter__(self) -> Iterator[Any]:
        # A generator, as a loader with workers reads the second of two iterators.
        draw = self._draw
        self._draw = None
        yield from self.batch_sampler if draw is None else draw()

    def __len__(self) -> int:
        return len(self.batch_sampler)  # type: ignore[arg-type]


def make_permanent(
    loader: DataLoader[Any], items: Iterable[Any] | None = None
) -> PermanentBatchSampler:
    """Wrap the index sampler of one of our loaders, and return the wrapper.

    If ``items`` is given, the loader reads these, and still shows its own sampler.
    """
    index_sampler = index_sampler_of(loader)
    permanent = PermanentBatchSampler(index_sampler if items is None else items)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    # A DataLoader refuses to change it.
    object.__setattr__(loader, name, show(index_sampler, permanent))
    return permanent
