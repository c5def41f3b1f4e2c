"""Wrap a loader so that its iterators start when the first batch is requested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_ddp_ext.data.epochs import (
    forget_workers,
    prepare_workers,
    samplers_set_by_lightning,
    set_epoch,
)
from lightning_ddp_ext.data.loader_properties import is_stateful, iterates_as_torch
from lightning_ddp_ext.data.proxy import copy_attributes, iterable_of, show
from lightning_ddp_ext.data.seeding import WorkerSeeding

StartIterator = Callable[["DistributedLoader", "LazyIterator"], Iterator[Any]]


class Seeds(torch.Generator):
    """A generator of workers' seeds.

    A spawned worker gets an empty one with the loader, if the user's objects refer to
    the Trainer. Torch could not send the state of a generator.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return Seeds, ()


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

    Attributes:
        source, start_iterator: as given.
        loader: the loader to read: a copy of ``source`` if that is a ``DataLoader``
            without a state.
        seeds: the generator from which the next iterator that starts draws its workers'
            seed.
        length: the number of batches that replaces the loader's own length; ``None`` to
            keep it.
        is_dealt: whether the strategy has put its own sampler into the loader.
        position: the ``LoaderPosition`` of a training loader; ``None`` for an evaluation
            loader.
        start_evaluation: given the loader inside, starts an evaluation's iterator over it;
            ``None`` if nothing depends on its steps.
        on_iterator: called with this loader when an iterator is created.
        had_workers: whether persistent workers had been seeded before the latest
            iterator, in this run or, of an evaluation loader, in the one that is
            resumed. It means nothing if workers do not persist.

    >>> loader = DistributedLoader([1, 2], lambda loader, iterator: iter(loader.loader))
    >>> len(loader), list(loader), list(loader)
    (2, [1, 2], [1, 2])
    """

    def __init__(self, source: Any, start_iterator: StartIterator) -> None:
        self.source = source
        # Its owner may read that state.
        self.loader = source if is_stateful(source) else own_copy(source)
        self.start_iterator = start_iterator
        self.seeds = Seeds()
        # The strategy sets these before the loader is read.
        self.length: int | None = None
        self.is_dealt = False
        self.position: Any = None
        self.start_evaluation: Callable[[Any], Iterator[Any]] | None = None
        self.on_iterator: Callable[[DistributedLoader], object] = lambda loader: None
        self.had_workers = False

        self._has_workers = False  # persistent ones, which were seeded in this run
        self._epoch = -1  # of the objects inside
        # The loader's own generator, which `workers_seeded_by` may have replaced.
        self._users_generator: torch.Generator | None = None

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

    def workers_of(
        self, epoch: int, *, rank: int, seeding: WorkerSeeding | None
    ) -> AbstractContextManager[None]:
        """Give an epoch to the workers of an iterator that is created in the block.

        For the arguments, see :func:`~lightning_ddp_ext.data.epochs.prepare_workers`.
        """
        prepare_workers(self.loader, epoch, rank=rank, seeding=seeding)
        is_seeded = iterates_as_torch(self.loader)
        return workers_seeded_by(self.loader, self.seeds) if is_seeded else nullcontext()

    def draw_seed(self) -> None:
        """Draw the seed of an iterator's workers when torch would, and keep it for the start.

        Persistent workers are seeded once.
        """
        self.had_workers = self.had_workers or self._has_workers
        if not self._has_workers:
            self._draw_seed()

    def repeat_global_draw(self) -> None:
        """Draw the latest iterator's seed again, if it came from torch's global generator.

        Call this after the state of that generator was restored.
        """
        if self._users_generator is None:
            self._draw_seed()

    def _draw_seed(self) -> None:
        if not (iterates_as_torch(self.loader) and _draws_on_cpu(self._users_generator)):
            return
        self._has_workers = self.loader.persistent_workers
        source = self._users_generator or torch.default_generator
        self.seeds.set_state(source.get_state())
        if not self._had_drawn_seed():
            torch.empty((), dtype=torch.int64).random_(generator=source)

    def _had_drawn_seed(self) -> bool:
        """Whether the run that is resumed had already drawn the seed of an iterator."""
        if self.position is not None:
            return bool(self.position.continues())
        return self.has_seeded_workers(before_latest=True)

    def has_seeded_workers(self, *, before_latest: bool) -> bool:
        """Whether workers persist and have been seeded.

        With ``before_latest``, only if that was before the latest iterator.
        """
        is_seeded = self.had_workers or (self._has_workers and not before_latest)
        return is_seeded and bool(getattr(self.loader, "persistent_workers", False))

    def __iter__(self) -> Iterator[Any]:
        self.on_iterator(self)
        self._users_generator = getattr(self.loader, "generator", None)
        self.draw_seed()
        return LazyIterator(self)

    def __len__(self) -> int:
        return len(self.loader) if self.length is None else self.length


class LazyIterator(Iterator[Any]):
    """An iterator of a :class:`DistributedLoader` that starts at its first batch.

    Attributes:
        loader: the loader.
        before_next: called before each request of a batch, including the one that finds
            the end; ``None`` for nothing.
        is_announced: whether the next request skips it, because the iterator before
            this one has called it for the same batch.
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


@contextmanager
def workers_seeded_by(loader: DataLoader[Any], generator: torch.Generator) -> Iterator[None]:
    """Make an iterator of a ``DataLoader`` draw its workers' seed from a generator.

    The iterator is created in the block. Otherwise torch draws the seed from the
    loader's generator or the global one; so it does here if it draws on a GPU.
    """
    users_generator = loader.generator
    if _draws_on_cpu(users_generator):
        loader.generator = generator
    try:
        yield
    finally:
        loader.generator = users_generator


def _draws_on_cpu(generator: torch.Generator | None) -> bool:
    """Whether torch draws workers' seeds on the CPU, for a loader with this generator."""
    has_cpu_generator = generator is None or generator.device.type == "cpu"
    return has_cpu_generator and torch.get_default_device().type == "cpu"
