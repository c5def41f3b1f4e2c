"""Let a loader read another sampler, if possible without calling its constructor.

A user's class need not store the arguments of its constructor, so a loader that is
created again may silently get defaults. A copy has all attributes of the original.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from lightning_ddp_ext.data.loader_properties import index_sampler_of, is_stateful, length_or_inf
from lightning_ddp_ext.data.proxy import own_copy, show

_SAMPLER_ATTRIBUTES = ("batch_sampler", "sampler", "batch_size", "drop_last")

REMEDY = (
    "pass batch_sampler=DistributedBatchSamplerWrapper(...) around it, or set "
    "Trainer(use_distributed_sampler=False) and divide the data yourself"
)


def with_sampler(
    loader: DataLoader[Any], recreate: Callable[[DataLoader[Any]], DataLoader[Any]]
) -> DataLoader[Any]:
    """Return a loader like the given one that reads another sampler.

    This is a copy, unless a copy could still use the old sampler: if the loader has a
    state, has started an iterator, or keeps the sampler or its length in another
    attribute. Then the result is ``recreate(loader)``.

    Args:
        loader: the loader.
        recreate: creates a loader like the given one, with the other sampler. For a
            copy, it gets a plain ``DataLoader``.
    """
    copied = own_copy(loader)  # without torch's iterator of workers
    if is_stateful(loader) or _holds_sampler_elsewhere(copied):
        return recreate(loader)
    created = recreate(_plain(loader))
    # A DataLoader refuses to change its attributes.
    vars(copied).update({name: getattr(created, name) for name in _SAMPLER_ATTRIBUTES})
    keeps_old_length = _has_length_of_sampler(loader) and not _has_length_of_sampler(copied)
    return recreate(loader) if keeps_old_length else copied


def _plain(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return a ``DataLoader`` with the batches of a loader, without its other options."""
    batch_sampler = loader.batch_sampler
    if batch_sampler is None:
        return DataLoader(loader.dataset, batch_size=None)
    if type(batch_sampler) is BatchSampler:
        # Lightning would replace both values of a given batch sampler by torch's defaults.
        return DataLoader(
            loader.dataset, batch_size=batch_sampler.batch_size, drop_last=batch_sampler.drop_last
        )
    return DataLoader(loader.dataset, batch_sampler=batch_sampler)


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
