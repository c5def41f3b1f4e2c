"""Track the position in a training loader, and continue from a saved position.

1. ``start_epoch`` sets the beginning of an epoch. In a resumed epoch ``check`` compares
   the data with those of the saved position, and ``continue_epoch`` draws again what
   the saving run, which saved the position, had drawn before it.
2. ``start_iterator`` starts an iterator there, and ``give`` counts its batches. A loader
   that is combined with a longer one has several iterators in an epoch.
3. ``state_dict`` returns the position after any of the latest batches.

The subclasses in ``loader_kinds`` differ in how they start an iterator, and in the unit
of the position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, NamedTuple

from lightning_ddp_ext.data.epochs import all_below
from lightning_ddp_ext.data.even_batches import AHEAD
from lightning_ddp_ext.data.fingerprints import Trace, checksum_of_batch
from lightning_ddp_ext.data.loader_properties import (
    length_or_inf,
    name_of,
    parameters_of,
)
from lightning_ddp_ext.data.random_state import (
    generators_of,
    preserve_random_state,
    record_random_state,
    restore_random_state,
)
from lightning_ddp_ext.errors import ResumeError

FROM_THE_EPOCHS_START = (
    'pass DDPExtStrategy(resume_data="epoch") to repeat that epoch from its beginning'
)


class LoaderState(NamedTuple):
    """A state that a loader returned.

    Attributes:
        batches: the number of batches that its iterator had drawn; negative before the
            position at which the iterator started.
        content: the state; ``None`` for the beginning of the epoch.
        fingerprint: the fingerprint of the batches drawn; ``None`` if unknown.
    """

    batches: int
    content: Any
    fingerprint: int | None


@dataclass
class IteratorStart:
    """Where an iterator of a loader started.

    A loader combined with a longer one has several iterators in an epoch.

    Args:
        number: the number of earlier iterators in the epoch.
        batches_before: the number of batches that the loader gave in the epoch before
            this iterator was created or resumed.
        position: where it started; 0 at the beginning.
        ahead: the number of batches that the saving run had drawn after this position.
        random_states: the random states from which it drew its order. If the loader
            itself draws, the first one was recorded before ``iter(loader)`` and the
            second one before the first batch.
        saved_state: what the position's class added to ``state_dict`` in the saving run.
        trace: the fingerprints of what was drawn.
        batch_size: the batch size then, if the position counts samples; ``None`` before
            the order is drawn.
        loader_states: the states that the loader returned and a checkpoint may need.
    """

    number: int = 0
    batches_before: int = 0
    position: int = 0
    ahead: int = 0
    random_states: list[Any] = field(default_factory=list)
    saved_state: Any = None
    trace: Trace = field(default_factory=Trace)
    batch_size: int | None = None
    loader_states: list[LoaderState] = field(default_factory=list)


class LoaderPosition:
    """The Trainer's position in one training loader, which may be any iterable.

    In this class, the position is a number of batches, which a resuming run reads
    and drops. ``loader_kinds`` has a subclass for each quicker way.

    Args:
        loader: the loader to read.
        world_size: the number of ranks.
        remembered: how many iterators to remember, since a checkpoint may lag some
            batches behind.

    Attributes:
        name: the name of the data in errors.
        epoch: the current epoch.
        batches_given: the number of batches that the Trainer got in this epoch,
            including those in the saving run.
        generators: the generators that are attributes of the loader, its samplers, its
            ``collate_fn`` or the datasets in it, besides the global ones.
        on_progress: called for each batch that is read again.
    """

    kind = "batches"
    taken_ahead = 0
    """The number of batches that are taken from an iterator before they are given."""
    prefetched = 0
    """The number of batches whose indices are drawn ahead for workers."""
    is_by_rank = False
    """Whether a rank can only continue from its own state, not from another rank's."""

    def __init__(self, loader: Any, *, world_size: int, remembered: int) -> None:
        self.loader = loader
        self._world_size = world_size
        self.name = name_of(loader)
        self.read_parameters()
        self.epoch = -1
        self.batches_given = 0
        collate = getattr(loader, "collate_fn", None)
        collator = getattr(collate, "__self__", collate)  # of a bound method
        self.generators = generators_of(*all_below(loader), collator)
        self.on_progress: Callable[[], object] = lambda: None
        self._remembered = remembered
        self._starts: deque[IteratorStart] = deque(maxlen=remembered)
        # Functions that start the next iterators of a resumed epoch; later ones start at the
        # beginning.
        self._resumed_starts = deque[Callable[[], Iterator[Any]]]()

    def read_parameters(self) -> None:
        """Read the loader's parameters, before an epoch; a sampler may count in its seed."""
        self._parameters = parameters_of(self.loader)

    # Reading.

    def start_epoch(self, epoch: int) -> None:
        """Make the next iterators start at the beginning of an epoch."""
        self.epoch = epoch
        self.batches_given = 0
        self._starts.clear()
        self._resumed_starts.clear()

    def continue_epoch(self, epoch: int, state: Mapping[str, Any], *, done: int) -> bool:
        """Make the next iterators continue where another run was.

        Return whether that run drew the same items.

        Args:
            epoch: the epoch.
            state: the :meth:`state_dict` of that run.
            done: the number of its batches in this epoch, converted to the current
                number of ranks.

        Raises:
            ResumeError: the data ends before the position.
        """
        self.start_epoch(epoch)
        if epoch > 0 and isinstance(self.loader, Iterator):
            # It cannot be read again, and the part that was read before is unknown.
            return False
        self.batches_given = done
        start = IteratorStart(
            number=state["number"],
            batches_before=done,
            position=state["at"],
            ahead=state["ahead"],
            random_states=state["random"] or [],
            saved_state=state.get("own"),
            trace=self._trace(),
        )
        self._starts.append(start)
        with preserve_random_state(self.generators):
            # The saving run had already created this iterator.
            start_rest = self._redraw(start)
        if start.number > 0:
            # With `max_size_cycle`, a short loader starts again whenever it ends, and Lightning
            # ends the epoch when every loader has ended, as this loader had in the saving run.
            self._resumed_starts.append(lambda: iter(()))
        self._resumed_starts.append(start_rest)
        return state["drawn"] in (None, self._drawn_by(start, start.position + start.ahead))

    def continues(self) -> bool:
        """Whether the next iterator continues where another run was."""
        return bool(self._resumed_starts)

    def start_iterator(self, draw_seed: Callable[[], object]) -> Iterator[Any]:
        """Start the next iterator of the epoch.

        ``draw_seed`` is called if a whole iterator replaces the rest of a resumed one,
        because that rest is empty.
        """
        if not self._resumed_starts:
            return self._start_at_beginning()
        start_rest = self._resumed_starts.popleft()
        with preserve_random_state(self.generators):
            rest = start_rest()
        is_last_rest = not self._resumed_starts
        had_ended_before = self._starts[-1].number > 0
        if not (is_last_rest and had_ended_before):
            return rest
        # An empty rest would be a second end, and would end the epoch.
        first_batch = list(islice(rest, 1))
        if first_batch:
            return chain(first_batch, rest)
        draw_seed()
        return self._start_at_beginning()

    def _start_at_beginning(self) -> Iterator[Any]:
        number = self._starts[-1].number + 1 if self._starts else 0
        start = IteratorStart(number, self.batches_given, trace=self._trace())
        self._starts.append(start)
        return self._begin(start)

    def give(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield ``batches`` and count them in ``batches_given``."""
        for batch in batches:
            self.batches_given += 1
            yield batch

    # Saving.

    def random_states_of_starts(self) -> dict[int, Any]:
        """Return the random states from which each remembered iterator drew its order.

        The keys are the numbers of earlier iterators in the epoch.
        """
        return {start.number: start.random_states for start in self._starts}

    def state_dict(self, done: int, given_when_recorded: int) -> dict[str, Any]:
        """Return this rank's position after ``done`` batches of the epoch.

        ``given_when_recorded`` is the value that ``batches_given`` had when the random
        states of the checkpoint were recorded. A subclass may add ``own``, the
        ``saved_state`` of a resuming run's :class:`IteratorStart`.

        ==========  ================================================================
        ``epoch``   the epoch
        ``number``  the number of earlier iterators in the epoch
        ``at``      the position of the iterator; its unit depends on the class
        ``ahead``   the number of batches that were drawn after it by then
        ``data``    the properties that give the position its meaning
        ``drawn``   the fingerprint of all that was drawn by then; ``None`` if unknown
        ``random``  the random states from which the iterator drew
        ==========  ================================================================
        """
        start, batches = self._start_before(done)
        batches_until = start.batches_before + batches
        # The random states may be older, for example if the first loader is exhausted.
        is_older = given_when_recorded < batches_until
        given = self.batches_given if is_older else given_when_recorded
        ahead = given + self.taken_ahead + self.prefetched - batches_until
        return {
            "epoch": self.epoch,
            "number": start.number,
            "at": self._position(start, batches),
            "ahead": ahead,
            "data": self._description(),
            "drawn": self._drawn_by(start, start.position + batches + ahead),
            "random": start.random_states,
        }

    def _start_before(self, done: int) -> tuple[IteratorStart, int]:
        """Find the iterator that gave the ``done``-th batch, or the last one given.

        Return its start, and how many batches it gave up to that batch.
        """
        if not self._starts:
            return IteratorStart(), 0
        earlier = [start for start in self._starts if start.batches_before < done]
        start = earlier[-1] if earlier else self._starts[0]
        return start, max(0, min(done, self.batches_given) - start.batches_before)

    # Resuming.

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise if the state does not fit the loader's data and number of ranks.

        Raises:
            ResumeError: the error names the difference.
        """
        now = self._description()
        for name, saved in state["data"].items():
            current = now.get(name)
            if saved is not None and saved != current:
                raise ResumeError(
                    f"epoch {state['epoch']} cannot be resumed in the middle: {self.name} had"
                    f" {name}={saved!r} when the checkpoint was saved, and now has {current!r};"
                    " resume with the same loaders, data and number of ranks"
                    " (ScalableDistributedSampler allows any number), or"
                    f" {FROM_THE_EPOCHS_START}"
                )

    def shared(self) -> dict[str, Any]:
        """Return the properties that must be equal on all ranks, by name."""
        return {}

    def left_after(self, position: int) -> float:
        """Return how many batches this rank reads from a position to the end."""
        return length_or_inf(self.loader) - position

    # The way to read, which subclasses override.

    def _begin(self, start: IteratorStart) -> Iterator[Any]:
        """Create an iterator over all data, and record its random states."""
        self._record(start)
        return self._record_first(start, iter(self.loader))

    def _redraw(self, start: IteratorStart) -> Callable[[], Iterator[Any]]:
        """Draw the items before ``start`` again, and return a function for the rest.

        The function starts the rest of the iterator. The caller restores the random
        state.
        """
        batches = self._draw_ahead(start, self._read_again(start, start.position))
        return lambda: batches

    def _position(self, start: IteratorStart, batches: int) -> int:
        """Return the position that an iterator reaches after a number of batches."""
        return start.position + batches

    def _drawn_by(self, start: IteratorStart, position: int) -> int | None:
        """Return the fingerprint of the items that an iterator drew.

        It covers all items up to a position, and is ``None`` if it is unknown.
        """
        return start.trace.fingerprint_after(position)

    def _description(self) -> dict[str, Any]:
        """Return the properties that give a position its meaning.

        A state is only valid for a loader in which they are equal.
        """
        dataset = getattr(self.loader, "dataset", None)
        samples = float("inf") if dataset is None else length_or_inf(dataset)
        return {
            "loader": self.kind,
            "ranks": self._world_size,
            "samples": samples,
            **self._parameters,
        }

    # Helpers.

    def _record_first(self, start: IteratorStart, batches: Iterator[Any]) -> Iterator[Any]:
        # An __iter__ that is a generator function only draws for its first item.
        self._record(start)
        yield from start.trace.follow(batches, checksum_of_batch)

    def _trace(self) -> Trace:
        return Trace(self._remembered + AHEAD + self.prefetched)

    def _read_again(self, start: IteratorStart, dropped: int) -> Iterator[Any]:
        """Repeat an iterator of the saving run, and drop its first batches.

        It draws the same random numbers.
        """
        before_iterator = start.random_states[:1]
        before_first_batch = start.random_states[1:]
        self._restore(before_iterator)
        read = iter(self.loader)
        self._restore(before_first_batch)
        batches = start.trace.follow(read, checksum_of_batch)
        self._drop(batches, dropped)
        return batches

    def _draw_ahead(self, start: IteratorStart, items: Iterator[Any]) -> Iterator[Any]:
        """Draw the items that the saving run had drawn ahead, and return them with the rest.

        The saving run recorded its random states before it drew the rest.
        """
        return chain(list(islice(items, start.ahead)), items)

    def _record(self, start: IteratorStart) -> None:
        start.random_states.append(record_random_state(self.generators))

    def _restore(self, recorded: Sequence[Any]) -> None:
        for states in recorded:
            restore_random_state(states, self.generators)

    def _drop(self, batches: Iterator[Any], number: int) -> None:
        for dropped in range(number):
            try:
                next(batches)
            except StopIteration:
                raise ResumeError(
                    f"epoch {self.epoch} cannot be resumed in the middle: {self.name} ends after"
                    f" {dropped} batches, but {number} were done before; resume with the same data,"
                    f" or {FROM_THE_EPOCHS_START}"
                ) from None
            self.on_progress()
