"""Wrap a loader so that its iterators start when the first batch is requested.

Torch draws the seed of an iterator's workers when the iterator is created. So does the
wrapper, although the iterator starts later: hooks and models draw the same random
numbers as with a loader that is not wrapped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from lightning_ddp_ext.data.epochs import prepare_workers, samplers_below, set_epoch
from lightning_ddp_ext.data.position import Position, global_order_of
from lightning_ddp_ext.data.proxy import (
    is_of_torch,
    is_stateful,
    iterable_of,
    own_copy,
    show,
)


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


StartIterator = Callable[["DistributedLoader", "LazyIterator"], Started]


class DistributedLoader:
    """A loader that starts each iterator when its first batch is requested.

    Lightning creates iterators long before it reads them, and some that it never reads.
    An iterator of this loader therefore does nothing until its first batch, when
    ``start_iterator`` looks up the epoch and the position.

    Args:
        source: the loader that the Trainer was given; any iterable. It is not changed
            unless it has a state.
        start_iterator: given this loader and the iterator whose first batch is
            requested, starts to read.
        on_iterator: called when an iterator is created; by default, does nothing.
        is_divided: whether a sampler was put into the loader that divides its samples among
            the ranks.

    Attributes:
        source, start_iterator, on_iterator, is_divided: the arguments.
        loader: the loader to read: a copy of ``source`` if that is a ``DataLoader``
            without a state.
        length: the number of batches that replaces the loader's own length; ``None`` to
            keep it.
        position: where the epochs of a loader of training data continue; ``None`` for
            other data.

    For training data, the creator sets ``length`` and ``position`` before the loader is
    shown.

    >>> loader = DistributedLoader([1, 2], lambda loader, iterator: Started(iter(loader.loader)))
    >>> len(loader), list(loader), list(loader)
    (2, [1, 2], [1, 2])
    """

    def __init__(
        self,
        source: Any,
        start_iterator: StartIterator,
        *,
        on_iterator: Callable[[], object] = lambda: None,
        is_divided: bool = False,
    ) -> None:
        self.source = source
        self.start_iterator = start_iterator
        self.on_iterator = on_iterator
        self.is_divided = is_divided
        # The owner of a state may read it, so the loader is not copied.
        self.loader = source if is_stateful(source) else own_copy(source)
        self.length: int | None = None
        self.position: Position | None = None
        self._epoch = -1  # that of the objects inside; -1 before the first one
        # The seed of an iterator's workers is drawn twice: by `__iter__`, as torch does, and,
        # from the same state of the generator, by the real iterator, in `workers_of`. This is
        # the state before the latest draw; ``None`` if there was none.
        self._state_before_seed: torch.Tensor | None = None

    def shown(self) -> Any:
        """Return a proxy of this loader with the class and attributes of ``loader``.

        The Trainer and its users get the proxy.
        """
        return show(self.loader, self)

    def set_epoch(self, epoch: int, *, is_set_by_lightning: bool = False) -> None:
        """Set the epoch of the objects in the loader, unless this has set it before.

        Each gets an epoch once, since an object may count the calls.

        Args:
            epoch: from 0.
            is_set_by_lightning: whether Lightning has already set this epoch in the
                samplers that it finds, which are then left alone.
        """
        if epoch != self._epoch:
            self._epoch = epoch
            # Our sampler sets the epoch of those that it wraps.
            are_set = samplers_below(global_order_of(self.loader))[1:]
            if is_set_by_lightning:
                are_set += samplers_set_by_lightning(self.loader)
            set_epoch(self.loader, epoch, except_for=are_set)

    def _draw_worker_seed(self) -> None:
        """Draw what torch draws when it creates an iterator, and keep the state before that."""
        source = self.loader.generator or torch.default_generator
        self._state_before_seed = source.get_state()
        torch.empty((), dtype=torch.int64).random_(generator=source)

    @contextmanager
    def workers_of(self, epoch: int, *, rank: int, seed: int | None) -> Iterator[None]:
        """Give the epoch and the drawn seed to workers of an iterator created in the block.

        For the arguments, see :func:`~lightning_ddp_ext.data.epochs.prepare_workers`.
        """
        prepare_workers(self.loader, epoch, rank=rank, seed=seed)
        if self._state_before_seed is None:
            yield
            return
        users_generator = self.loader.generator
        self.loader.generator = UnsentGenerator()
        self.loader.generator.set_state(self._state_before_seed)
        try:
            yield
        finally:
            self.loader.generator = users_generator

    def __iter__(self) -> Iterator[Any]:
        self.on_iterator()
        if _draws_seed_on_cpu(self.loader) and (
            # Torch draws nothing if workers persist from an earlier iterator.
            not self.loader.persistent_workers or self._state_before_seed is None
        ):
            self._draw_worker_seed()
        return LazyIterator(self)

    def __len__(self) -> int:
        return len(self.loader) if self.length is None else self.length


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
            self._started = self.loader.start_iterator(self.loader, self)
        return self._started

    def __next__(self) -> Any:
        if self._started is not None:
            self._started.before_next()
        return next(self.start().batches)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class UnsentGenerator(torch.Generator):
    """A generator that is sent to another process without its state.

    Torch could not send the state. A spawned worker gets the generator with the loader,
    if the user's objects refer to the Trainer.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return UnsentGenerator, ()


def _draws_seed_on_cpu(loader: Any) -> bool:
    """Whether a loader's iterator draws a seed as torch does, and on the CPU."""
    if not is_of_torch(loader, "__iter__"):
        return False
    generator = loader.generator or torch.default_generator
    return generator.device.type == torch.get_default_device().type == "cpu"


def samplers_set_by_lightning(loader: Any) -> list[Any]:
    """Return the samplers in a loader that get the epoch from Lightning.

    Lightning calls ``set_epoch`` on the loader's sampler and on that of its batch
    sampler before the hooks of an epoch, in which users may set another number.
    """
    batch_sampler = getattr(loader, "batch_sampler", None)
    return [getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)]


def source_of(loader: Any) -> Any:
    """Return the user's loader behind a shown one, or another loader unchanged."""
    distributed = iterable_of(loader)
    return distributed.source if isinstance(distributed, DistributedLoader) else loader
