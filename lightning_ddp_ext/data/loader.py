"""Wrap a loader so that each iterator over it starts when its first batch is requested."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, Sampler

StartIterator = Callable[["DistributedLoader", "LazyIterator"], Iterator[Any]]


class DistributedLoader:
    """A loader whose iterators are started by ``start_iterator``, when their first batch is requested.

    Lightning makes iterators long before it reads them, and some that it never reads. So an iterator of this loader
    does nothing before its first batch: only then does ``start_iterator`` look up the epoch and the position.

    Every other attribute is the wrapped loader's, for reading and for writing.

    Args:
        source: what the Trainer was given; any iterable. It is left as it is, unless it has a state.
        start_iterator: given this loader and the new iterator, returns the iterator that yields the batches.

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

    def __init__(self, source: Any, start_iterator: StartIterator) -> None:
        own = own_copy(source)
        vars(self).update(source=source, loader=own, start_iterator=start_iterator)
        vars(self).update(length=None, position=None, balance=None)

    @staticmethod
    def around(source: Any, start_iterator: StartIterator) -> DistributedLoader:
        """Wrap a loader, in a class that keeps a state if the loader does."""
        return (StatefulDistributedLoader if is_stateful(source) else DistributedLoader)(source, start_iterator)

    def __iter__(self) -> Iterator[Any]:
        return LazyIterator(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.loader,)  # a copy is detached from the training run

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
        """Have the loader continue from a state."""
        self.loader.load_state_dict(state)


class LazyIterator(Iterator[Any]):
    """One iterator over a :class:`DistributedLoader`, started when its first batch is requested."""

    def __init__(self, loader: DistributedLoader) -> None:
        self.loader = loader
        self._batches: Iterator[Any] | None = None

    def start(self) -> Iterator[Any]:
        """Start to read, unless that is done."""
        if self._batches is None:
            self._batches = self.loader.start_iterator(self.loader, self)
        return self._batches

    def __next__(self) -> Any:
        return next(self.start())


def _itself(loader: Any) -> Any:
    return loader


def is_stateful(loader: object) -> bool:
    """Whether a loader has a state, as torchdata's ``StatefulDataLoader`` does."""
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def own_copy(loader: Any) -> Any:
    """Copy a ``DataLoader``, so that changes of the copy leave the user's loader as it is.

    A loader that has a state is not copied: its owner may read that state. Other iterables are not copied
    either, since nothing of them is changed.
    """
    return loader if is_stateful(loader) else without_iterator(loader)


def without_iterator(loader: Any) -> Any:
    """Copy a ``DataLoader``, so that reading the copy leaves alone the workers and the state of the original."""
    if not isinstance(loader, DataLoader):
        return loader
    copied = copy.copy(loader)
    forget_workers(copied)
    return copied


def forget_workers(loader: DataLoader[Any]) -> None:
    """Have the next iterator start new workers.

    torch keeps the iterator of ``persistent_workers``, and in it the sampler of the loader's first iterator.
    """
    object.__setattr__(loader, "_iterator", None)


def index_sampler_of(loader: Any) -> Any:
    """Return the sampler of batches, or of samples, that decides what is read; ``None`` where no sampler does."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def set_index_sampler(loader: DataLoader[Any], sampler: Any) -> None:
    """Replace the index sampler of a loader of our own; torch itself refuses that once a loader is made."""
    object.__setattr__(loader, "sampler" if loader.batch_sampler is None else "batch_sampler", sampler)


def with_wrapped(sampler: object) -> list[object]:
    """Return the sampler, and the samplers that are its attributes, at any depth."""
    found = [sampler]
    for owner in found:
        for name, value in sorted(getattr(owner, "__dict__", {}).items()):
            if _is_sampler(name, value) and not any(value is other for other in found):
                found.append(value)
    return found


def _is_sampler(name: str, value: object) -> bool:
    return isinstance(value, Sampler) or (name in ("sampler", "batch_sampler") and hasattr(value, "__iter__"))


def name_of(loader: Any) -> str:
    """Return the name of a loader's data in errors: the class that the user has chosen."""
    sampler = index_sampler_of(loader)
    if sampler is None:
        return type(loader.dataset if isinstance(loader, DataLoader) else loader).__name__
    inner = getattr(sampler, "sampler", None)
    return type(sampler).__name__ + (f" over {type(inner).__name__}" if inner is not None else "")


def batches_of(loader: Any) -> float:
    """Return the number of batches by a loader's own length; ``inf`` if it has none."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return float("inf")
