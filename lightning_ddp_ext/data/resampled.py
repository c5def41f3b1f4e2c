"""Let a copy of a loader read another sampler.

Lightning creates the loader again instead. A user's class need not store the arguments
of its constructor, so it may silently get defaults. A copy has all attributes of the
original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from lightning_ddp_ext.data.global_order import GlobalOrderSampler
from lightning_ddp_ext.data.loader_properties import index_sampler_of, length_or_inf
from lightning_ddp_ext.data.proxy import own_copy, show

_SAMPLER_ATTRIBUTES = ("batch_sampler", "sampler")


def with_sampler(loader: DataLoader[Any], sampler: GlobalOrderSampler) -> DataLoader[Any] | None:
    """Return a copy of a loader that reads one of our samplers.

    Return ``None`` if the copy could still use the old sampler: if it has started an
    iterator, or keeps the sampler or its length in another attribute.

    Args:
        loader: the loader.
        sampler: yields batches if it divides those of the loader's batch sampler, and
            otherwise samples.
    """
    copied = own_copy(loader)  # without torch's iterator of workers
    if _holds_sampler_elsewhere(copied):
        return None
    old: Any = loader.batch_sampler
    attributes = vars(copied)  # a DataLoader refuses to change them
    if old is not None and sampler.dataset is old:
        attributes["batch_sampler"] = sampler
    else:
        attributes["sampler"] = sampler
        if old is not None:
            attributes["batch_sampler"] = type(old)(sampler, old.batch_size, old.drop_last)
            attributes["batch_size"] = old.batch_size
            attributes["drop_last"] = old.drop_last
    keeps_old_length = _has_length_of_sampler(loader) and not _has_length_of_sampler(copied)
    return None if keeps_old_length else copied


def _holds_sampler_elsewhere(loader: DataLoader[Any]) -> bool:
    """Whether other attributes hold a sampler of the loader, or an iterator over it."""
    samplers = (id(loader.sampler), id(loader.batch_sampler))
    others = [
        value
        for name, value in vars(loader).items()
        if name not in _SAMPLER_ATTRIBUTES and value is not None
    ]
    return any(isinstance(other, Iterator) or id(other) in samplers for other in others)


def _has_length_of_sampler(loader: DataLoader[Any]) -> bool:
    return length_or_inf(loader) == length_or_inf(index_sampler_of(loader))


class PermanentBatchSampler:
    """Yields the items of another sampler, or those set for the next iterator.

    A loader keeps the same object in all epochs, because torch's persistent workers
    keep the sampler of the first iterator. The length is that of a whole epoch, because
    loops count batches from the beginning of the epoch.

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
        # A generator, because a loader with workers creates two iterators and reads the second.
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
