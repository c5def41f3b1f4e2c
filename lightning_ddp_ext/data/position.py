"""Track how far the Trainer has read one training loader, and begin a pass where another run left it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch

from lightning_ddp_ext.data.loader import batches_of, generators_of, name_of
from lightning_ddp_ext.data.random_state import keep_random, restore_random, take_random
from lightning_ddp_ext.data.streams import mix
from lightning_ddp_ext.errors import ResumeError

FROM_THE_EPOCHS_START = 'pass DDPExtStrategy(resume_data="epoch") to go on from the beginning of that epoch'


@dataclass
class Pass:
    """One iterator of a loader; a loader that is combined with a longer one makes several in an epoch.

    Args:
        number: passes of the epoch before it.
        after: batches of the epoch that the loader gave before this iterator was made.
        start: the position at which it began; 0 at the beginning.
        random: the random numbers from which its order was drawn.
        drawn: batches that have been drawn from it; this and what follows, of a loader that keeps a state.
        has_ended: whether it was asked for another batch, and had none.
        states: states that the loader has given, each with the number of batches that had been drawn by then.
    """

    number: int = 0
    after: int = 0
    start: int = 0
    random: dict[str, Any] | None = None
    drawn: int = 0
    has_ended: bool = False
    states: list[tuple[int, Any]] = field(default_factory=list)


class LoaderPosition:
    """How far the Trainer is in one training loader: anything that can be iterated over.

    A position within a pass is a number of batches, which a resumed run reads and drops. ``entering`` has a subclass
    for each quicker way.

    Args:
        loader: what is read.
        world_size: the number of ranks.
        remembered: how many passes are remembered: a checkpoint may be of some batches ago.

    Attributes:
        name: what an error calls the data.
        epoch: the epoch that is read.
        given: batches of the epoch that the Trainer has been given, or that a resumed run was given before.
    """

    kind = "batches"
    needs_own_state = False
    """Whether a state alone does not say what is read next, without this rank's own."""

    def __init__(self, loader: Any, *, world_size: int, remembered: int) -> None:
        self.loader = loader
        self._world_size = world_size
        self.name = name_of(loader)
        self.epoch = -1
        self.given = 0
        self._passes: deque[Pass] = deque(maxlen=remembered)
        self._state: Mapping[str, Any] | None = None
        self._own: Mapping[str, Any] | None = None
        self._has_to_end = False
        self._generator = torch.Generator()

    # Reading.

    def start_epoch(
        self,
        epoch: int,
        *,
        done: int = 0,
        state: Mapping[str, Any] | None = None,
        own: Mapping[str, Any] | None = None,
    ) -> None:
        """Have the next passes be those of an epoch.

        Args:
            epoch: the epoch.
            done: batches of it that were done before, counted on as many ranks as there are now.
            state: the :meth:`state_dict` of the run that left it there; ``None`` to begin at the start.
            own: this rank's :meth:`own_state_dict` of that run, if it is known.
        """
        self.epoch, self.given = epoch, done
        self._passes.clear()
        self._state, self._own = state, own
        self._has_to_end = state is not None and state["number"] > 0

    def begin(self) -> Iterator[Any]:
        """Begin the next pass of the epoch.

        Raises:
            ResumeError: the data end before the batches that were done.
        """
        if self._has_to_end:  # Lightning ends the epoch once it has seen the end of each loader, also of a cycled one
            self._has_to_end = False
            return iter(())
        self._spare_global_generator()
        state, self._state = self._state, None
        if state is None:
            return self._begin_at_start()
        batches = self._go_on(state, self._own)
        if not state["number"]:
            return batches
        first = list(islice(batches, 1))
        return chain(first, batches) if first else self._begin_at_start()  # a second end would be that of the epoch

    def _begin_at_start(self) -> Iterator[Any]:
        number = self._passes[-1].number + 1 if self._passes else 0
        self._passes.append(Pass(number, self.given, random=self._take_random()))
        return self._iterate(self._passes[-1], None)

    def _go_on(self, state: Mapping[str, Any], own: Mapping[str, Any] | None) -> Iterator[Any]:
        random = None if own is None else own["random"]
        self._passes.append(Pass(state["number"], self.given, start=state["at"], random=random))
        with keep_random():  # the run that is resumed had this iterator already, and drew nothing here
            return self._iterate(self._passes[-1], own)

    def _spare_global_generator(self) -> None:
        """Draw the seed of workers that persist from another generator, after the epoch in which they start.

        A run in which they do so draws no such number then; one that is resumed, or starts them anew, would draw one.
        """
        if self.epoch > 0 and getattr(self.loader, "persistent_workers", False):
            if self.loader.generator is None:
                self.loader.generator = self._generator
            self._generator.manual_seed(mix(torch.initial_seed() % 2**63, self.epoch))

    def give(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Count what the Trainer is given of these batches."""
        for batch in batches:
            self.given += 1
            yield batch

    # Saving.

    def state_dict(self, done: int) -> dict[str, Any]:
        """Return what all ranks have in common after ``done`` batches of the epoch."""
        return self._state_of(*self._pass_at(done))

    def own_state_dict(self, done: int) -> dict[str, Any]:
        """Return what only this rank knows after ``done`` batches of the epoch."""
        return {"random": self._pass_at(done)[0].random}

    def assumed_state(self, done: int) -> dict[str, Any]:
        """Return what a checkpoint would have that says nothing of its data, after ``done`` batches of the epoch."""
        length = batches_of(self.loader)
        number = (done - 1) // int(length) if done and 0 < length < float("inf") else 0
        return self._state_of(Pass(number), done - number * int(length) if number else done)

    def _state_of(self, which: Pass, batches: int) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "number": which.number,
            "data": self._description(),
            "at": self._position(which, batches),
        }

    def _pass_at(self, done: int) -> tuple[Pass, int]:
        """The pass that a batch belongs to, and how many batches of this pass came until then.

        After the last batch of a pass that is the pass itself, and not the one that follows.
        """
        if not self._passes:
            return Pass(), 0
        which = next((each for each in reversed(self._passes) if each.after < done), self._passes[0])
        return which, max(0, min(done, self.given) - which.after)

    # What a resumed run asks.

    def check(self, state: Mapping[str, Any]) -> None:
        """Refuse the state of other data, or of another number of ranks that cannot share these.

        Raises:
            ResumeError: says what differs.
        """
        then, now = state["data"], self._description()
        for name in {**now, **then}:
            was, has = then.get(name), now.get(name)
            if was != has:
                raise ResumeError(
                    f"epoch {state['epoch']} cannot go on in its middle: {self.name} had {name}={was!r} when the "
                    f"checkpoint was saved, and has {has!r}; resume with the same loaders, data and number of ranks "
                    f"(any number with a sampler such as ScalableDistributedSampler), or {FROM_THE_EPOCHS_START}"
                )

    def left_after(self, position: int) -> float:
        """Return how many batches this rank reads from a position to the end of the pass."""
        return batches_of(self.loader) - position

    # What each way of entering a loader does otherwise.

    def _iterate(self, new: Pass, own: Mapping[str, Any] | None) -> Iterator[Any]:
        """Make the iterator of a pass, from its ``start`` on."""
        with self._as_then(new):
            batches: Iterator[Any] = iter(self.loader)
            self._drop(batches, new.start)
        return batches

    def _position(self, which: Pass, batches: int) -> int:
        """The position that a pass has after so many batches."""
        return which.start + batches

    def _description(self) -> dict[str, Any]:
        """What must be the same for a position to be the same place."""
        dataset = getattr(self.loader, "dataset", None)
        samples = float("inf") if dataset is None else batches_of(dataset)
        batch_size = getattr(self.loader, "batch_size", None)
        return {"loader": self.kind, "ranks": self._world_size, "samples": samples, "batch_size": batch_size}

    def _take_random(self) -> dict[str, Any] | None:
        return take_random(generators=generators_of(self.loader))

    # What they share.

    def _drop(self, batches: Iterator[Any], number: int) -> None:
        dropped = sum(1 for _ in islice(batches, number))
        if dropped < number:
            raise ResumeError(
                f"epoch {self.epoch} cannot go on in its middle: {self.name} ends after {dropped} batches, and "
                f"{number} were done; resume with the same data, or {FROM_THE_EPOCHS_START}"
            )

    @contextmanager
    def _as_then(self, which: Pass) -> Iterator[None]:
        """Set the generators as they were when a pass began that goes on; the global ones are restored afterwards."""
        if not which.start or which.random is None:
            yield
            return
        with keep_random():
            restore_random(which.random, generators=generators_of(self.loader))
            yield
