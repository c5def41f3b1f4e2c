"""Describe how a rank ended, for assertions and for the reports of failing tests."""

from __future__ import annotations

import pickle
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RankError:
    """An exception that escaped from a rank's function, including a ``SystemExit``
    whose status is not 0.

    ``at`` is a ``time.monotonic()``, which is one clock for all processes.
    """

    type_name: str
    message: str
    traceback: str
    pickled: bytes  # with its cause; empty where it cannot be pickled
    at: float

    @classmethod
    def of(cls, error: BaseException) -> RankError:
        text = "".join(traceback.format_exception(error))
        return cls(
            type(error).__name__, str(error), text, _pickle_with_cause(error), time.monotonic()
        )

    @property
    def exception(self) -> BaseException | None:
        """The exception itself with its cause; None if it cannot be pickled."""
        if not self.pickled:
            return None
        error, cause = pickle.loads(self.pickled)
        error.__cause__ = cause
        return error


@dataclass
class Outcome:
    """How a rank ended.

    ``exit_code`` is negative for a signal, and None while the rank runs; ``result`` is
    None unless the function returned; ``output`` is what the rank wrote to stdout and
    stderr, in order, and the Python stacks of all its threads if it was ended at the
    time limit.
    """

    rank: int
    pid: int
    exit_code: int | None = None
    result: Any = None
    error: RankError | None = None
    output: str = ""

    @property
    def failure(self) -> RankError:
        """The exception that escaped; fails the test without one."""
        assert self.error is not None, self.story()
        return self.error

    def story(self) -> str:
        """Return its end in one line, its traceback unless that was printed, and its
        output.
        """
        error = f"{self.error.type_name}: {self.error.message}, " if self.error else ""
        parts = [f"rank {self.rank} (pid {self.pid}): {error}{name_of_status(self.exit_code)}"]
        if self.error and self.error.traceback not in self.output:
            parts.append(self.error.traceback)
        parts.append(f"--- output of rank {self.rank} ---\n{self.output.rstrip() or '(nothing)'}")
        return "\n".join(parts)


def stories(outcomes: Sequence[Outcome]) -> str:
    """Return how each rank ended."""
    return "\n\n".join(outcome.story() for outcome in outcomes)


def output_of_all(outcomes: Sequence[Outcome], *, exit_code: int = 0) -> str:
    """Return the output of all ranks, rank by rank; fail unless each exited with that
    status.
    """
    assert all(outcome.exit_code == exit_code for outcome in outcomes), stories(outcomes)
    return "".join(outcome.output for outcome in outcomes)


def name_of_status(exit_code: int | None) -> str:
    """Return an exit status in words, such as ``exit status 1`` or ``ended by
    SIGKILL``.
    """
    if exit_code is None:
        return "still running"
    return (
        f"exit status {exit_code}"
        if exit_code >= 0
        else f"ended by {signal.Signals(-exit_code).name}"
    )


def _pickle_with_cause(error: BaseException) -> bytes:
    try:
        pickled = pickle.dumps((error, error.__cause__))
        pickle.loads(pickled)
    except Exception:
        return b""
    return pickled
