"""Track the Trainer's position in a training loader, and start iterators at the position of an earlier run."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from lightning_ddp_ext.data.epochs import samplers_below
from lightning_ddp_ext.data.loader import batches_of, index_sampler_of, name_of, parameters_of
from lightning_ddp_ext.data.random_state import (
    generators_of,
    preserve_random_state,
    record_random_state,
    restore_random_state,
)
from lightning_ddp_ext.errors import ResumeError

FROM_THE_EPOCHS_START = 'pass DDPExtStrategy(resume_data="epoch") to repeat that epoch from its beginning'


@dataclass
class IteratorStart:
    """Where an iterator of a loader started. A loader combined with a longer one has several iterators in an epoch.

    Args:
        number: the number of earlier iterators in the epoch.
        after: the number of batches that the loader gave in the epoch before this iterator was created.
        at: the position at which it started; 0 at the beginning.
        random: the random states from which it drew numbers, recorded just before.
        own: the data that the resumed run saved only for this kind of loader.
        states: states of the loader, each with the number of batches drawn by then.
    """

    number: int = 0
    after: int = 0
    at: int = 0
    random: list[Any] = field(default_factory=list)
    own: Any = None
    states: list[tuple[int, Any]] = field(default_factory=list)


class LoaderPosition:
    """The Trainer's position in one training loader, which may be any iterable.

    In this class, the position is a number of batches, which a resumed run reads and drops. ``loader_kinds`` has a
    subclass for each quicker way.

    Args:
        loader: the loader to read.
        world_size: the number of ranks.
        remembered: how many iterators to remember, since a checkpoint may lag some batches behind.

    Attributes:
        name: the name of the data in errors.
        epoch: the current epoch.
        given: the number of batches that the Trainer got in this epoch, including those in the resumed run.
        generators: the generators of the loader and its samplers, besides the global ones.
    """

    kind = "batches"
    ahead = 0
    """The number of batches that are drawn before they are given, besides those prefetched by workers."""
    is_by_rank = False
    """Whether a rank can only continue from its own state, not from another rank's."""

    def __init__(self, loader: Any, *, world_size: int, remembered: int) -> None:
        self.loader = loader
        self._world_size = world_size
        self.name = name_of(loader)
        self._parameters = parameters_of(loader)  # read now, because a sampler may count epochs in its seed
        self.epoch = -1
        self.given = 0
        self.generators = generators_of(loader, *samplers_below(index_sampler_of(loader)))
        self._starts: deque[IteratorStart] = deque(maxlen=remembered)
        self._resumed: Mapping[str, Any] | None = None

    # Reading.

    def start_epoch(self, epoch: int, *, done: int = 0, state: Mapping[str, Any] | None = None) -> None:
        """Set the epoch of the next iterators.

        Args:
            epoch: the epoch.
            done: the number of its batches that are done, converted to the current number of ranks.
            state: the :meth:`state_dict` of the run to resume; ``None`` to start at the beginning.
        """
        self.epoch, self.given = epoch, done
        self._starts.clear()
        self._resumed = state
        self._has_to_end = state is not None and state["number"] > 0

    def start_iterator(self) -> Iterator[Any]:
        """Start the next iterator of the epoch.

        Raises:
            ResumeError: the data ends before the position.
        """
        if self._has_to_end:  # Lightning ends the epoch once it has seen the end of each loader, even a cycled one
            self._has_to_end = False
            return iter(())
        state, self._resumed = self._resumed, None
        if state is None:
            return self._start_at_beginning()
        batches = self._continue(state)
        if not state["number"]:
            return batches
        first = list(islice(batches, 1))
        return chain(first, batches) if first else self._start_at_beginning()  # a second end would end the epoch

    def _start_at_beginning(self) -> Iterator[Any]:
        start = IteratorStart(self._starts[-1].number + 1 if self._starts else 0, self.given)
        self._starts.append(start)
        return self._begin(start)

    def _continue(self, state: Mapping[str, Any]) -> Iterator[Any]:
        start = IteratorStart(state["number"], self.given, state["at"], state["random"] or [], state.get("own"))
        self._starts.append(start)
        with preserve_random_state(self.generators):  # the resumed run had already created this iterator
            return self._resume(start)

    def give(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield ``batches`` and count them in ``given``."""
        for batch in batches:
            self.given += 1
            yield batch

    # Saving.

    def starts(self) -> list[tuple[int, Any]]:
        """Return the number of each remembered iterator and the random states from which its order was drawn."""
        return [(start.number, start.random) for start in self._starts]

    def state_dict(self, done: int, given: int) -> dict[str, Any]:
        """Return this rank's position after ``done`` batches of the epoch.

        ``given`` is the value that the attribute had when the random states of the checkpoint were recorded.
        """
        start, batches = self._start_before(done)
        return {
            "epoch": self.epoch,
            "number": start.number,
            "at": self._position(start, batches),
            "data": self._description(),
            "random": start.random,
        }

    def _start_before(self, done: int) -> tuple[IteratorStart, int]:
        """Return the iterator that gave the epoch's ``done``-th batch, and its number of batches up to that one."""
        if not self._starts:
            return IteratorStart(), 0
        start = next((each for each in reversed(self._starts) if each.after < done), self._starts[0])
        return start, max(0, min(done, self.given) - start.after)

    # Resuming.

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise if the state belongs to different data or to an incompatible number of ranks.

        Raises:
            ResumeError: the error names the difference.
        """
        now = self._description()
        for name, was in state["data"].items():
            if was is not None and was != (has := now.get(name)):
                raise ResumeError(
                    f"epoch {state['epoch']} cannot be resumed in the middle: {self.name} had {name}={was!r} when the "
                    f"checkpoint was saved, and now has {has!r}; resume with the same loaders, data and number of "
                    f"ranks (ScalableDistributedSampler allows any number), or {FROM_THE_EPOCHS_START}"
                )

    def left_after(self, position: int) -> float:
        """Return the number of batches that this rank reads between a position and the end of the data."""
        return batches_of(self.loader) - position

    # Overridden for each kind of loader.

    def _begin(self, start: IteratorStart) -> Iterator[Any]:
        """Create an iterator over all data, and record the random states from which it draws."""
        self._record(start)
        return self._record_first(start, iter(self.loader))

    def _record_first(self, start: IteratorStart, batches: Iterator[Any]) -> Iterator[Any]:
        self._record(start)  # an __iter__ that is a generator function only draws for its first item
        yield from batches

    def _resume(self, start: IteratorStart) -> Iterator[Any]:
        """Create an iterator that continues at ``start``; the caller restores the random state."""
        return self._redraw(start, start.at)

    def _redraw(self, start: IteratorStart, dropped: int) -> Iterator[Any]:
        """Repeat an iterator of the resumed run with the same random numbers, and drop its first batches."""
        self._restore(start.random[:1])
        batches: Iterator[Any] = iter(self.loader)
        self._restore(start.random[1:])
        self._drop(batches, dropped)
        return batches

    def _record(self, start: IteratorStart) -> None:
        start.random.append(record_random_state(self.generators))

    def _restore(self, recorded: Sequence[Any]) -> None:
        for each in recorded:
            restore_random_state(each, self.generators)

    def _position(self, start: IteratorStart, batches: int) -> int:
        """Return the position that an iterator reaches after a number of batches."""
        return start.at + batches

    def _description(self) -> dict[str, Any]:
        """Return the properties that must be equal for a position to refer to the same batch."""
        dataset = getattr(self.loader, "dataset", None)
        samples = float("inf") if dataset is None else batches_of(dataset)
        return {"loader": self.kind, "ranks": self._world_size, "samples": samples, **self._parameters}

    def _drop(self, batches: Iterator[Any], number: int) -> None:
        dropped = sum(1 for _ in islice(batches, number))
        if dropped < number:
            raise ResumeError(
                f"epoch {self.epoch} cannot be resumed in the middle: {self.name} ends after {dropped} batches, but "
                f"{number} were done before; resume with the same data, or {FROM_THE_EPOCHS_START}"
            )
