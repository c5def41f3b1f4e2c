"""Save in the background: training waits for a copy in memory, and threads do the rest in the order of the calls.

There is one copy at a time, so memory is bounded: a save waits until the last checkpoint has been written. Removals
wait for their turn, too, and none is done after a save that failed: it might remove the last good checkpoint.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_ddp_ext.at_exit import delaying_forced_end
from lightning_ddp_ext.checkpoint.save import unwritable
from lightning_ddp_ext.checkpoint.snapshot import Buffer

_logger = logging.getLogger(__name__)


class Saver:
    """Writes and removes checkpoints at once or later, and knows which saves have failed.

    The process ends when all is written: its threads are not daemons.

    Attributes:
        failed: the paths whose last save has failed; that in the background may be on its way.
        deadline: seconds for which a save under way delays a forced end of this process.
    """

    def __init__(self) -> None:
        self.failed: set[str] = set()
        self.deadline = 600.0
        self._last_save_failed = False
        self._buffer = Buffer()
        self._saving, self._starting = threading.Lock(), threading.Lock()
        self._last_thread: threading.Thread | None = None
        self._untold: list[BaseException] = []
        weakref.finalize(self, _log, self._untold)  # at the end of the process, too

    def __reduce__(self) -> Any:
        return Saver, ()  # started ranks get a copy; threads, and memory for snapshots, are this process's own

    def save(self, path: str, job: Callable[[], None]) -> None:
        """Write to ``path`` now by ``job``, and remember whether it failed."""
        try:
            with delaying_forced_end(self.deadline):
                job()
        except BaseException:
            self._note_failure(path)
            raise
        self.failed.discard(path)
        self._last_save_failed = False

    def _note_failure(self, path: str) -> None:
        self.failed.add(path)
        self._last_save_failed = True

    def save_later(self, path: str, checkpoint: Any, write: Callable[[Any], None]) -> None:
        """Copy ``checkpoint`` now, and have ``write`` write the copy to ``path`` later.

        Raises:
            CheckpointSaveError: it cannot be pickled, or no thread can be started; errors of the disk come with
                :meth:`raise_error` and :meth:`wait`.
        """
        with self._saving:
            self.join()
            self.failed.discard(path)
            try:
                content = self._buffer.take(checkpoint)
                self._start(partial(self.save, path, lambda: write(content())))
            except BaseException as error:
                self._note_failure(path)
                if isinstance(error, Exception):
                    raise unwritable(checkpoint, path, error) from error
                raise

    def follow_up(self, path: str, job: Callable[[], None], *, later: bool) -> None:
        """Run a removal or a link, unless the save before it failed; now, or after all that was given before."""

        def unless_failed() -> None:
            if self._last_save_failed:
                _logger.warning("leaving checkpoint %s as it is: the save before has failed", path)
            else:
                job()

        if later:
            self._start(unless_failed)
        else:
            unless_failed()

    def _start(self, job: Callable[[], None]) -> None:
        """Run ``job`` in a thread of its own, when the thread before it has ended."""
        jobs: list[Callable[[], None]] = []
        with self._starting:  # the thread waits for the end of this: if this is interrupted, it has nothing to do
            thread = threading.Thread(target=self._run, args=(jobs, self._last_thread), name="ddpx-checkpoints")
            thread.start()
            self._last_thread = thread
            jobs.append(job)

    def _run(self, jobs: list[Callable[[], None]], previous: threading.Thread | None) -> None:
        if previous is not None:
            previous.join()
        with self._starting:
            pass
        try:
            for job in jobs:
                job()
        except BaseException as error:
            self._untold.append(error)

    def raise_error(self) -> None:
        """Raise the first error that has happened in the background since the last call, if there is one."""
        errors = self._untold[:]
        self._untold.clear()
        if errors:
            raise errors[0]

    def join(self) -> None:
        """Wait until everything is done; memory is kept for the next time."""
        if self._last_thread is not None:
            self._last_thread.join()

    def wait(self) -> None:
        """Wait until everything is done.

        Raises:
            Exception: the first error that nobody has been told of.
        """
        self.join()
        self.raise_error()


def _log(errors: list[BaseException]) -> None:
    for error in errors:
        _logger.error("%s", error)
