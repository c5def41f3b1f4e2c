"""Track how far training is in one loader, and go on from there.

A loader can be entered in the middle of an epoch in one of four ways, from quick to slow: a sampler of ours begins at a
position of the global order, on any number of ranks; another sampler leaves out indices; a loader that keeps a state
of its own is given that state; and batches of everything else are read and dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar

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
from lightning_ddp_ext.data.random_state import RandomState, generator_states, kept, set_generators
from lightning_ddp_ext.data.resumable import Resumable
from lightning_ddp_ext.data.streams import mix, with_wrapped
from lightning_ddp_ext.errors import ResumeError, SamplerError

_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
FROM_THE_EPOCHS_START = 'pass DDPExtStrategy(resume_data="epoch") to go on from the beginning of that epoch'


@dataclass
class Pass:
    """One iterator of a loader; a loader that is combined with a longer one makes several in an epoch.

    Args:
        number: passes of the epoch before it.
        after: batches of the epoch that the loader gave before this iterator was made.
        start: where it began: a position in the global order, or a number of batches of this pass.
        drawn: batches that have been drawn from it, of a loader that keeps a state.
        has_ended: whether it was asked for another batch, and had none; of a loader that keeps a state.
        random: the random numbers from which its order was drawn.
        states: states that the loader has given, each with the number of batches that had been drawn by then.
    """

    number: int
    after: int
    start: int = 0
    drawn: int = 0
    has_ended: bool = False
    random: dict[str, Any] | None = None
    states: list[tuple[int, Any, bool]] = field(default_factory=list)


class LoaderPosition:
    """How far the Trainer is in one training loader; a subclass for each way of entering a loader.

    Args:
        loader: what is read.
        remembered: how many passes are remembered: a checkpoint may be of some batches ago.

    Attributes:
        epoch: the epoch that is read.
        given: batches of the epoch that the Trainer has been given, or that a resumed run was given before.
    """

    kind: ClassVar[str]

    def __init__(self, loader: Any, *, remembered: int) -> None:
        self.loader = loader
        self.epoch = -1
        self.given = 0
        self._passes: deque[Pass] = deque(maxlen=remembered)
        self._generator = torch.Generator()

    # Reading.

    def forget(self) -> None:
        """Let the next pass be the first one of its epoch."""
        self.epoch = -1

    def begin(self, epoch: int) -> Iterator[Any]:
        """Begin a pass of an epoch from its start."""
        if epoch != self.epoch:
            self.epoch, self.given = epoch, 0
            self._passes.clear()
        self._spare_global_generator(epoch)
        number = self._passes[-1].number + 1 if self._passes else 0
        new = Pass(number, self.given, random=self._take_random())
        self._passes.append(new)
        return self._iterate(new, epoch)

    def resume(
        self, epoch: int, done: int, state: Mapping[str, Any], own: Mapping[str, Any] | None, world_size: int
    ) -> Iterator[Any]:
        """Begin a pass of an epoch where another run left it.

        Args:
            epoch: the epoch that goes on.
            done: batches of the epoch that are done, counted on as many ranks as there are now.
            state: the other run's :meth:`state_dict`.
            own: this rank's :meth:`own_state_dict` of that run, if it is known.
            world_size: the number of ranks now.

        Raises:
            ResumeError: the data are others, or cannot be shared out among this number of ranks.
        """
        self.check(state, world_size)
        self._spare_global_generator(epoch)
        self.epoch, self.given = epoch, done
        new = Pass(state["number"], done, random=None if own is None else own.get("random"))
        self._passes.append(new)
        return self._enter(new, epoch, state, own)

    def _spare_global_generator(self, epoch: int) -> None:
        """Draw the seed of workers that persist from another generator, after the epoch in which they start.

        A run in which they do so draws no such number then; one that is resumed, or starts them anew, would draw one.
        """
        if epoch > 0 and getattr(self.loader, "persistent_workers", False):
            if self.loader.generator is None:
                self.loader.generator = self._generator
            self._generator.manual_seed(mix(torch.initial_seed() % 2**63, epoch))

    def give(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Count what the Trainer is given of these batches."""
        for batch in batches:
            self.given += 1
            yield batch

    # Saving.

    def state_dict(self, done: int, world_size: int) -> dict[str, Any]:
        """Return what all ranks have in common after ``done`` batches of the epoch."""
        which, batches = self._pass_at(done)
        return {
            "kind": self.kind,
            "epoch": self.epoch,
            "number": which.number,
            "world_size": world_size,
            "data": self._description(),
            "at": self._position(which, batches),
        }

    def own_state_dict(self, done: int, now: Any = None) -> dict[str, Any] | None:
        """Return what only this rank knows after ``done`` batches of the epoch.

        Args:
            done: batches of the epoch.
            now: the state that the loader itself gives now, if it keeps one.
        """
        return {"random": self._pass_at(done)[0].random}

    def _pass_at(self, done: int) -> tuple[Pass, int]:
        """The pass that a batch belongs to, and how many batches of this pass came until then.

        After the last batch of a pass that is the pass itself, and not the one that follows.
        """
        if not self._passes:
            return Pass(0, 0), 0
        which = next((each for each in reversed(self._passes) if each.after < done), self._passes[0])
        return which, max(0, min(done, self.given) - which.after)

    # What a resumed run does with it.

    def check(self, state: Mapping[str, Any], world_size: int) -> None:
        """Refuse the state of other data, or of another number of ranks that cannot share these.

        Raises:
            ResumeError: says what differs.
        """
        if state["kind"] != self.kind:
            raise ResumeError(
                f"the checkpoint is of the middle of an epoch over other training loaders than {self.name}; resume "
                f"with the same ones, or {FROM_THE_EPOCHS_START}"
            )
        if state["world_size"] != world_size:
            raise ResumeError(
                f"the rest of the epoch cannot be shared out: {self.name} gives each rank an order of its own, which "
                f"{state['world_size']} ranks have saved in the middle of epoch {state['epoch']}, and these are "
                f"{world_size}; resume with as many ranks, or from a checkpoint at the end of an epoch, with a sampler "
                f"such as ScalableDistributedSampler, or {FROM_THE_EPOCHS_START}"
            )
        if state["data"] is not None and state["data"] != self._description():
            raise ResumeError(
                f"the training data have changed in the middle of an epoch: {self.name} had {_words(state['data'])} "
                f"when the checkpoint was saved, and has {_words(self._description())}; resume with the same data, or "
                f"{FROM_THE_EPOCHS_START}"
            )

    @property
    def draws(self) -> bool:
        """Whether the order may be drawn from random numbers that a checkpoint has to tell."""
        return False

    def left_after(self, state: Mapping[str, Any], done: int) -> float:
        """Return how many batches this rank reads from a state to the end of the pass."""
        return batches_of(self.loader) - done

    def as_many_as(self, batches: int, state: Mapping[str, Any]) -> int:
        """Return how many batches now have the samples of so many batches then."""
        return batches

    def assume(self, done: int, world_size: int, *, cycles: bool) -> dict[str, Any]:
        """Return the state that a checkpoint would have that says nothing of its data, of as many ranks."""
        length = batches_of(self.loader)
        number = int((done - 1) // length) if cycles and done else 0
        rest = Pass(number, 0)
        at = self._position(rest, done - int(number * length) if number else done)
        state = {"kind": self.kind, "epoch": self.epoch, "number": number, "world_size": world_size}
        return {**state, "data": None, "at": at}

    # What each kind does in its own way.

    def _iterate(self, new: Pass, epoch: int) -> Iterator[Any]:
        return iter(self.loader)

    def _enter(self, new: Pass, epoch: int, state: Mapping[str, Any], own: Mapping[str, Any] | None) -> Iterator[Any]:
        raise NotImplementedError

    def _position(self, which: Pass, batches: int) -> Any:
        return which.start + batches

    def _description(self) -> list[int | None]:
        """Samples and batch size, as far as they are known."""
        dataset = getattr(self.loader, "dataset", None)
        samples = float("inf") if dataset is None else batches_of(dataset)
        return [None if samples == float("inf") else int(samples), getattr(self.loader, "batch_size", None)]

    def _take_random(self) -> dict[str, Any] | None:
        generators = generator_states(_generators_of(self.loader))
        return {"global": RandomState.take().to_dict(), "generators": generators}

    @property
    def name(self) -> str:
        """What an error calls the data."""
        if not isinstance(self.loader, DataLoader):
            return type(self.loader).__name__
        if isinstance(self.loader.dataset, IterableDataset):
            return type(self.loader.dataset).__name__
        sampler = index_sampler_of(self.loader)
        sampler = sampler.batch_sampler if isinstance(sampler, SkippingSampler) else sampler
        inner = getattr(sampler, "sampler", None)
        return type(sampler).__name__ + (f" over {type(inner).__name__}" if inner is not None else "")


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


def _generators_of(loader: Any) -> list[torch.Generator]:
    owners = [loader, *(with_wrapped(index_sampler_of(loader)) if isinstance(loader, DataLoader) else ())]
    found = [vars(owner).get("generator") for owner in owners if hasattr(owner, "__dict__")]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


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
        set_generators(_generators_of(loader), random["generators"])
        if draw_seed:
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        yield


def _words(data: list[int | None]) -> str:
    samples, batch_size = data
    return f"{'?' if samples is None else samples} samples in batches of {'?' if batch_size is None else batch_size}"
