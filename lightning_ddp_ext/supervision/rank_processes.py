"""Join the ranks that a process started as functions, and raise the first failure."""

from __future__ import annotations

import os
import pickle
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import IntEnum
from multiprocessing import connection
from typing import Any

from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

from lightning_ddp_ext.errors import RankDiedError, RankFailedError
from lightning_ddp_ext.supervision.process_exits import (
    END_WITHIN,
    status_in_words,
    stop_processes,
)
from lightning_ddp_ext.supervision.signals import STOP_STATUSES, StopSignals, without_handler

# Seconds in which the ranks may exit after Ctrl-C, before those that are not saving are stopped.
_END_WITHIN_AFTER_INTERRUPT = 2.5


class Blame(IntEnum):
    """How a failed process ended; the lowest number marks the likely first failure."""

    KILLED = 0
    RAISED = 1
    EXITED = 2  # without an exception: it called sys.exit(), or was stuck
    FOLLOWED = 3  # it raised because of another rank


class RankProcesses:
    """The ranks of this node, as processes that run a function.

    Joining them raises the first failure. The other ranks get some time to print why
    they exit.

    Args:
        context: torch's object for the started processes.
        failed_at: by process, the ``time.monotonic()`` at which it raised an exception
            that no other rank caused; 0 for a process that raised none. The processes
            share this memory.
        results_file: the file that local rank 0 writes if it succeeds.
        stop_within: the seconds in which the ranks must stop together after a signal,
            or save after a failure.
        first_rank: the global rank of local rank 0, for errors.
    """

    def __init__(
        self,
        context: Any,
        failed_at: Sequence[float],
        results_file: str,
        stop_within: float,
        first_rank: int,
    ) -> None:
        self._processes = context.processes
        self._report_files = context.error_files
        self._failed_at = failed_at
        self._results_file = results_file
        self._stop_within = stop_within
        self._first_rank = first_rank

    def join(self) -> None:
        """Wait for all processes.

        Raises:
            SystemExit: a signal stopped all processes.
            RankDiedError: the first process that failed was killed.
            RankFailedError: local rank 0 left without results.
            ProcessRaisedException, ProcessExitedException: torch's errors for a process
                that raised, or exited with another status.
        """
        stopped = self._run_to_end()
        status = self._stop_status(range(len(self._processes)))
        if status is not None:
            raise SystemExit(status)
        failed = [index for index in self._failed() if index not in stopped]
        if failed:
            raise self._error_of(min(failed, key=self._order_of_blame))
        if not os.path.exists(self._results_file):
            # Lightning would wait forever for the results.
            raise self._rank_error(
                RankFailedError,
                0,
                "exited with status 0 before it finished its work; look for sys.exit() or an"
                " interrupt",
            )

    def _run_to_end(self) -> list[int]:
        """Wait until all processes exit, and stop those that run on after a failure.

        Return the processes that had to be stopped, whose failures do not count.
        """
        with self._passing_signals_on():
            try:
                self._wait_for_first_failure()
                if not self._failed():
                    return []
                is_stopping = self._stop_status(self._failed()) is not None
                seconds = self._stop_within if is_stopping else END_WITHIN
                return stop_processes(self._processes, seconds, self._stop_within)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    self._pass_on(signal.SIGTERM)  # in a notebook, it reaches this process only
                stop_processes(self._processes, _END_WITHIN_AFTER_INTERRUPT, self._stop_within)
                raise

    @contextmanager
    def _passing_signals_on(self) -> Iterator[None]:
        """In this block, pass signals to this process on to the ranks."""
        signals = StopSignals(self._pass_on)
        signals.install(signal.SIGTERM, *without_handler(signal.SIGHUP, signal.SIGUSR1))
        try:
            yield
        finally:
            signals.restore()

    def _wait_for_first_failure(self) -> None:
        """Wait until one process has failed, or all have exited."""
        running = {process.sentinel: process for process in self._processes}
        while running and not self._failed():
            for sentinel in connection.wait(list(running)):
                running.pop(sentinel).join()

    def _pass_on(self, signum: int) -> None:
        """Pass a signal on to the first running rank, which makes all ranks stop.

        The thread of ``StopSignals`` calls this, and the main thread after Ctrl-C.
        """
        for process in self._processes:
            if process.exitcode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signum)
                return

    def _stop_status(self, indices: Sequence[int]) -> int | None:
        """Return the exit status of processes if a signal stopped all of them in order.

        They then exited with the same status and without an exception; otherwise,
        return ``None``.
        """
        statuses = {self._processes[index].exitcode for index in indices}
        has_raised = any(self._reported_traceback(index) is not None for index in indices)
        if has_raised or not statuses <= STOP_STATUSES:
            return None
        return statuses.pop() if len(statuses) == 1 else None

    def _failed(self) -> list[int]:
        return [
            index
            for index, process in enumerate(self._processes)
            if process.exitcode not in (None, 0)
        ]

    def _order_of_blame(self, index: int) -> tuple[Blame, float]:
        """Return a sort key that puts the process to blame first.

        Among those that raised, it is the one that raised first.
        """
        failed_at = self._failed_at[index]
        if failed_at:
            return Blame.RAISED, failed_at
        if self._reported_traceback(index) is not None:
            return Blame.FOLLOWED, 0.0
        is_killed = self._processes[index].exitcode < 0
        return (Blame.KILLED if is_killed else Blame.EXITED), 0.0

    def _error_of(self, index: int) -> Exception:
        """Return the error to raise for a process that failed.

        For a process that raised, but was killed before it had written its traceback,
        the error names the signal.
        """
        pid = self._processes[index].pid
        status = self._processes[index].exitcode
        traceback = self._reported_traceback(index)
        if traceback is not None:
            message = f"\n\n-- Process {index} terminated with the following error:\n{traceback}"
            return ProcessRaisedException(message, index, pid)
        if status < 0:
            what = f"died: it {status_in_words(status)}; the other ranks were stopped"
            return self._rank_error(RankDiedError, index, what)
        message = f"process {index} terminated with exit code {status}"
        return ProcessExitedException(message, index, pid, status)

    def _reported_traceback(self, index: int) -> str | None:
        """Return the traceback that torch wrote into a file in a process that raised, if any.

        The file is in the directory for temporary files, where another user could write
        it and have this process unpickle any code. So it must belong to this user. It
        is incomplete if the process was killed while it wrote the file.
        """
        path = str(self._report_files[index])
        with suppress(OSError, EOFError, pickle.UnpicklingError):
            if os.lstat(path).st_uid == os.getuid():
                with open(path, "rb") as file:
                    return str(pickle.load(file))
        return None

    def _rank_error(self, kind: type[RankFailedError], index: int, what: str) -> RankFailedError:
        host = socket.gethostname()
        pid = self._processes[index].pid
        return kind(
            f"local rank {index} (host {host}, pid {pid}) {what}",
            rank=self._first_rank + index,
            host=host,
            pid=pid,
        )
