"""Save in the background: training waits only for a copy in memory.

Jobs (saves, removals and links) run in the order of the calls. To limit memory, there
is only one copy at a time: a save waits until the previous checkpoint is written. After
a failed save, removals wait for a save that succeeds, because they might otherwise
remove the last good checkpoint.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning_ddp_ext.checkpoint.save import unwritable
from lightning_ddp_ext.checkpoint.snapshot import Buffer
from lightning_ddp_ext.forced_exit import delaying_forced_exit
from lightning_ddp_ext.threads import start_thread

Job = Callable[[], None]

_LOOK_EVERY = 0.005  # seconds

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
        self._jobs = _BackgroundJobs()
        # Held during a call: other threads wait, but not a signal handler of the same thread.
        self._calling = threading.RLock()
        self._is_saving_later = False
        # The running job uses the following; a caller must wait for all jobs first.
        self._buffer = Buffer()
        self._last_save_succeeded = True
        self._postponed: dict[str, Job] = {}  # removals by path

    def __reduce__(self) -> Any:
        # A started rank gets a new one: threads and the buffer belong to this process.
        return (Saver, ())

    def save(self, path: str, job: Job) -> None:
        """Write a checkpoint now by calling ``job``, after all earlier jobs.

        Then run the removals that were waiting for a successful save.

        Raises:
            Exception: the error of ``job``; or as for :meth:`wait`, and this save was
                not attempted.
        """
        with self._calling:
            self.wait()
            self._save(path, job)

    def save_later(self, path: str, checkpoint: Any, write: Callable[[Any], None]) -> None:
        """Copy ``checkpoint`` now, and call ``write`` with the copy in the background.

        A signal handler that interrupts such a call writes in the foreground.

        Raises:
            CheckpointSaveError: the checkpoint cannot be pickled, or no thread can be
                started.
            Exception: as for :meth:`wait`; this save was not attempted.
        """
        with self._calling:
            if self._is_saving_later:
                self.save(path, partial(write, checkpoint))
                return
            try:
                self._is_saving_later = True
                self.wait()
                self._copy_and_start(path, checkpoint, write)
            finally:
                self._is_saving_later = False

    def _copy_and_start(self, path: str, checkpoint: Any, write: Callable[[Any], None]) -> None:
        self._last_save_succeeded = False  # until it does
        try:
            content = self._buffer.snapshot(checkpoint)
            self._jobs.start(partial(self._save, path, lambda: write(content())))
        except Exception as error:
            raise unwritable(path, error) from error

    def _save(self, path: str, job: Job) -> None:
        self._last_save_succeeded = False  # until it does
        with delaying_forced_exit(self.deadline):
            job()
        self._last_save_succeeded = True
        self._postponed.pop(path, None)  # the file is new
        while self._postponed:
            self._postponed.pop(next(iter(self._postponed)))()

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

        with self._calling:
            if later:
                self._jobs.start(unless_failed)
            else:
                self.wait()
                unless_failed()

    def wait(self) -> None:
        """Wait for all jobs; the memory is kept for the next save.

        Raises:
            Exception: the first background error that has not been raised yet.
        """
        self._jobs.join()
        error = self._jobs.take_error()
        if error is not None:
            raise error

    def finish(self) -> None:
        """Wait for all jobs; their errors are only in the log."""
        self._jobs.join()
        self._jobs.take_error()

    def release(self) -> None:
        """Release the memory; only after all jobs have finished."""
        self._buffer.release()


@dataclass(eq=False)
class _Background:
    """A job in the background.

    Attributes:
        pid: the process that started it; a forked process has a copy, but no thread.
        has_started: whether its thread has started; set by both threads.
        has_finished: whether its thread has run it.
    """

    pid: int
    has_started: bool = False
    has_finished: bool = False


class _BackgroundJobs:
    """Jobs that run one after another, each in a thread that waits for those before it.

    The threads are not daemons, so the process only exits after the last job. There is
    no lock for which a signal handler or a forked process could wait.
    """

    def __init__(self) -> None:
        self._jobs: list[_Background] = []  # all that have not finished
        self._first_error: BaseException | None = None

    def start(self, job: Job) -> None:
        """Run a job in a new thread, after all earlier ones."""
        own = _Background(os.getpid())
        # Before it starts, so that `join` waits for it even if Ctrl-C interrupts `start`. A
        # signal handler may start a job in between, which then waits for this one.
        self._jobs.append(own)
        jobs = list(self._jobs)
        earlier = jobs[: jobs.index(own)]
        try:
            start_thread("ddpx-checkpoints", self._run, job, own, earlier, daemon=False)
            own.has_started = True
        except Exception:
            self._jobs.remove(own)
            raise

    def _run(self, job: Job, own: _Background, earlier: list[_Background]) -> None:
        own.has_started = True
        _join(earlier)
        try:
            job()
        except BaseException as error:
            _logger.error("%s", error)  # the process may exit before anything raises it
            self._first_error = self._first_error or error
        self._jobs.remove(own)
        own.has_finished = True

    def join(self) -> None:
        """Wait for all jobs that have started."""
        _join(list(self._jobs))

    def take_error(self) -> BaseException | None:
        """Return the first error since the last call, if any."""
        error = self._first_error
        if error is not None:  # otherwise a job may fail before this method clears it
            self._first_error = None
        return error


def _join(jobs: list[_Background]) -> None:
    """Wait until these jobs have finished, except for those that have not started.

    ``Thread.join`` is not used: Ctrl-C in it makes a thread count as finished (CPython
    issue 90882), and a signal handler that joins the same thread waits for ever.
    """
    for each in jobs:
        while each.has_started and not each.has_finished and each.pid == os.getpid():
            time.sleep(_LOOK_EVERY)
