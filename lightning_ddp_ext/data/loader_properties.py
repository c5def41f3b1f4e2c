"""Read a loader of any class, and what it consists of: sampler, length and parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_ext.data.epochs import samplers_below

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


def index_sampler_of(loader: Any) -> Any:
    """Return the batch sampler or sampler that a loader reads, or ``None``."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def iterates_as_torch(loader: object) -> bool:
    """Whether a loader's ``__iter__`` is that of torch's or torchdata's ``DataLoader``."""
    if not isinstance(loader, DataLoader):
        return False
    return type(loader).__iter__.__module__.partition(".")[0] in ("torch", "torchdata")


def is_stateful(loader: object) -> bool:
    """Whether a loader has a state, as torchdata's ``StatefulDataLoader`` does."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def length_or_inf(loader: Any) -> float:
    """Return the length of a loader, sampler or dataset; ``inf`` if it has none."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return float("inf")


def name_of(loader: Any) -> str:
    """Return a name for a loader in errors: its samplers' classes, or else its data's.

    >>> name_of(DataLoader(range(4), shuffle=True)), name_of([1, 2])
    ('BatchSampler over RandomSampler', 'list')
    """
    samplers = [type(sampler).__name__ for sampler in samplers_below(index_sampler_of(loader))]
    return " over ".join(samplers) or type(getattr(loader, "dataset", loader)).__name__
