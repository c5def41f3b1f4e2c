"""Enter a loader in the middle of an epoch, in the quickest way that it allows.

There are four, from quick to slow: a sampler of ours begins at a position of the global order, on any number of ranks;
another sampler leaves out indices; a loader that keeps a state of its own is given that state; and batches of
everything else are read and dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
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
from lightning_ddp_ext.data.position import FROM_THE_EPOCHS_START, LoaderPosition, Pass, generators_of
from lightning_ddp_ext.data.random_state import RandomState, kept, set_generators
from lightning_ddp_ext.data.resumable import Resumable
from lightning_ddp_ext.data.streams import with_wrapped
from lightning_ddp_ext.errors import ResumeError, SamplerError

_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class OrderPosition(LoaderPosition):
    """Of a loader that reads a sampler of ours: a position in the global order, good for any number of ranks."""

    kind = "order"

    def __init__(self, loader: Any, sampler: Resumable, unit: int, *, remembered: int) -> None:
        super().__init__(loader, remembered=remembered)
        self._sampler = sampler
        self._unit = unit  # items of the sampler in a batch

    @override
    def _iterate(self, new: Pass, epoch: int) -> Iterator[Any]:
        self._sampler.resume_at(epoch, 0)
        return iter(self.loader)

    @override
    def _enter(self, new: Pass, epoch: int, state: Mapping[str, Any], own: Mapping[str, Any] | None) -> Iterator[Any]:
        self._load(state)
        self._sampler.resume_at(epoch, self._sampler.position)
        new.start = self._sampler.position
        return iter(self.loader)

    @override
    def _position(self, which: Pass, batches: int) -> dict[str, Any]:
        share = replace(self._sampler.share(), start=which.start)
        position = share.position_after(batches * self._unit)
        return {**self._sampler.state_dict(0), "epoch": max(self.epoch, 0), "position": position}

    @override
    def check(self, state: Mapping[str, Any], world_size: int) -> None:
        super().check({**state, "world_size": world_size, "data": None}, world_size)
        self._load(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        try:
            self._sampler.load_state_dict(state["at"])
        except SamplerError as error:
            raise ResumeError(
                f"the checkpoint is of the middle of an epoch over other data: {error}; or {FROM_THE_EPOCHS_START}"
            ) from error

    @override
    def left_after(self, state: Mapping[str, Any], done: int) -> float:
        self._load(state)
        left = self._sampler.left
        is_cut = getattr(index_sampler_of(self.loader), "drop_last", False)
        return left // self._unit if is_cut else -(-left // self._unit)

    @override
    def as_many_as(self, batches: int, state: Mapping[str, Any]) -> int:
        samples: int = state["samples"]
        return -(-batches * samples // self._samples)

    @override
    def state_dict(self, done: int, world_size: int) -> dict[str, Any]:
        return {**super().state_dict(done, world_size), "samples": self._samples}

    @property
    def _samples(self) -> int:
        """Items of the global order in a batch on each rank."""
        return self._unit * self._sampler.num_replicas

    @override
    def own_state_dict(self, done: int, now: Any = None) -> None:
        return None

    @override
    def _take_random(self) -> None:
        return None


class IndexPosition(LoaderPosition):
    """Of a loader that reads some other sampler with a length: its indices are left out, and no sample is read."""

    kind = "indices"

    def __init__(self, loader: Any, *, remembered: int) -> None:
        super().__init__(loader, remembered=remembered)
        self._skipping = SkippingSampler(index_sampler_of(loader))
        set_index_sampler(loader, self._skipping)

    @property
    @override
    def draws(self) -> bool:
        return any(isinstance(each, _DRAWING) for each in with_wrapped(self._skipping))

    @override
    def _iterate(self, new: Pass, epoch: int) -> Iterator[Any]:
        self._skipping.begin()
        return iter(self.loader)

    @override
    def _enter(self, new: Pass, epoch: int, state: Mapping[str, Any], own: Mapping[str, Any] | None) -> Iterator[Any]:
        new.start = state["at"]
        self._skipping.begin(skip=new.start, generators=lambda: _as_then(self.loader, new.random, draw_seed=True))
        return iter(self.loader)


class BatchPosition(LoaderPosition):
    """Of anything that can be iterated over: batches are read and dropped."""

    kind = "batches"

    @override
    def _enter(self, new: Pass, epoch: int, state: Mapping[str, Any], own: Mapping[str, Any] | None) -> Iterator[Any]:
        new.start = state["at"]
        with _as_then(self.loader, new.random):
            batches: Iterator[Any] = iter(self.loader)
            self._drop(batches, new.start)
        return batches

    def _drop(self, batches: Iterator[Any], number: int) -> None:
        dropped = sum(1 for _ in islice(batches, number))
        if dropped < number:
            raise ResumeError(
                f"the training data have changed in the middle of an epoch: {self.name} ends after {dropped} batches, "
                f"and {number} were done; resume with the same data, or {FROM_THE_EPOCHS_START}"
            )


class StatePosition(BatchPosition):
    """Of a loader that keeps a state of its own, which is asked for when a checkpoint is saved.

    By then more batches may have been drawn than are done. So a checkpoint has an earlier state, and says how many
    batches to drop after it.
    """

    kind = "state"

    @override
    def _iterate(self, new: Pass, epoch: int) -> Iterator[Any]:
        return _count_drawn(new, iter(self.loader))

    @override
    def own_state_dict(self, done: int, now: Any = None) -> dict[str, Any]:
        which, batches = self._pass_at(done)
        latest = self._passes[-1] if self._passes else which
        if now is not None:
            latest.states.append((latest.drawn, now, latest.has_ended))
        known = [each for each in which.states if each[0] <= batches]
        drawn, state, has_ended = known[-1] if known else (-which.start, None, False)
        which.states = [each for each in which.states if each[0] >= drawn]  # no later checkpoint is of a batch before
        return {"random": which.random, "state": state, "dropped": batches - drawn, "has_ended": has_ended}

    @override
    def _enter(self, new: Pass, epoch: int, state: Mapping[str, Any], own: Mapping[str, Any] | None) -> Iterator[Any]:
        if own is None:  # Lightning has given the loader rank 0's state
            return self._iterate(new, epoch)
        if own["state"] is None:
            new.start = own["dropped"]
        else:
            self.loader.load_state_dict(own["state"])
            new.has_ended = own.get("has_ended", False)
            new.states = [(-own["dropped"], own["state"], new.has_ended)]
        if new.has_ended:
            # From the state of its end, some loaders begin anew, and others have to be told that nothing is left.
            if any(True for _ in islice(self.loader, 1)):
                self.loader.load_state_dict(own["state"])
            return iter(())
        with _as_then(self.loader, new.random if own["state"] is None else None):
            batches: Iterator[Any] = iter(self.loader)
            self._drop(batches, own["dropped"])
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


def position_of(loader: Any, *, remembered: int) -> LoaderPosition:
    """Choose the quickest way of entering a loader in the middle of an epoch.

    Args:
        loader: a loader of our own, whose index sampler may be replaced.
        remembered: see :class:`LoaderPosition`.
    """
    if is_stateful(loader):
        return StatePosition(loader, remembered=remembered)
    if not _reads_indices(loader):
        return BatchPosition(loader, remembered=remembered)
    sampler, unit = _resumable(index_sampler_of(loader))
    if sampler is not None:
        return OrderPosition(loader, sampler, unit, remembered=remembered)
    return IndexPosition(loader, remembered=remembered)


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


@contextmanager
def _as_then(loader: Any, random: Mapping[str, Any] | None, *, draw_seed: bool = False) -> Iterator[None]:
    """Set the generators as they were when a pass began; afterwards the global ones are as they were before.

    Args:
        loader: whose generators are set, too.
        random: what they were; ``None`` if nobody knows.
        draw_seed: whether a number is drawn that a loader has drawn before it asks its sampler: the workers' seed.
    """
    if random is None:
        yield
        return
    with kept():
        RandomState.from_dict(random["global"]).restore()
        set_generators(generators_of(loader), random["generators"])
        if draw_seed:
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        yield
