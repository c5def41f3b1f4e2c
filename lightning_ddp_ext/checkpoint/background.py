"""Save in the background: training waits for a copy in memory, and a thread does the rest in the order of the calls.

There is one copy at a time, so memory is bounded: who saves again while the last checkpoint is still being written
waits for that. Removals, too, wait for their turn, and none is done after a save that failed: what it would have
removed may be the last good checkpoint.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_ddp_ext.at_exit import at_exit
from lightning_ddp_ext.checkpoint.snapshot import Buffer, Snapshot, take
from lightning_ddp_ext.rank_logger import own_logger

_logger = own_logger(__name__)

Job = Callable[[], None]


@dataclass
class Order:
    """The rule by which saves and removals follow one another, in the foreground, too."""

    last_save_failed: bool = False

    def save(self, job: Job) -> None:
        """Run a save, and remember whether it failed."""
        try:
            job()
        except BaseException:
            self.last_save_failed = True
            raise
        self.last_save_failed = False

    def remove(self, path: str, job: Job) -> None:
        """Run a removal, unless what was to come in its place does not exist."""
        if self.last_save_failed:
            _logger.warning("leaving checkpoint %s as it is: the save before has failed", path)
        else:
            job()


_open: weakref.WeakSet[BackgroundWriter] = weakref.WeakSet()


_process: int | None = None


def _finish_at_exit() -> None:
    """Once a process: a forked one does not inherit what its parent does at its end."""
    global _process
    if _process != os.getpid():
        _process = os.getpid()
        at_exit(_finish_all)


def _finish_all() -> None:
    """What was saved last is on the disk before the process ends, though nobody has waited for it."""
    for writer in list(_open):
        try:
            if writer.is_of_this_process:
                writer.wait()
        except Exception as error:
            _logger.error("%s", error)


class BackgroundWriter:
    """One thread that writes one checkpoint after another, from the first until it has been waited for.

    It belongs to the process that has made it: a forked one has no such thread. At the process's end it is waited for.

    Args:
        write: writes a checkpoint to a path.
        order: the rule for removals.
    """

    def __init__(self, write: Callable[[Any, str], None], order: Order) -> None:
        self._write = write
        self._order = order
        self._buffer = Buffer()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_ending = False
        self._is_buffer_free = threading.Event()
        self._is_buffer_free.set()
        self._error: Exception | None = None
        self._lock = threading.RLock()
        self.path_being_written: str | None = None
        self._pid = os.getpid()
        _open.add(self)
        _finish_at_exit()

    @property
    def is_of_this_process(self) -> bool:
        """Whether its thread is here, or in the process that this one was forked from."""
        return self._pid == os.getpid()

    def save(self, checkpoint: Any, path: str) -> None:
        """Copy ``checkpoint`` now and write it to ``path`` later.

        Raises:
            Exception: what pickling raises; errors of the disk come with :meth:`raise_error` and :meth:`wait`.
        """
        with self._lock:
            self._is_buffer_free.wait()
            snapshot = take(checkpoint, self._buffer)
            self._is_buffer_free.clear()
            self.path_being_written = path
            self.submit(lambda: self._write_snapshot(snapshot, path))

    def _write_snapshot(self, snapshot: Snapshot, path: str) -> None:
        try:
            self._order.save(lambda: self._write(snapshot.content(), path))
        finally:
            self.path_being_written = None
            self._is_buffer_free.set()

    def submit(self, job: Job) -> None:
        """Have the thread do ``job`` after all that it was given before."""
        with self._lock:
            if self._is_ending:  # somebody has interrupted who waited
                self._end()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="ddpx-checkpoints", daemon=True)
                self._thread.start()
            self._jobs.put(job)

    def raise_error(self) -> None:
        """Raise the first error that has happened since the last call, if there is one."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def wait(self) -> None:
        """Wait until everything is done, and let go of the thread; memory is kept for the next time.

        Raises:
            Exception: the first error that nobody has been told of.
        """
        with self._lock:
            self._end()
        self.raise_error()

    def _end(self) -> None:
        """Wait for the thread's end; if that is interrupted, it can be called again."""
        if self._thread is None:
            return
        if not self._is_ending:
            self._is_ending = True
            self._jobs.put(None)
        self._thread.join()
        self._thread, self._is_ending = None, False

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                self._error = self._error or error
