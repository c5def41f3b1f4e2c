"""Track how far training is in one loader, and go on from there."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_ext.data.batch_sampler import SkippingSampler
from lightning_ddp_ext.data.loader import batches_of, index_sampler_of
from lightning_ddp_ext.data.random_state import RandomState, generator_states
from lightning_ddp_ext.data.streams import mix, with_wrapped
from lightning_ddp_ext.errors import ResumeError

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
    """How far the Trainer is in one training loader; a subclass for each way of entering one, see ``entering``.

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
        generators = generator_states(generators_of(self.loader))
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


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a loader and its samplers draw from, besides the global ones."""
    owners = [loader, *(with_wrapped(index_sampler_of(loader)) if isinstance(loader, DataLoader) else ())]
    found = [vars(owner).get("generator") for owner in owners if hasattr(owner, "__dict__")]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


def _words(data: list[int | None]) -> str:
    samples, batch_size = data
    return f"{'?' if samples is None else samples} samples in batches of {'?' if batch_size is None else batch_size}"
