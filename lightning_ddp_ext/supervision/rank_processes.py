"""Wait for started ranks, find the first that failed, and stop the others.

A script that starts its other ranks is a rank itself, and waits for them at its exit
(:class:`ChildScripts`). A process that starts functions as ranks only waits for them
(:class:`RankProcesses`).
"""

from __future__ import annotations

import atexit
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing import connection
from typing import Any

from lightning_ddp_ext.at_exit import set_exit_status
from lightning_ddp_ext.errors import RankDiedError, RankFailedError
from lightning_ddp_ext.supervision.signals import (
    STOP_STATUSES,
    StopSignals,
    status_of,
    without_handler,
)

# Seconds in which the other ranks may exit after the first failure, before those that
# are not saving are stopped.
_END_WITHIN = 5.0
_END_WITHIN_AFTER_INTERRUPT = 2.5
_LOOK_EVERY = 0.02  # seconds
# After sys.exit(1), this process seems to have succeeded, so a stuck child must not
# block its exit for longer.
EXIT_WITHIN = 600.0


@dataclass(frozen=True)
class ChildScripts:
    """The ranks of this node that local rank 0 started by running its script again.

    Args:
        children: their processes, in the order of their local ranks, which start at 1.
        variables: the environment variables that this process shares with them in a run.
        exit_within: the seconds that this process waits for them at exit.
        save_within: the seconds after an exception until children that are still saving
            are killed.
    """

    children: list[subprocess.Popen[bytes]]
    variables: dict[str, str]
    exit_within: float
    save_within: float

    def failure(self) -> str | None:
        """Describe a child that exited before all ranks had connected, if any."""
        for local_rank, child in enumerate(self.children, start=1):
            status = child.poll()
            if status is not None:
                return (
                    f"local rank {local_rank} (host {socket.gethostname()}, pid {child.pid})"
                    f" {_in_words(status)} before all ranks had connected; look at its output"
                )
        return None

    def join_at_exit(self) -> None:
        """Wait for the children, and exit with the status of one that failed."""
        status = self.join_or_kill()
        if status != 0:
            set_exit_status(status)

    def join_or_kill(self) -> int:
        """Wait for the children for a limited time, then kill those that are running.

        The time is shorter after an exception.

        Returns:
            The status of the first child that failed, as shells write it; 0 after an
            exception, which has set another.
        """
        has_raised = _has_raised()
        with suppress(KeyboardInterrupt):
            if has_raised:
                _stop(self.children, _END_WITHIN, self.save_within)
            else:
                _wait_for_exits(self.children, self.exit_within)
        for child in self.children:
            child.kill()
        return 0 if has_raised else self._status_of_failure()

    def _status_of_failure(self) -> int:
        """Return the status of the first child that failed, or 0.

        Print which one it is, unless a signal stopped all ranks.
        """
        _wait_for_exits(self.children, _END_WITHIN)  # one that was killed may be in the kernel
        for local_rank, child in enumerate(self.children, start=1):
            status = -signal.SIGKILL if child.returncode is None else child.returncode
            if status == 0:
                continue
            if status not in STOP_STATUSES:
                verdict = _in_words(status)
                sys.stderr.write(f"local rank {local_rank} (pid {child.pid}) {verdict}\n")
            return status if status > 0 else status_of(-status)
        return 0


def _has_raised() -> bool:
    """Whether an exception other than ``SystemExit`` ends this process."""
    return getattr(sys, "last_value", None) is not None


_started: ChildScripts | None = None


def started_ranks() -> ChildScripts | None:
    """Return the ranks that this process started by running its script again, if any."""
    return _started


def record_started(started: ChildScripts) -> None:
    """Record the ranks that this process started, and join them at exit; called once."""
    global _started
    _started = started
    atexit.register(started.join_at_exit)


class Blame(IntEnum):
    """How a failed process exited; the lowest number marks the likely first failure."""

    KILLED = 0
    RAISED = 1
    EXITED = 2  # without a report: it called sys.exit(), or was stuck
    BYSTANDER = 3  # it raised because of another rank


class RankProcesses:
    """The ranks of this node, as processes that run a function.

    Joining them raises the first failure. The other ranks get some time to print why
    they exit.

    Args:
        context: torch's object for the started processes.
        results_file: the file that local rank 0 writes if it succeeds.
        stop_within: the seconds in which the ranks must stop together after a signal,
            or save after a failure.
        first_rank: the global rank of local rank 0, for errors.
    """

    def __init__(
        self, context: Any, results_file: str, stop_within: float, first_rank: int
    ) -> None:
        self._context = context
        self._results_file = results_file
        self._stop_within = stop_within
        self._first_rank = first_rank
        self.processes = context.processes

    def join(self) -> None:
        """Wait for all processes.

        Raises:
            SystemExit: a signal stopped all processes.
            Exception: the exception of the first process that failed; a
                ``RankFailedError`` if it left none.
        """
        stopped = self._wait_and_pass_signals_on()
        status = self._stopped_by()
        if status is not None and {process.exitcode for process in self.processes} == {status}:
            raise SystemExit(status)
        failed = [index for index in self._failed() if index not in stopped]
        if failed:
            self._raise(min(failed, key=self._order_of_blame))
        if not os.path.exists(self._results_file):
            # Lightning would wait forever for the results.
            raise self._error(
                RankFailedError,
                0,
                "exited with status 0 before it finished its work; look for sys.exit() or an"
                " interrupt",
            )

    def _wait_and_pass_signals_on(self) -> list[int]:
        """Wait for all processes, and stop them after a failure.

        Return the processes that had to be stopped, whose failures do not count.
        """
        stopped: list[int] = []
        signals = StopSignals(self._pass_on)
        signals.install(signal.SIGTERM, *without_handler(signal.SIGHUP, signal.SIGUSR1))
        try:
            self._wait_for_first_failure()
            if self._failed():
                seconds = self._stop_within if self._stopped_by() else _END_WITHIN
                stopped = _stop(self.processes, seconds, self._stop_within)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                self._pass_on(signal.SIGTERM)  # in a notebook, it reaches this process only
            _stop(self.processes, _END_WITHIN_AFTER_INTERRUPT, self._stop_within)
            raise
        finally:
            signals.restore()
        return stopped

    def _wait_for_first_failure(self) -> None:
        """Wait until one process has failed, or all have exited."""
        running = {process.sentinel: process for process in self.processes}
        while running and not self._failed():
            for sentinel in connection.wait(list(running)):
                running.pop(sentinel).join()

    def _pass_on(self, signum: int) -> None:
        """Pass a signal on to the first running rank, which makes all ranks stop."""
        for process in self.processes:
            if process.exitcode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signum)
                return

    def _stopped_by(self) -> int | None:
        """Return the common status of the failed ranks if a signal stopped them all."""
        failed = self._failed()
        statuses = {self.processes[index].exitcode for index in failed}
        has_reports = any(self._error_file(index) is not None for index in failed)
        if len(statuses) != 1 or not statuses <= STOP_STATUSES or has_reports:
            return None
        status: int = statuses.pop()
        return status

    def _failed(self) -> list[int]:
        return [
            index
            for index, process in enumerate(self.processes)
            if process.exitcode not in (None, 0)
        ]

    def _order_of_blame(self, index: int) -> tuple[Blame, float]:
        """Return a sort key that puts the process to blame first.

        Among those that raised, it is the one that raised first.
        """
        path = self._error_file(index)
        if path is None:
            is_killed = self.processes[index].exitcode < 0
            return (Blame.KILLED if is_killed else Blame.EXITED), 0.0
        # HACK: the file has only the text of a traceback. The rank knows that it raised
        # because of another one, but cannot add it to the file.
        with open(path, "rb") as file:
            text = str(pickle.load(file))
        is_bystander = re.search(r"^lightning_ddp_ext\.errors\.Rank", text, re.MULTILINE)
        return (Blame.BYSTANDER if is_bystander else Blame.RAISED), os.stat(path).st_mtime

    def _error_file(self, index: int) -> str | None:
        """Return torch's file with a process's traceback, if the process wrote one.

        It is in the directory for temporary files, where another user could write it
        and have this process unpickle any code. So it must belong to this user.
        """
        path = str(self._context.error_files[index])
        with suppress(FileNotFoundError):
            if os.lstat(path).st_uid == os.getuid():
                return path
            self._context.error_files[index] = ""  # torch must not read it, either
        return None

    def _raise(self, index: int) -> None:
        process = self.processes[index]
        if process.exitcode < 0 and self._error_file(index) is None:
            what = f"died: it {_in_words(process.exitcode)}; the other ranks were stopped"
            raise self._error(RankDiedError, index, what)
        # Have torch raise the exception of this process, not of the first in its list.
        self._context.sentinels.clear()
        self._context.sentinels[process.sentinel] = index
        self._context.join()

    def _error(self, kind: type[RankFailedError], index: int, what: str) -> RankFailedError:
        host = socket.gethostname()
        pid = self.processes[index].pid
        return kind(
            f"local rank {index} (host {host}, pid {pid}) {what}",
            rank=self._first_rank + index,
            host=host,
            pid=pid,
        )


def _stop(processes: Sequence[Any], seconds: float, save_within: float) -> list[int]:
    """Stop processes that are still running after some seconds, and return their numbers.

    They get SIGTERM, and those that are not saving then exit. Those that still run
    after ``save_within`` are killed.
    """
    try:
        running = _wait_for_exits(processes, seconds)
        for index in running:
            processes[index].terminate()  # a second SIGINT would interrupt a save
        _wait_for_exits(processes, save_within)
    finally:
        for process in processes:
            process.kill()
        _wait_for_exits(processes, _END_WITHIN)
    return running


def _wait_for_exits(processes: Sequence[Any], seconds: float) -> list[int]:
    """Wait up to ``seconds``, and return the numbers of processes that still run."""
    deadline = time.monotonic() + seconds
    while True:
        running = [index for index, process in enumerate(processes) if _status_of(process) is None]
        if not running or time.monotonic() >= deadline:
            return running
        time.sleep(_LOOK_EVERY)


def _status_of(process: Any) -> int | None:
    """Return the exit status of a process; ``None`` while it is running."""
    is_script = isinstance(process, subprocess.Popen)
    status: int | None = process.poll() if is_script else process.exitcode
    return status


def _in_words(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
