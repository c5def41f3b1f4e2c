"""Save in the background: training waits only for a copy in memory.

One thread runs the jobs (saves, removals and links) in the order of the calls. To limit
memory, there is only one copy at a time: a save waits until the previous checkpoint is
written. After a failed save, removals wait for a save that succeeds, because they might
otherwise remove the last good checkpoint.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from lightning_ddp_ext.checkpoint.save import unwritable
from lightning_ddp_ext.checkpoint.snapshot import Buffer
from lightning_ddp_ext.forced_exit import delaying_forced_exit
from lightning_ddp_ext.threads import start_thread

Job = Callable[[], None]

_logger = logging.getLogger(__name__)


class Saver:
    """Write and remove checkpoints, in the foreground or in the background.

    The process only exits after everything is written.

    Attributes:
        deadline: seconds for which an unfinished save delays a forced exit of this
            process.
    """

    def __init__(self) -> None:
        self.deadline = 600.0
        self._worker = _Worker()
        self._copying = threading.Lock()
        # The running job uses the following; a caller must wait for the worker first.
        self._buffer = Buffer()
        self._last_save_succeeded = True
        self._postponed: dict[str, Job] = {}  # removals by path

    def __reduce__(self) -> Any:
        # A started rank gets a new one: the thread and the buffer belong to this process.
        return (Saver, ())

    def save(self, path: str, job: Job) -> None:
        """Write a checkpoint now by calling ``job``.

        Then run the removals that were waiting for a successful save.

        Raises:
            Exception: the error of ``job``; or as for :meth:`wait`, and this save was
                not attempted.
        """
        self.wait()
        self._save(path, job)

    def save_later(self, path: str, checkpoint: Any, write: Callable[[Any], None]) -> None:
        """Copy ``checkpoint`` now, and call ``write`` with the copy in the background.

        The checkpoint is written in the foreground if another call is in progress: in
        another thread, or interrupted by the signal handler that makes this call.

        Raises:
            CheckpointSaveError: the checkpoint cannot be pickled, or no thread can be
                started.
            Exception: as for :meth:`wait`; this save was not attempted.
        """
        if not self._copying.acquire(blocking=False):
            self.save(path, partial(write, checkpoint))
            return
        try:
            self.wait()
            self._copy_and_submit(path, checkpoint, write)
        finally:
            self._copying.release()

    def _copy_and_submit(self, path: str, checkpoint: Any, write: Callable[[Any], None]) -> None:
        self._last_save_succeeded = False  # until it does
        try:
            content = self._buffer.snapshot(checkpoint)
            self._worker.submit(partial(self._save, path, lambda: write(content())))
        except Exception as error:
            raise unwritable(path, error) from error

    def _save(self, path: str, job: Job) -> None:
        self._last_save_succeeded = False  # until it does
        with delaying_forced_exit(self.deadline):
            job()
        self._last_save_succeeded = True
        self._postponed.pop(path, None)  # the file is new
        for waiting in list(self._postponed):
            self._postponed.pop(waiting)()

    def follow_up(self, path: str, job: Job, *, later: bool, postpone: bool = False) -> None:
        """Run a removal or a link after all earlier jobs, unless the last save failed.

        With ``later``, it runs in the background. With ``postpone``, a job that was not
        run waits for the next save that succeeds.

        Raises:
            Exception: without ``later``, the error of ``job``, or as for :meth:`wait`.
        """

        def unless_failed() -> None:
            if self._last_save_succeeded:
                job()
                return
            _logger.warning(
                "leaving checkpoint %s unchanged because the previous save failed", path
            )
            if postpone:
                self._postponed[path] = job

        if later:
            self._worker.submit(unless_failed)
        else:
            self.wait()
            unless_failed()

    def wait(self) -> None:
        """Wait for all jobs; the memory is kept for the next save.

        Raises:
            Exception: the first background error since the last call.
        """
        self._worker.wait()

    def finish(self) -> None:
        """Wait for all jobs; their errors are only in the log."""
        with suppress(Exception):
            self.wait()

    def release(self) -> None:
        """Release the memory; only after all jobs have finished."""
        self._buffer.release()


class _Worker:
    """Run jobs in the order of the calls, in a thread that exits when none is left.

    The thread is not a daemon, so the process only exits after the last job.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # for the next two fields
        self._thread: threading.Thread | None = None  # runs or will run all of the jobs
        self._jobs: deque[Job] = deque()  # not started yet
        self._first_error: BaseException | None = None  # set by the thread, cleared by `wait`

    def submit(self, job: Job) -> None:
        """Queue a job, and start a thread unless one is running."""
        with self._lock:
            # A forked process has a copy of the fields, but not the thread.
            if self._thread is None or not self._thread.is_alive():
                self._jobs.clear()
                self._thread = start_thread("ddpx-checkpoints", self._run, daemon=False)
            self._jobs.append(job)

    def _run(self) -> None:
        while job := self._next_job():
            try:
                job()
            except BaseException as error:
                _logger.error("%s", error)  # the process may exit before anything raises it
                self._first_error = self._first_error or error

    def _next_job(self) -> Job | None:
        """Return the next job, or ``None`` if this thread has to exit."""
        with self._lock:
            if self._thread is not threading.current_thread():
                return None  # Ctrl-C interrupted `submit`, which started this thread
            if not self._jobs:
                self._thread = None
                return None
            return self._jobs.popleft()

    def wait(self) -> None:
        """Wait for all jobs, and raise the first error since the last call, if any."""
        if thread := self._thread:
            thread.join()
        error = self._first_error
        if error is not None:  # otherwise a job may fail before this method clears it
            self._first_error = None
            raise error
