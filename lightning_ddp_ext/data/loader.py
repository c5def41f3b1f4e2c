"""Wrap a loader so that its iterators start when the first batch is requested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_ddp_ext.data.epochs import (
    forget_workers,
    prepare_workers,
    samplers_set_by_lightning,
    set_epoch,
)
from lightning_ddp_ext.data.loader_properties import is_stateful
from lightning_ddp_ext.data.position import LoaderPosition
from lightning_ddp_ext.data.proxy import copy_attributes, iterable_of, show
from lightning_ddp_ext.data.seeding import WorkerSeeding
from lightning_ddp_ext.data.worker_seed import WorkerSeed, workers_seeded_by

StartIterator = Callable[["DistributedLoader", "LazyIterator"], Iterator[Any]]


class DistributedLoader:
    """A loader that starts each iterator when its first batch is requested.

    Lightning creates iterators long before it reads them, and some that it never reads.
    An iterator of this loader therefore does nothing until its first batch, when
    ``start_iterator`` looks up the epoch and the position. Only the seed of its workers
    is drawn when it is created, as torch does, so that hooks and models draw the same
    random numbers as with a loader that is not wrapped, unless a sampler draws as well.

    Args:
        source: the loader that the Trainer was given; any iterable. It is not changed
            unless it has a state.
        start_iterator: given this loader and the new iterator, returns the iterator
            that yields the batches.
        is_dealt: whether the strategy has put its own sampler into the loader.

    Attributes:
        source, start_iterator, is_dealt: the arguments.
        loader: the loader to read: a copy of ``source`` if that is a ``DataLoader``
            without a state.
        worker_seed: the seed of the latest iterator's workers.
        length: the number of batches that replaces the loader's own length; ``None`` to
            keep it.
        start_evaluation: given the loader inside, starts an evaluation's iterator over it.
        on_iterator: called with this loader when an iterator is created.

    >>> loader = DistributedLoader([1, 2], lambda loader, iterator: iter(loader.loader))
    >>> len(loader), list(loader), list(loader)
    (2, [1, 2], [1, 2])
    """

    def __init__(
        self, source: Any, start_iterator: StartIterator, *, is_dealt: bool = False
    ) -> None:
        self.source = source
        self.start_iterator = start_iterator
        self.is_dealt = is_dealt
        # The owner of a state may read it, so the loader is not copied.
        self.loader = source if is_stateful(source) else own_copy(source)
        self.worker_seed = WorkerSeed(self.loader)
        # The strategy sets these before the loader is read.
        self.length: int | None = None
        self.start_evaluation: Callable[[Any], Iterator[Any]] = iter
        self.on_iterator: Callable[[DistributedLoader], object] = lambda loader: None

        self._epoch = -1  # of the objects inside

    def copy_loader(self) -> None:
        """Read a copy, which can be changed, even of a loader with a state."""
        self.loader = own_copy(self.loader)
        self.worker_seed = WorkerSeed(self.loader)

    def shown(self) -> Any:
        """Return a proxy of this loader with the class and attributes of ``loader``.

        The Trainer and its users get the proxy.
        """
        return show(self.loader, self)

    def set_epoch(
        self, epoch: int, *, is_set_by_lightning: bool = False, again: bool = False
    ) -> None:
        """Set the epoch of the objects in the loader, once, since they may count calls.

        Args:
            epoch: from 0.
            is_set_by_lightning: whether Lightning has set its samplers' epoch.
            again: whether to set the same epoch a second time, because the loader was
                read in part and the epoch begins anew.
        """
        if epoch != self._epoch or again:
            self._epoch = epoch
            is_set = samplers_set_by_lightning(self.loader) if is_set_by_lightning else ()
            set_epoch(self.loader, epoch, except_for=is_set)

    @contextmanager
    def workers_of(self, epoch: int, *, rank: int, seeding: WorkerSeeding | None) -> Iterator[None]:
        """Give the epoch and the drawn seed to workers of an iterator created in the block.

        For the arguments, see :func:`~lightning_ddp_ext.data.epochs.prepare_workers`.
        """
        prepare_workers(self.loader, epoch, rank=rank, seeding=seeding)
        with workers_seeded_by(self.loader, self.worker_seed.generator):
            yield

    def draw_seed(self) -> None:
        """Draw the seed of an iterator's workers when torch would, for when it starts."""
        self.worker_seed.draw(was_drawn=False)

    def __iter__(self) -> Iterator[Any]:
        self.on_iterator(self)
        self.draw_seed()
        return LazyIterator(self)

    def __len__(self) -> int:
        return len(self.loader) if self.length is None else self.length


class TrainingLoader(DistributedLoader):
    """A loader of training data, whose iterators start at a position.

    Attributes:
        position: the position, which the strategy sets before the loader is read.
    """

    position: LoaderPosition

    @override
    def draw_seed(self) -> None:
        self.worker_seed.draw(was_drawn=self.position.continues())


class LazyIterator(Iterator[Any]):
    """An iterator of a :class:`DistributedLoader` that starts at its first batch.

    Attributes:
        loader: the loader.
        before_next: called before each request of a batch but the first one, including
            the request that finds the end; ``None`` for nothing.
    """

    def __init__(self, loader: DistributedLoader) -> None:
        self.loader = loader
        self.before_next: Callable[[], object] | None = None
        self._batches: Iterator[Any] | None = None

    def start(self) -> Iterator[Any]:
        """Start the iterator, unless it has started."""
        if self._batches is None:
            self._batches = self.loader.start_iterator(self.loader, self)
        return self._batches

    def __next__(self) -> Any:
        has_started = self._batches is not None
        if has_started and self.before_next is not None:
            self.before_next()
        return next(self.start())


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
