"""Save in the background: training waits only for a copy in memory.

Threads write the files in the order of the calls. To limit memory, there is only one
copy at a time: a save waits until the previous checkpoint is written. Removals are
queued in the same order. After a failed save, removals wait for a save that succeeds,
because they might otherwise remove the last good checkpoint.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from lightning_ddp_ext.checkpoint.save import unwritable
from lightning_ddp_ext.checkpoint.snapshot import Buffer
from lightning_ddp_ext.forced_exit import delaying_forced_exit
from lightning_ddp_ext.threads import start_thread

_logger = logging.getLogger(__name__)


class Saver:
    """Write and remove checkpoints, in the foreground or in the background.

    The process only exits after everything is written, because the threads are not
    daemons.

    Attributes:
        deadline: seconds for which an unfinished save delays a forced exit of this
            process.
    """

    def __init__(self) -> None:
        self.deadline = 600.0
        self._last_save_failed = False
        self._postponed: dict[str, Callable[[], None]] = {}  # removals by path
        self._buffer = Buffer()
        self._saving = threading.Lock()
        self._starting = threading.Lock()
        self._last_thread: threading.Thread | None = None
        self._first_error: BaseException | None = None  # that has not been raised

    def __reduce__(self) -> Any:
        # A started rank gets a new one: threads and the buffer belong to this process.
        return (Saver, ())

    def save(self, path: str, job: Callable[[], None]) -> None:
        """Write a checkpoint now by calling ``job``.

        Then run the removals that were waiting for a successful save.
        """
        self._last_save_failed = True  # until it succeeds
        with delaying_forced_exit(self.deadline):
            job()
        self._last_save_failed = False
        self._postponed.pop(path, None)  # the file is new
        while self._postponed:
            self._postponed.pop(next(iter(self._postponed)))()

    def save_later(self, path: str, checkpoint: Any, write: Callable[[Any], None]) -> None:
        """Copy ``checkpoint`` now, and call ``write`` with the copy in the background.

        Raises:
            CheckpointSaveError: the checkpoint cannot be pickled, or no thread can be
                started; :meth:`raise_error` and :meth:`wait` raise the errors of
                ``write``.
        """
        with self._saving:
            self.join()
            self._last_save_failed = True  # until it succeeds
            try:
                content = self._buffer.snapshot(checkpoint)
                self._start(partial(self.save, path, lambda: write(content())))
            except Exception as error:
                raise unwritable(path, error) from error

    def follow_up(
        self, path: str, job: Callable[[], None], *, later: bool, postpone: bool = False
    ) -> None:
        """Run a removal or a link, unless the previous save failed.

        The job runs now or, with ``later``, after all jobs queued so far. With
        ``postpone``, a job that was not run waits for the next save that succeeds.
        """

        def unless_failed() -> None:
            if not self._last_save_failed:
                job()
                return
            _logger.warning(
                "leaving checkpoint %s unchanged because the previous save failed", path
            )
            if postpone:
                self._postponed[path] = job

        if later:
            self._start(unless_failed)
        else:
            unless_failed()

    def _start(self, job: Callable[[], None]) -> None:
        """Run ``job`` in a new thread, after the previous thread has finished.

        If Ctrl-C interrupts this call, the job does not run: the thread waits for the
        end of the block, and finds no job.
        """
        one_job: list[Callable[[], None]] = []
        with self._starting:
            self._last_thread = start_thread(
                "ddpx-checkpoints", self._run, one_job, self._last_thread, daemon=False
            )
            one_job.append(job)

    def _run(self, one_job: list[Callable[[], None]], previous: threading.Thread | None) -> None:
        if previous is not None:
            previous.join()
        with self._starting:
            pass  # now `_start` has added the job, or a signal handler has interrupted it
        try:
            for job in one_job:
                job()
        except BaseException as error:
            _logger.error("%s", error)  # the process may exit before anything raises it
            self._first_error = self._first_error or error

    def raise_error(self) -> None:
        """Raise the first background error since the last call, if any."""
        error = self._first_error
        if error is not None:  # otherwise a thread may fail before this method clears it
            self._first_error = None
            raise error

    def join(self) -> None:
        """Wait for all jobs; keep the memory for the next save."""
        if self._last_thread is not None:
            self._last_thread.join()

    def release(self) -> None:
        """Release the memory; only after all jobs have finished."""
        self._buffer.release()

    def finish(self) -> None:
        """Wait for all jobs; their errors are only in the log."""
        self.join()
        self._first_error = None

    def wait(self) -> None:
        """Wait for all jobs.

        Raises:
            Exception: the first error that has not been raised yet.
        """
        self.join()
        self.raise_error()
