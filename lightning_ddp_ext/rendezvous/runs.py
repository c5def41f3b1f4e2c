"""Track the runs of this process: a run is a Trainer's call, such as ``fit``.

After another rank's death, this process exits if its main thread stays blocked in a
run. Outside of runs, such as in the user's code after ``fit``, a death is only
recorded, and signals do not stop ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Run:
    """A run; its strategy keeps it until the next one.

    Attributes:
        is_outermost: whether no other run was under way at its start; a Trainer may run
            inside another Trainer's hook.
        has_failed: whether an exception ended it, which the Trainer may still be
            handling. A rank without an exception may then wait in a collective call
            that this rank never makes.
    """

    is_outermost: bool
    has_failed: bool = False


_under_way: list[Run] = []


@contextmanager
def start_run() -> Iterator[Run]:
    """Mark the block as a run."""
    run = Run(is_outermost=not _under_way)
    _under_way.append(run)
    try:
        yield run
    finally:
        _under_way.pop()


def current_run() -> Run | None:
    """Return the innermost run that is under way in the main thread, if any."""
    return _under_way[-1] if _under_way else None
