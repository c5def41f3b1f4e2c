"""What goes with a started process, and what comes back from it."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from typing import Any

from lightning_ddp_ext.supervision.parent_watch import watch_launcher

from .lightning_tree import GlobalStateSnapshot


@dataclass(frozen=True)
class ChildStart:
    """What a started process needs to know of the one that started it."""

    launcher_pid: int
    environment: dict[str, str]
    global_state: GlobalStateSnapshot | None
    results_file: str

    def enter(self) -> None:
        """Called first thing in the started process."""
        # A fork server hands on the environment of its own start, which may be long past.
        os.environ.clear()
        os.environ.update(self.environment)
        if self.global_state is not None:
            self.global_state.restore()
        watch_launcher(self.launcher_pid)


@dataclass(frozen=True)
class ResultsQueue:
    """The sending end of Lightning's queue for what rank 0 brings back, of any length.

    Lightning reads the queue when all processes have ended, and a pipe holds 64 KiB: with some 300 logged metrics
    rank 0 would wait for a reader for ever. So the message goes into a file, and only its name through the pipe.
    """

    queue: Any
    path: str

    def put(self, results: Any) -> None:
        """Send ``results``; the other end gets them as they are."""
        with open(self.path, "wb") as file:
            pickle.dump(results, file)
        self.queue.put(_InFile(self.path))


@dataclass(frozen=True)
class _InFile:
    """Stands for what is pickled in a file, which is what comes out at the other end."""

    path: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _load, (self.path,)


def _load(path: str) -> Any:
    with open(path, "rb") as file:  # written by a process of our own
        return pickle.load(file)
