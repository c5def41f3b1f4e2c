"""Wrap a loader so that its iterators start when the first batch is requested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch.utils.data import DataLoader

from lightning_ddp_ext.data.copies import copy_attributes
from lightning_ddp_ext.data.epochs import forget_workers, start_epoch
from lightning_ddp_ext.data.loader_properties import is_stateful
from lightning_ddp_ext.data.proxy import iterable_of, show
from lightning_ddp_ext.data.seeding import WorkerSeeding, workers_seeded_apart

StartIterator = Callable[["DistributedLoader", "LazyIterator"], Iterator[Any]]


class DistributedLoader:
    """A loader that starts each iterator when its first batch is requested.

    Lightning creates iterators long before it reads them, and some that it never reads.
    An iterator of this loader therefore does nothing until its first batch, when
    ``start_iterator`` looks up the epoch and the position.

    Args:
        source: the loader that the Trainer was given; any iterable. It is not changed
            unless it has a state.
        start_iterator: given this loader and the new iterator, returns the iterator
            that yields the batches.

    Attributes:
        source: as given.
        loader: the loader to read: a copy of ``source`` if that is a ``DataLoader``
            without a state.
        length: the number of batches that replaces the loader's own length; ``None`` to
            keep it.
        is_dealt: whether the strategy has put its own sampler into the loader.
        position: the training position in the loader; ``None`` for an evaluation
            loader.
        start_evaluation: starts an iterator over an evaluation loader; ``None`` if
            nothing depends on its steps.
        on_iterator: called when an iterator is created.

    >>> loader = DistributedLoader([1, 2], lambda loader, iterator: iter(loader.loader))
    >>> len(loader), list(loader), list(loader)
    (2, [1, 2], [1, 2])
    """

    def __init__(self, source: Any, start_iterator: StartIterator) -> None:
        self.source = source
        # Its owner may read that state.
        self.loader = source if is_stateful(source) else own_copy(source)
        self.start_iterator = start_iterator
        self.length: int | None = None
        self.is_dealt = False
        self.position: Any = None
        self.start_evaluation: Callable[[], Iterator[Any]] | None = None
        self.on_iterator: Callable[[], object] = lambda: None

    def shown(self) -> Any:
        """Return this loader with the class and attributes of ``loader``.

        The Trainer and its users see this object.
        """
        return show(self.loader, self)

    @contextmanager
    def in_epoch(self, epoch: int, *, rank: int, seeding: WorkerSeeding | None) -> Iterator[None]:
        """Set the epoch in the loader, whose iterator is created in the block.

        For the arguments, see :func:`~lightning_ddp_ext.data.epochs.start_epoch`.
        """
        keeps_workers = start_epoch(self.loader, epoch, rank=rank, seeding=seeding)
        # A resumed run may start its workers later, when the original run drew no
        # number for them.
        is_resumable = epoch > 0 or self.position is None
        seeds_apart = keeps_workers and is_resumable
        with workers_seeded_apart(self.loader, epoch) if seeds_apart else nullcontext():
            yield

    def __iter__(self) -> Iterator[Any]:
        self.on_iterator()
        return LazyIterator(self)

    def __len__(self) -> int:
        return len(self.loader) if self.length is None else self.length


class LazyIterator(Iterator[Any]):
    """An iterator of a :class:`DistributedLoader` that starts at its first batch.

    Attributes:
        loader: the loader.
        before_next: called for each request of a batch, also after the end, if any.
        is_announced: whether it was already called for the first request.
    """

    def __init__(self, loader: DistributedLoader) -> None:
        self.loader = loader
        self.before_next: Callable[[], object] | None = None
        self.is_announced = False
        self._batches: Iterator[Any] | None = None

    def start(self) -> Iterator[Any]:
        """Start the iterator, unless it has started."""
        if self._batches is None:
            self._batches = self.loader.start_iterator(self.loader, self)
        return self._batches

    def __next__(self) -> Any:
        batches = self.start()
        if self.before_next is not None and not self.is_announced:
            self.before_next()
        self.is_announced = False
        return next(batches)


def source_of(loader: Any) -> Any:
    """Return the user's loader behind a shown one, or another loader unchanged."""
    distributed = iterable_of(loader)
    return distributed.source if isinstance(distributed, DistributedLoader) else loader


def own_copy(loader: Any) -> Any:
    """Return a copy of a ``DataLoader`` that can be changed and read independently.

    Other iterables are returned as they are, since nothing changes them.
    """
    if not isinstance(loader, DataLoader):
        return loader
    copied = copy_attributes(loader)
    forget_workers(copied)
    return copied
