"""Wait for the ranks that this process started, stop late ones, and report failures.

A script that runs itself again is local rank 0. It waits for the others at its exit. A
process that starts functions is not a rank. It waits for them in the Trainer's call, at
first without a limit. Then ranks get time in three phases:

========  ===============================  =============================================
phase     lasts at most                    afterwards, the ranks that still run
========  ===============================  =============================================
exiting   see below                        get SIGTERM; those that are not saving exit
saving    ``save_within``                  are killed
killed    5 s                              may be left behind by a script
========  ===============================  =============================================

The first phase begins with

- the exit of a script: it lasts ``exit_within``, or 5 s if the script has raised;
- the first failure of a function: 5 s, or ``stop_within`` if a signal stopped this rank,
  since the others then stop with it;
- Ctrl-C, or another exception of the process that started functions: 2.5 s.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

from torch.multiprocessing import ProcessContext

from lightning_ddp_ext.errors import RankDiedError, RankFailedError
from lightning_ddp_ext.supervision.signals import STOP_STATUSES, StopSignals

Process: TypeAlias = subprocess.Popen[bytes] | BaseProcess

# All in seconds. The phase of exiting, after the first failure or after Ctrl-C.
_EXIT_AFTER_FAILURE = 5.0
_EXIT_AFTER_INTERRUPT = 2.5
# A stuck child may delay the exit of this process for this time. It also applies after
# sys.exit(1), which an exit handler cannot distinguish from success.
EXIT_WITHIN = 600.0
# A killed process exits late, or never, if a driver or a network file system is stuck.
_EXIT_AFTER_KILL = 5.0
_LOOK_EVERY = 0.02


# Ranks of scripts.


@dataclass(frozen=True)
class ChildScripts:
    """The ranks of this node that local rank 0 started by running its script again.

    Args:
        children: their processes, in the order of their local ranks, which start at 1.
        variables: the environment variables that this process shares with them in a run.
        exit_within: the seconds that this process waits for them at exit.
        save_within: the seconds until children that are still saving are then killed.
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
                    f" {_status_in_words(status)} before all ranks had connected; look at its"
                    " output"
                )
        return None

    def join_at_exit(self) -> None:
        """Wait for the children for a limited time, stop those that still run, and report.

        The time is shorter after an exception of this rank. The other ranks may have
        caused it, or fail because of it, so only killed ones are then reported.
        """
        # Python stores an exception other than SystemExit before it calls exit handlers.
        has_raised = getattr(sys, "last_value", None) is not None
        seconds = _EXIT_AFTER_FAILURE if has_raised else self.exit_within
        stopped: list[Process] = []
        with suppress(KeyboardInterrupt):  # _stop_late has then killed the children
            stopped = _stop_late(self.children, seconds, self.save_within)
        expected = range(256) if has_raised else {0, *STOP_STATUSES}
        for local_rank, child in enumerate(self.children, start=1):
            status = child.poll()  # negative after a signal; None if it could not be killed
            if status not in expected:
                verdict = (
                    f"did not exit within {seconds:g} s and was stopped"
                    if child in stopped and status is not None
                    else _status_in_words(status)
                )
                sys.stderr.write(f"local rank {local_rank} (pid {child.pid}) {verdict}\n")


_started: ChildScripts | None = None


def started_ranks() -> ChildScripts | None:
    """Return the ranks that this process started by running its script again, if any."""
    return _started


def record_started(started: ChildScripts) -> None:
    """Record the ranks that this process started, and join them at exit; called once."""
    global _started
    _started = started
    atexit.register(started.join_at_exit)


# Ranks of functions.


def join_ranks(
    context: ProcessContext, *, results_file: str, stop_within: float, first_rank: int
) -> None:
    """Wait for the ranks of this node, which run as processes, and pass SIGTERM on to them.

    After the first failure, the other ranks get some time to print why they exit.

    Args:
        context: torch's object for the started processes, in the order of their local
            ranks, which start at 0.
        results_file: the file that local rank 0 writes if it succeeds.
        stop_within: the seconds in which the ranks must stop together after a signal,
            or save after a failure.
        first_rank: the global rank of local rank 0, for errors.

    Raises:
        SystemExit: a signal stopped the ranks.
        RankDiedError: the first process that failed was killed.
        RankFailedError: local rank 0 left without results.
        ProcessRaisedException, ProcessExitedException: torch's errors for the first
            process that failed. If another rank caused its exception, the traceback of
            that rank is the cause.
    """
    signals = StopSignals(partial(_pass_on, context.processes))
    signals.install(signal.SIGTERM)
    try:
        failed = _run_to_end(context.processes, stop_within)
    finally:
        signals.restore()
    if failed is not None:
        _raise_failure(context, failed, first_rank)
    elif not os.path.exists(results_file):  # Lightning would wait forever for the results
        raise _error_of(
            RankFailedError,
            context.processes[0],
            local_rank=0,
            first_rank=first_rank,
            finding="exited with status 0 before it finished its work; look for sys.exit() or an"
            " interrupt",
        )


def _run_to_end(processes: Sequence[BaseProcess], stop_within: float) -> int | None:
    """Wait until all processes exit, and stop those that run on after a failure.

    Return the local rank of the first process that failed, if any.
    """
    try:
        failed = _wait_for_failure(processes)
        if failed is not None:
            is_stopping = processes[failed].exitcode in STOP_STATUSES
            _stop_late(processes, stop_within if is_stopping else _EXIT_AFTER_FAILURE, stop_within)
        return failed
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            _pass_on(processes, signal.SIGTERM)  # in a notebook, it reaches this process only
        _stop_late(processes, _EXIT_AFTER_INTERRUPT, stop_within)
        raise


def _wait_for_failure(processes: Sequence[BaseProcess]) -> int | None:
    """Wait until one has failed or all have exited; return the failed local rank."""
    running: dict[Any, int] = {
        process.sentinel: local_rank for local_rank, process in enumerate(processes)
    }
    while running:
        for sentinel in connection.wait(list(running)):
            local_rank = running.pop(sentinel)
            processes[local_rank].join()
            if processes[local_rank].exitcode != 0:
                return local_rank
    return None


def _pass_on(processes: Sequence[BaseProcess], signum: int) -> None:
    """Pass a signal on to the first running rank, which makes all ranks stop.

    Called on the thread of ``StopSignals``, and on the main thread after Ctrl-C.
    """
    for process in processes:
        if process.exitcode is None and process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signum)
            return


def _raise_failure(context: ProcessContext, failed: int, first_rank: int) -> None:
    """Raise for the local rank that failed, as :func:`join_ranks` does.

    torch raises the error of any failed process whose sentinel, the descriptor by which
    it waits for the exit, is in its table. Several may have failed meanwhile, so only that
    of the first one is left there.
    """
    process = context.processes[failed]
    if process.exitcode in STOP_STATUSES:
        raise SystemExit(process.exitcode)
    if process.exitcode < 0:
        raise _error_of(
            RankDiedError,
            process,
            local_rank=failed,
            first_rank=first_rank,
            finding=f"died: it {_status_in_words(process.exitcode)}; the other ranks were stopped",
        )
    context.sentinels = {process.sentinel: failed}
    context.join()  # joins all processes, and always raises


def _error_of(
    kind: type[RankFailedError],
    process: BaseProcess,
    *,
    local_rank: int,
    first_rank: int,
    finding: str,
) -> RankFailedError:
    host = socket.gethostname()
    return kind(
        f"local rank {local_rank} (host {host}, pid {process.pid}) {finding}",
        rank=first_rank + local_rank,
        host=host,
        pid=process.pid,
    )


# Ranks of both.


def _stop_late(processes: Sequence[Process], seconds: float, save_within: float) -> list[Process]:
    """Stop processes that are still running after some seconds, and return them.

    They get SIGTERM, and those that are not saving then exit. Those that still run
    after ``save_within`` are killed.
    """
    try:
        late = _wait_for_exits(processes, seconds)
        for process in late:
            process.terminate()  # a second SIGINT would interrupt a save
        _wait_for_exits(processes, save_within)
    finally:
        for process in processes:
            process.kill()
        _wait_for_exits(processes, _EXIT_AFTER_KILL)
    return late


def _wait_for_exits(processes: Sequence[Process], seconds: float) -> list[Process]:
    """Wait up to ``seconds``, and return the processes that still run."""
    deadline = time.monotonic() + seconds
    while True:
        running = [process for process in processes if _status_of(process) is None]
        if not running or time.monotonic() >= deadline:
            return running
        time.sleep(_LOOK_EVERY)


def _status_of(process: Process) -> int | None:
    """Return the exit status of a process; ``None`` while it is running."""
    return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode


def _status_in_words(status: int | None) -> str:
    """Describe an exit status, ``None`` for a process that was killed and still runs.

    >>> _status_in_words(1)
    'exited with status 1'
    >>> _status_in_words(-9)
    'was killed by SIGKILL'
    """
    if status is None:
        return "is still running although it was killed"
    if status >= 0:
        return f"exited with status {status}"
    names = (each.name for each in signal.Signals if each == -status)
    return f"was killed by {next(names, f'signal {-status}')}"
