"""Draw the seed of a loader's workers when torch would, for an iterator that starts later.

Torch draws a seed for each iterator, except for one whose workers have persisted since
an earlier iterator. :class:`SeededFor` is the state of workers that persist:

================  ====================  ===================  ====================
Event             From                  Effect               To
================  ====================  ===================  ====================
the resumed run   any state             none                 ``RESUMED_RUN``
had seeded them
an iterator is    ``NOTHING``           a seed is drawn      ``LATEST_ITERATOR``
created
the same          ``RESUMED_RUN``       the new workers get  ``EARLIER_ITERATOR``
                                        a seed, but none is
                                        drawn
the same          ``LATEST_ITERATOR``   none                 ``EARLIER_ITERATOR``
                  ``EARLIER_ITERATOR``
================  ====================  ===================  ====================
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

import torch

from lightning_ddp_ext.data.loader_properties import iterates_as_torch


class UnsentGenerator(torch.Generator):
    """A generator of which another process gets a new one.

    A spawned worker gets it with the loader, if the user's objects refer to the
    Trainer. Torch could not send its state.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return UnsentGenerator, ()


class SeededFor(Enum):
    """What a loader's persistent workers were seeded for; see the module's table.

    Workers that do not persist are always seeded for ``NOTHING``, because each iterator
    has new ones.
    """

    NOTHING = auto()
    RESUMED_RUN = auto()
    LATEST_ITERATOR = auto()
    EARLIER_ITERATOR = auto()


class WorkerSeed:
    """The seed of the workers of a loader's latest iterator.

    Args:
        loader: the loader; any iterable. Nothing is drawn unless it is a ``DataLoader``
            that draws the seed itself, on the CPU.

    Attributes:
        generator: the generator from which the iterator draws the seed when it starts,
            in :func:`workers_seeded_by`.
    """

    def __init__(self, loader: Any) -> None:
        self.generator = UnsentGenerator()
        self._loader = loader
        # Where torch would draw the seed; ``None`` stands for its global generator.
        self._source: torch.Generator | None = None
        self._seeded_for = SeededFor.NOTHING

    def mark_seeded_in_resumed_run(self) -> None:
        """Record that the run that is resumed had seeded workers, if they persist."""
        if getattr(self._loader, "persistent_workers", False):
            self._seeded_for = SeededFor.RESUMED_RUN

    def was_seeded(self, *, before_latest: bool) -> bool:
        """Whether workers persist and have been seeded.

        With ``before_latest``, only if that was before the latest iterator.
        """
        if before_latest and self._seeded_for is SeededFor.LATEST_ITERATOR:
            return False
        return self._seeded_for is not SeededFor.NOTHING

    def draw(self, *, was_drawn: bool) -> None:
        """Draw the seed of a new iterator, unless its workers have been seeded.

        Args:
            was_drawn: whether the run that is resumed had drawn it. The generator from
                which it is drawn then stays as it is.
        """
        if not _draws_seed_on_cpu(self._loader):
            return
        if self._loader.generator is not self.generator:  # as it is in `workers_seeded_by`
            self._source = self._loader.generator
        is_first = self._seeded_for is SeededFor.NOTHING
        if is_first or self._seeded_for is SeededFor.RESUMED_RUN:
            self._take_seed(advance=is_first and not was_drawn)
        if self._loader.persistent_workers:
            self._seeded_for = SeededFor.LATEST_ITERATOR if is_first else SeededFor.EARLIER_ITERATOR

    def repeat_global_draw(self) -> None:
        """Draw the latest iterator's seed again, if it came from torch's global generator.

        Call this after the state of that generator was restored.
        """
        has_drawn = self._seeded_for is not SeededFor.EARLIER_ITERATOR
        if has_drawn and self._source is None and _draws_seed_on_cpu(self._loader):
            self._take_seed(advance=True)

    def _take_seed(self, *, advance: bool) -> None:
        """Let ``generator`` draw the next seed of the source, and advance the source."""
        source = self._source or torch.default_generator
        self.generator.set_state(source.get_state())
        if advance:
            torch.empty((), dtype=torch.int64).random_(generator=source)


@contextmanager
def workers_seeded_by(loader: Any, generator: torch.Generator) -> Iterator[None]:
    """Make an iterator of a loader draw its workers' seed from a generator.

    The iterator is created in the block. Nothing changes for a loader that draws no
    seed, or draws it on a GPU.
    """
    if not _draws_seed_on_cpu(loader):
        yield
        return
    users_generator = loader.generator
    loader.generator = generator
    try:
        yield
    finally:
        loader.generator = users_generator


def _draws_seed_on_cpu(loader: Any) -> bool:
    """Whether a loader's iterator draws a seed as torch does, and on the CPU."""
    if not iterates_as_torch(loader):
        return False
    generator = loader.generator
    has_cpu_generator = generator is None or generator.device.type == "cpu"
    return has_cpu_generator and torch.get_default_device().type == "cpu"
