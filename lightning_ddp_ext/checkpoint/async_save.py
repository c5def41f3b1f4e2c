"""Save in the background: training waits for a copy in memory, and a thread does the rest in the order of the calls.

There is one copy at a time, so memory is bounded: a save waits until the last checkpoint has been written. Removals
wait for their turn, too, and none is done after a save that failed: it might remove the last good checkpoint.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_ddp_ext.at_exit import at_exit, delaying_forced_end
from lightning_ddp_ext.checkpoint.snapshot import Buffer, Snapshot, take
from lightning_ddp_ext.rank_logger import own_logger

_logger = own_logger(__name__)


class RemovalGuard:
    """Keeps a checkpoint whose successor could not be saved, in the foreground, too.

    Attributes:
        failed: the paths whose last save has failed; that in the background may be on its way.
        deadline: seconds for which a save under way delays a forced end of this process.
    """

    def __init__(self) -> None:
        self.failed: set[str] = set()
        self.deadline = 600.0
        self._last_save_failed = False

    def save(self, path: str, job: Callable[[], None]) -> None:
        """Run a save, and remember whether it failed."""
        try:
            with delaying_forced_end(self.deadline):
                job()
        except BaseException:
            self.note_failure(path)
            raise
        self.failed.discard(path)
        self._last_save_failed = False

    def note_failure(self, path: str) -> None:
        """Remember that a save has failed."""
        self.failed.add(path)
        self._last_save_failed = True

    def remove(self, path: str, job: Callable[[], None]) -> None:
        """Run a removal, unless the save before it failed."""
        if self._last_save_failed:
            _logger.warning("leaving checkpoint %s as it is: the save before has failed", path)
        else:
            job()


@dataclass(frozen=True)
class _Job:
    run: Callable[[], None]
    uses_buffer: bool = False


_savers: weakref.WeakSet[BackgroundSaver] = weakref.WeakSet()
_process: int | None = None


def _finish_at_exit() -> None:
    """Once a process: a forked one does not inherit what its parent does at its end."""
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        at_exit(_finish_all)


def _finish_all() -> None:
    for saver in list(_savers):
        try:
            if saver.is_of_this_process:
                saver.wait()
        except Exception as error:
            _logger.error("%s", error)


class BackgroundSaver:
    """Writes one checkpoint after another in a thread, which is there while there is something to do.

    It belongs to the process that has made it: a forked one has no such thread. At the process's end it is waited for.

    Args:
        write: writes a checkpoint to a path.
        guard: decides about removals.
    """

    def __init__(self, write: Callable[[Any, str], None], guard: RemovalGuard) -> None:
        self._write = write
        self._guard = guard
        self._buffer = Buffer()
        self._saving = threading.Lock()
        self._changed = threading.Condition()
        # What is to be done, and what is being done: a job leaves when it has ended.
        self._jobs: deque[_Job] = deque()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._pid = os.getpid()
        _savers.add(self)
        _finish_at_exit()

    @property
    def is_of_this_process(self) -> bool:
        """Whether its thread is here, or in the process that this one was forked from."""
        return self._pid == os.getpid()

    def save(self, checkpoint: Any, path: str) -> None:
        """Copy ``checkpoint`` now and write it to ``path`` later.

        Raises:
            Exception: what pickling raises, and starting a thread; errors of the disk come with :meth:`raise_error` and
                :meth:`wait`.
        """
        with self._saving:
            with self._changed:
                self._changed.wait_for(lambda: not any(job.uses_buffer for job in self._jobs))
            self._guard.failed.discard(path)
            snapshot = take(checkpoint, self._buffer)
            self._add(_Job(lambda: self._write_snapshot(snapshot, path), uses_buffer=True))

    def _write_snapshot(self, snapshot: Snapshot, path: str) -> None:
        self._guard.save(path, lambda: self._write(snapshot.content(), path))

    def submit(self, job: Callable[[], None]) -> None:
        """Do ``job`` after all that was given before."""
        self._add(_Job(job))

    def _add(self, job: _Job) -> None:
        with self._changed:  # wherever this is interrupted, the thread finds a job that it does, or none, and ends
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="ddpx-checkpoints", daemon=True)
                thread.start()
                self._thread = thread
            self._jobs.append(job)

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._jobs:
                    self._thread = None
                    return
                job = self._jobs[0]
            try:
                job.run()
            except BaseException as error:
                self._error = self._error or error
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()

    def raise_error(self) -> None:
        """Raise the first error that has happened since the last call, if there is one."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def join(self) -> None:
        """Wait until everything is done; memory is kept for the next time."""
        with self._changed:
            thread = self._thread
        if thread is not None:
            thread.join()

    def wait(self) -> None:
        """Wait until everything is done.

        Raises:
            Exception: the first error that nobody has been told of.
        """
        self.join()
        self.raise_error()
