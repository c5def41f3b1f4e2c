"""Wrap a loader so that its iterators start when the first batch is requested.

Two things follow for the workers of an iterator:

- Torch draws their seed when the iterator is created. So does the wrapper, although the
  iterator starts later, see :class:`WorkerSeed`. Hooks and models then draw the same
  random numbers as with a loader that is not wrapped.
- The epoch is only known when the iterator starts, and the workers get it then, see
  :func:`prepare_workers`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_ext.data.inspection import (
    all_below,
    has_set_epoch,
    is_of_torch,
    is_stateful,
    samplers_below,
    set_epoch,
)
from lightning_ddp_ext.data.position import Position, global_order_of
from lightning_ddp_ext.data.proxy import forget_workers, iterable_of, own_copy, read_instead, show
from lightning_ddp_ext.data.random_state import seed_generators


@dataclass(frozen=True)
class Started:
    """What an iterator of a :class:`DistributedLoader` reads once it has started.

    Attributes:
        batches: yields the batches.
        before_next: called before each request of a batch but the first one, including
            the request that finds the end; by default, does nothing.
    """

    batches: Iterator[Any]
    before_next: Callable[[], object] = lambda: None


class LazyIterator(Iterator[Any]):
    """An iterator of a :class:`DistributedLoader` that starts at its first batch.

    A copy is ``None``, as Lightning copies iterators of torch.

    Attributes:
        loader: the loader.
    """

    def __init__(self, loader: DistributedLoader) -> None:
        self.loader = loader
        self._started: Started | None = None  # ``None`` until it starts

    def start(self) -> Started:
        """Start the iterator, unless it has started."""
        if self._started is None:
            self._started = self.loader.start_iterator(self)
        return self._started

    def __next__(self) -> Any:
        if self._started is not None:
            self._started.before_next()
        return next(self.start().batches)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class DistributedLoader:
    """A loader that starts each iterator when its first batch is requested.

    Lightning creates iterators long before it reads them, and some that it never reads.
    An iterator of this loader therefore does nothing until its first batch, when
    ``start_iterator`` looks up the epoch and the position.

    Args:
        source: the loader that the Trainer was given; any iterable. It is not changed
            unless it has a state.
        start_iterator: given the iterator whose first batch is requested, starts to read.
        on_iterator: called when an iterator is created; by default, does nothing.
        is_divided: whether a sampler was put into the loader that divides its samples among
            the ranks.
        length: the number of batches, if it replaces the loader's own length.
        position_in: for training data, returns the position in ``loader``.

    Attributes:
        source, start_iterator, on_iterator, is_divided: the arguments.
        loader: the loader to read: a copy of ``source`` if that is a ``DataLoader``
            without a state, or after :meth:`read_indices`.
        position: where an epoch of training data continues; ``None`` for other data.

    >>> loader = DistributedLoader([1, 2], lambda iterator: Started(iter(iterator.loader.loader)))
    >>> len(loader), list(loader), list(loader)
    (2, [1, 2], [1, 2])
    """

    def __init__(
        self,
        source: Any,
        start_iterator: Callable[[LazyIterator], Started],
        *,
        on_iterator: Callable[[], object] = lambda: None,
        is_divided: bool = False,
        length: int | None = None,
        position_in: Callable[[Any], Position] | None = None,
    ) -> None:
        self.source = source
        self.start_iterator = start_iterator
        self.on_iterator = on_iterator
        self.is_divided = is_divided
        # The owner of a state may read it, so the loader is not copied.
        self.loader = source if is_stateful(source) else own_copy(source)
        self.position = None if position_in is None else position_in(self.loader)
        self._length = length
        self._epoch = -1  # that of the objects inside; -1 before the first one
        self._worker_seed = WorkerSeed()

    def shown(self) -> Any:
        """Return a proxy of this loader with the class and attributes of ``loader``.

        The Trainer and its users get the proxy.
        """
        return show(self.loader, self)

    def read_indices(self, items: Iterable[Any]) -> None:
        """Read the indices in ``items`` from now on, in a copy of ``loader``.

        Call it before :meth:`shown`. For ``items``, see ``proxy.read_instead``.
        """
        self.loader = own_copy(self.loader)
        read_instead(self.loader, items)

    def __iter__(self) -> Iterator[Any]:
        self.on_iterator()
        self._worker_seed.draw(self.loader)
        return LazyIterator(self)

    def __len__(self) -> int:
        return len(self.loader) if self._length is None else self._length

    def set_epoch(self, epoch: int, *, is_set_by_lightning: bool = False) -> None:
        """Set the epoch of the objects in the loader, unless this has set it before.

        Each gets an epoch once, since an object may count the calls.

        Args:
            epoch: from 0.
            is_set_by_lightning: whether Lightning has already set this epoch in the loader's
                sampler and in that of its batch sampler, which are then left alone.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            # Our sampler sets the epoch of those that it wraps.
            already_set = samplers_below(global_order_of(self.loader))[1:]
            if is_set_by_lightning:
                # It does so before an epoch's hooks, in which users may set another number.
                owners = (self.loader, getattr(self.loader, "batch_sampler", None))
                already_set += [getattr(owner, "sampler", None) for owner in owners]
            set_epoch(self.loader, epoch, except_for=already_set)

    @contextmanager
    def workers_of(self, epoch: int, *, rank: int, seed: int | None) -> Iterator[None]:
        """Give the epoch and the drawn seed to workers of an iterator created in the block.

        For the arguments, see :func:`prepare_workers`.
        """
        prepare_workers(self.loader, epoch, rank=rank, seed=seed)
        with self._worker_seed.drawn_again(self.loader):
            yield


def source_of(loader: Any) -> Any:
    """Return the user's loader behind a shown one, or another loader unchanged."""
    distributed = iterable_of(loader)
    return distributed.source if isinstance(distributed, DistributedLoader) else loader


class WorkerSeed:
    """The seed that torch draws for the workers of a loader's iterator.

    Torch draws it when it creates its own iterator. The first batch may be requested much
    later than a stock loader would have drawn it. So it is drawn twice from the same state
    of the generator: :meth:`draw` draws it when our iterator is created, and torch draws it
    in the block of :meth:`drawn_again`, where torch's iterator is created.
    """

    def __init__(self) -> None:
        # The generator's state before the latest draw; ``None`` if there was none.
        self._state: torch.Tensor | None = None

    def draw(self, loader: Any) -> None:
        """Draw from the loader's generator what torch draws for a new iterator."""
        # Persistent workers keep the seed of the first iterator.
        keeps_workers = self._state is not None and loader.persistent_workers
        if keeps_workers or not is_of_torch(loader, "__iter__"):
            return
        generator = loader.generator or torch.default_generator
        # A seed that is drawn on another device is only drawn later, by torch.
        if generator.device.type == torch.get_default_device().type == "cpu":
            self._state = generator.get_state()
            torch.empty((), dtype=torch.int64).random_(generator=generator)

    @contextmanager
    def drawn_again(self, loader: Any) -> Iterator[None]:
        """Make an iterator of torch that is created in the block draw the same seed."""
        if self._state is None:
            yield
            return
        users_generator = loader.generator
        loader.generator = UnsentGenerator()
        loader.generator.set_state(self._state)
        try:
            yield
        finally:
            loader.generator = users_generator


class UnsentGenerator(torch.Generator):
    """A generator that is sent to another process without its state.

    Torch could not send the state. A spawned worker gets the generator with the loader,
    if the user's objects refer to the Trainer.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return UnsentGenerator, ()


def prepare_workers(loader: Any, epoch: int, *, rank: int, seed: int | None) -> None:
    """Make the workers of a loader's next iterator belong to an epoch.

    Call it before the loader is iterated over. Persistent workers would not see the new
    epoch. So the next iterator starts new workers if a dataset has ``set_epoch``, if
    the dataset is iterable, or if ``seed`` is given.

    Args:
        loader: the loader to be iterated over. If it is a ``DataLoader``, its
            ``worker_init_fn`` is replaced. Of the loaders below it, which belong to the
            user, only persistent workers are replaced, since they would keep an old
            epoch; their ``worker_init_fn`` is left as it is.
        epoch: the epoch, from 0.
        rank: this process's rank.
        seed: if given, the workers' generators are seeded from (``seed``, epoch, rank,
            worker).
    """
    if isinstance(loader, DataLoader):
        users_function = loader.worker_init_fn
        if isinstance(users_function, StartWorker):  # of an earlier epoch
            users_function = users_function.users_function
        loader.worker_init_fn = StartWorker(users_function, epoch, rank, seed)
    for each in all_below(loader):
        if (
            isinstance(each, DataLoader)
            and each.persistent_workers
            and (seed is not None or _depends_on_epoch(each.dataset))
        ):
            forget_workers(each)


def _depends_on_epoch(dataset: object) -> bool:
    """Whether a worker's copy of a dataset may depend on the epoch.

    An iterable dataset may draw its order in the worker.
    """
    return isinstance(dataset, IterableDataset) or any(map(has_set_epoch, all_below(dataset)))


@dataclass(frozen=True)
class StartWorker:
    """A ``worker_init_fn`` that calls the user's and seeds the worker.

    The worker also leaves the Unix process group of its rank. torchrun, schedulers and
    terminals send signals to all processes of a group. Such a signal would kill the
    workers, which the rank needs until it stops.

    Attributes:
        users_function: the loader's function before, or ``None``.
        epoch: from 0.
        rank: from 0.
        seed: ``None`` leaves the generators as torch and the user's function seed them.
    """

    users_function: Callable[[int], None] | None
    epoch: int
    rank: int
    seed: int | None

    def __call__(self, worker: int) -> None:
        """Start a worker."""
        with suppress(OSError):  # a session leader cannot change its group
            os.setpgid(0, 0)
        if self.users_function is not None:
            self.users_function(worker)
        if self.seed is not None:
            seed_generators(self.seed, epoch=self.epoch, rank=self.rank, worker=worker)
