"""Draw the seed of a loader's workers when torch would, for an iterator that starts later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_ddp_ext.data.loader_properties import iterates_as_torch


class Seeds(torch.Generator):
    """A generator of workers' seeds.

    A spawned worker gets an empty one with the loader, if the user's objects refer to
    the Trainer. Torch could not send the state of a generator.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return Seeds, ()


class Seeded(Enum):
    """When the persistent workers of a loader were seeded, which happens once.

    Workers that do not persist are always ``NEVER`` seeded, because each iterator has
    new ones.
    """

    NEVER = auto()
    IN_RESUMED_RUN = auto()  # New workers of this run get a seed, but nothing is drawn.
    FOR_LATEST_ITERATOR = auto()
    FOR_EARLIER_ITERATOR = auto()


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
        self.generator = Seeds()
        self._loader = loader
        self._seeded = Seeded.NEVER
        self.find_source()

    def find_source(self) -> None:
        """Find the generator from which torch draws, before another one replaces it."""
        # ``None`` stands for torch's global generator.
        self._source: torch.Generator | None = getattr(self._loader, "generator", None)

    def mark_seeded_in_resumed_run(self) -> None:
        """Record that the run that is resumed had seeded workers, if they persist."""
        if getattr(self._loader, "persistent_workers", False):
            self._seeded = Seeded.IN_RESUMED_RUN

    def was_seeded(self, *, before_latest: bool) -> bool:
        """Whether workers persist and have been seeded.

        With ``before_latest``, only if that was before the latest iterator.
        """
        if before_latest and self._seeded is Seeded.FOR_LATEST_ITERATOR:
            return False
        return self._seeded is not Seeded.NEVER

    def draw(self, *, was_drawn: bool) -> None:
        """Draw the seed of a new iterator, unless its workers have been seeded.

        Args:
            was_drawn: whether the run that is resumed had drawn it. The generator from
                which it is drawn then stays as it is.
        """
        if self._seeded in (Seeded.NEVER, Seeded.IN_RESUMED_RUN):
            self._draw(was_drawn=was_drawn or self._seeded is Seeded.IN_RESUMED_RUN)
        else:
            self._seeded = Seeded.FOR_EARLIER_ITERATOR

    def repeat_global_draw(self) -> None:
        """Draw the latest iterator's seed again, if it came from torch's global generator.

        Call this after the state of that generator was restored.
        """
        has_drawn = self._seeded is not Seeded.FOR_EARLIER_ITERATOR
        if self._source is None and has_drawn:
            self._draw(was_drawn=False)

    def _draw(self, *, was_drawn: bool) -> None:
        if not (iterates_as_torch(self._loader) and _draws_on_cpu(self._source)):
            return
        source = self._source or torch.default_generator
        self.generator.set_state(source.get_state())
        if not was_drawn:
            torch.empty((), dtype=torch.int64).random_(generator=source)
        if not self._loader.persistent_workers:
            return
        if self._seeded is Seeded.NEVER:
            self._seeded = Seeded.FOR_LATEST_ITERATOR
        elif self._seeded is Seeded.IN_RESUMED_RUN:
            self._seeded = Seeded.FOR_EARLIER_ITERATOR


@contextmanager
def workers_seeded_by(loader: DataLoader[Any], generator: torch.Generator) -> Iterator[None]:
    """Make an iterator of a ``DataLoader`` draw its workers' seed from a generator.

    The iterator is created in the block. Otherwise torch draws the seed from the
    loader's generator or the global one; so it does here if it draws on a GPU.
    """
    users_generator = loader.generator
    if _draws_on_cpu(users_generator):
        loader.generator = generator
    try:
        yield
    finally:
        loader.generator = users_generator


def _draws_on_cpu(generator: torch.Generator | None) -> bool:
    """Whether torch draws workers' seeds on the CPU, for a loader with this generator."""
    has_cpu_generator = generator is None or generator.device.type == "cpu"
    return has_cpu_generator and torch.get_default_device().type == "cpu"
