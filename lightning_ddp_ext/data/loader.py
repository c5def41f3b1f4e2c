"""Wrap a loader so that each iterator over it begins where training is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_ext.data.generators import with_wrapped

Begin = Callable[["DistributedLoader", "LazyIterator"], Iterator[Any]]


class DistributedLoader:
    """A loader whose iterators are begun by ``begin``, when their first batch is asked for.

    Lightning makes iterators long before it reads them, and some that it never reads. So an iterator of this loader
    does nothing before its first batch: only then does ``begin`` look up the epoch and the position to begin at.

    Every other attribute is the wrapped loader's, for reading and for writing.

    Args:
        source: what the Trainer was given; any iterable. It is left as it is, unless it keeps a state of its own.
        begin: given this loader and the new iterator, returns the iterator that yields the batches.

    Attributes:
        source: as given.
        loader: what is read: a copy of ``source``, if that is a ``DataLoader``.
        length: the number of batches in place of the loader's own; ``None`` for the loader's own.
        position: how far training is in it; ``None`` for a loader that is evaluated.
        balance: by rank, how many batches are evaluated, where these numbers differ; else ``None``.

    >>> loader = DistributedLoader.around([1, 2], lambda loader, iterator: iter(loader.loader))
    >>> len(loader), list(loader), list(loader)
    (2, [1, 2], [1, 2])
    """

    def __init__(self, source: Any, begin: Begin) -> None:
        own = own_copy(source)
        vars(self).update(source=source, loader=own, begin=begin, length=None, position=None, balance=None)

    @staticmethod
    def around(source: Any, begin: Begin) -> DistributedLoader:
        """Wrap a loader, in a class that keeps a state if the loader does."""
        return (StatefulDistributedLoader if is_stateful(source) else DistributedLoader)(source, begin)

    def __iter__(self) -> Iterator[Any]:
        return LazyIterator(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.loader,)  # copies belong to nobody's training

    def __len__(self) -> int:
        return len(self.loader) if self.length is None else self.length

    def __bool__(self) -> bool:
        return True  # without asking for a length, which streams do not have

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "loader" not in vars(self):  # a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self.loader, name, value)


class StatefulDistributedLoader(DistributedLoader):
    """Of a loader that keeps a state: Lightning looks for its methods in the class, from Python 3.12 on."""

    def state_dict(self) -> Any:
        """Return the loader's state."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Have the loader go on from a state."""
        self.loader.load_state_dict(state)


class LazyIterator(Iterator[Any]):
    """One iterator over a :class:`DistributedLoader`, begun when its first batch is asked for."""

    def __init__(self, loader: DistributedLoader) -> None:
        self.loader = loader
        self._batches: Iterator[Any] | None = None

    def begin(self) -> Iterator[Any]:
        """Begin to read, unless that has begun."""
        if self._batches is None:
            self._batches = self.loader.begin(self.loader, self)
        return self._batches

    def __next__(self) -> Any:
        return next(self.begin())


def _itself(loader: Any) -> Any:
    return loader


def is_stateful(loader: object) -> bool:
    """Whether a loader keeps a state of its own, as torchdata's ``StatefulDataLoader`` does."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def own_copy(loader: Any) -> Any:
    """Copy a ``DataLoader``, so that what is changed here is not changed for whoever made it.

    A loader that keeps a state is not copied: its owner may ask it for that state. Neither is what is no DataLoader,
    since nothing of it is changed.
    """
    if not isinstance(loader, DataLoader) or is_stateful(loader):
        return loader
    copied = copy.copy(loader)
    forget_workers(copied)
    return copied


def forget_workers(loader: DataLoader[Any]) -> None:
    """Have the next iterator start workers of its own.

    torch keeps the iterator of ``persistent_workers``, and in it the sampler of the loader's first iterator.
    """
    object.__setattr__(loader, "_iterator", None)


def index_sampler_of(loader: DataLoader[Any]) -> Any:
    """The sampler that says what to read: of batches, or, without batches, of samples."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def set_index_sampler(loader: DataLoader[Any], sampler: Any) -> None:
    """Have a loader of our own read what ``sampler`` says; torch itself refuses that once a loader is made."""
    object.__setattr__(loader, "sampler" if loader.batch_sampler is None else "batch_sampler", sampler)


def name_of(loader: Any) -> str:
    """What an error calls the data of a loader: by what its user has made."""
    if not isinstance(loader, DataLoader):
        return type(loader).__name__
    if isinstance(loader.dataset, IterableDataset):
        return type(loader.dataset).__name__
    sampler = index_sampler_of(loader)
    inner = getattr(sampler, "sampler", None)
    return type(sampler).__name__ + (f" over {type(inner).__name__}" if inner is not None else "")


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers draw from, besides the global ones."""
    owners = [loader, *(with_wrapped(index_sampler_of(loader)) if isinstance(loader, DataLoader) else ())]
    found = [vars(owner).get("generator") for owner in owners if hasattr(owner, "__dict__")]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def batches_of(loader: Any) -> float:
    """The number of batches by a loader's own length; ``inf`` if it has none."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return float("inf")
