"""The runs of this process: whether a Trainer's work is under way, and whether an exception ended it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Run:
    """The work of a Trainer's call on this process; its strategy refers to it until the next one.

    Attributes:
        is_outermost: whether no other run is under way; a Trainer may run inside a hook of another one.
        has_failed: whether an exception ended it and the Trainer still handles that exception. A rank without an
            exception may then wait in a collective call that this rank never makes.
    """

    is_outermost: bool
    has_failed: bool = False


_under_way: list[Run] = []


@contextmanager
def start_run() -> Iterator[Run]:
    """Mark the block as a run: another rank's death then ends this process if its main thread cannot be woken.

    Outside of runs, as in the user's code after ``fit``, a death is only recorded, and signals do not stop the ranks.
    """
    run = Run(is_outermost=not _under_way)
    _under_way.append(run)
    try:
        yield run
    finally:
        _under_way.pop()


def current_run() -> Run | None:
    """Return the innermost run that is under way in the main thread."""
    return _under_way[-1] if _under_way else None
