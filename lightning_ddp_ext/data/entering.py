"""Enter a loader in the middle of an epoch, in the quickest way that it allows.

There are four, from quick to slow: a sampler of ours begins at a position of the global order, on any number of ranks;
another sampler leaves out indices; a loader that keeps a state of its own is given that state; and batches of
everything else are read and dropped, see ``position``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from typing_extensions import override

from lightning_ddp_ext.data.batch_sampler import SkippingSampler
from lightning_ddp_ext.data.loader import batches_of, index_sampler_of, is_stateful, set_index_sampler
from lightning_ddp_ext.data.position import LoaderPosition, Pass
from lightning_ddp_ext.data.resumable import Resumable
from lightning_ddp_ext.data.streams import with_wrapped

_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class OrderPosition(LoaderPosition):
    """Of a loader that reads a sampler of ours: a position in the global order, good for any number of ranks."""

    kind = "order"

    def __init__(self, loader: Any, sampler: Resumable, unit: int, *, world_size: int, remembered: int) -> None:
        super().__init__(loader, world_size=world_size, remembered=remembered)
        self._sampler = sampler
        self._unit = unit  # items of the sampler in a batch

    @override
    def _iterate(self, new: Pass, own: Mapping[str, Any] | None) -> Iterator[Any]:
        self._sampler.resume_at(self.epoch, new.start)
        return iter(self.loader)

    @override
    def _position(self, which: Pass, batches: int) -> int:
        share = replace(self._sampler.share(), start=which.start)
        return share.position_after(batches * self._unit)

    @override
    def left_after(self, position: int) -> float:
        left = len(replace(self._sampler.share(), start=position))
        is_cut = getattr(index_sampler_of(self.loader), "drop_last", False)
        return left // self._unit if is_cut else -(-left // self._unit)

    @override
    def _description(self) -> dict[str, Any]:
        return {"loader": self.kind, **self._sampler.identity()}

    @override
    def _take_random(self) -> None:
        return None


class IndexPosition(LoaderPosition):
    """Of a loader that reads some other sampler with a length: its indices are left out, and no sample is read."""

    kind = "indices"

    def __init__(self, loader: Any, *, world_size: int, remembered: int) -> None:
        super().__init__(loader, world_size=world_size, remembered=remembered)
        self._skipping = SkippingSampler(index_sampler_of(loader))
        self.needs_own_state = any(isinstance(each, _DRAWING) for each in with_wrapped(self._skipping))
        set_index_sampler(loader, self._skipping)

    @override
    def _iterate(self, new: Pass, own: Mapping[str, Any] | None) -> Iterator[Any]:
        self._skipping.skip(new.start, generators=partial(self._as_then, new) if new.start else nullcontext)
        return iter(self.loader)

    @contextmanager
    @override
    def _as_then(self, which: Pass) -> Iterator[None]:
        with super()._as_then(which):
            if which.start and which.random is not None:  # a loader draws its workers' seed before the order is drawn
                torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
            yield


class StatePosition(LoaderPosition):
    """Of a loader that keeps a state of its own, which is asked for when a checkpoint is saved.

    By then more batches may have been drawn than are done. So a checkpoint has an earlier state, and says how many
    batches to drop after it; without one, from the beginning of the pass.
    """

    kind = "state"

    def __init__(self, loader: Any, *, world_size: int, remembered: int) -> None:
        super().__init__(loader, world_size=world_size, remembered=remembered)
        self.needs_own_state = world_size > 1  # else Lightning has given the loader the state that it saves

    @override
    def own_state_dict(self, done: int) -> dict[str, Any]:
        which, batches = self._pass_at(done)
        latest = self._passes[-1] if self._passes else which
        if not latest.has_ended:  # from the state of their end, some loaders begin anew
            latest.states.append((latest.drawn, self.loader.state_dict()))
        known = [each for each in which.states if each[0] <= batches]
        drawn, state = known[-1] if known else (-which.start, None)
        which.states = [each for each in which.states if each[0] >= drawn]  # no later checkpoint is of a batch before
        return {"random": which.random, "state": state, "dropped": batches - drawn}

    @override
    def _iterate(self, new: Pass, own: Mapping[str, Any] | None) -> Iterator[Any]:
        state, dropped = (None, 0) if own is None else (own["state"], own["dropped"])
        if state is None:  # of a resumed run, Lightning has given the loader rank 0's state, or none
            with self._as_then(new):
                batches = iter(self.loader)
                self._drop(batches, dropped)
        else:
            new.states = [(-dropped, state)]
            self.loader.load_state_dict(state)
            batches = iter(self.loader)
            self._drop(batches, dropped)
        return _count_drawn(new, batches)


def _count_drawn(which: Pass, batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        which.drawn += 1
        yield batch
    which.has_ended = True


def rewind(loader: Any) -> None:
    """Have samplers of ours begin at the start of their epoch: training may be in its middle, others read all of it."""
    for sampler in with_wrapped(index_sampler_of(loader)) if isinstance(loader, DataLoader) else ():
        if isinstance(sampler, Resumable):
            sampler.resume_at(sampler.epoch, 0)


def position_of(loader: Any, *, world_size: int, remembered: int) -> LoaderPosition:
    """Choose the quickest way of entering a loader in the middle of an epoch.

    Args:
        loader: a loader of our own, whose index sampler may be replaced.
        world_size: see :class:`LoaderPosition`.
        remembered: see :class:`LoaderPosition`.
    """
    if is_stateful(loader):
        return StatePosition(loader, world_size=world_size, remembered=remembered)
    if not _reads_indices(loader):
        return LoaderPosition(loader, world_size=world_size, remembered=remembered)
    sampler, unit = _resumable(index_sampler_of(loader))
    if sampler is not None:
        return OrderPosition(loader, sampler, unit, world_size=world_size, remembered=remembered)
    return IndexPosition(loader, world_size=world_size, remembered=remembered)


def _reads_indices(loader: object) -> bool:
    """Whether a sampler with a length says what is read; a class that iterates in its own way may not ask it."""
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        return False
    return not isinstance(loader.dataset, IterableDataset) and batches_of(index_sampler_of(loader)) != float("inf")


def _resumable(index_sampler: Any) -> tuple[Resumable | None, int]:
    """The sampler of ours that decides what is read, if there is one, and how many of its items make a batch."""
    if isinstance(index_sampler, Resumable):
        return index_sampler, 1
    if type(index_sampler) is BatchSampler and isinstance(index_sampler.sampler, Resumable):
        return index_sampler.sampler, index_sampler.batch_size
    return None, 1
