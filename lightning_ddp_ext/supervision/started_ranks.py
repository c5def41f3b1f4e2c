"""Wait for the ranks that this process started, and stop with the one that started it.

A script that runs itself again is a rank itself: local rank 0. It waits for the others
at its exit. A process that starts functions waits for them in the Trainer's call.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
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
from pathlib import Path
from typing import Any, TypeAlias

from lightning_ddp_ext.errors import RankDiedError, RankFailedError
from lightning_ddp_ext.supervision.signals import STOP_STATUSES, StopSignals
from lightning_ddp_ext.threads import start_thread

Process: TypeAlias = subprocess.Popen[bytes] | BaseProcess

# The variable with the process id of the script that started this rank.
LAUNCHER_PID = "DDPX_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1  # from prctl.h

# Seconds in which the other ranks may exit after the first failure, before those that
# are not saving are stopped.
_END_WITHIN = 5.0
_LOOK_EVERY = 0.02  # seconds
# Seconds in which the ranks may exit after Ctrl-C, before those that are not saving are stopped.
_END_WITHIN_AFTER_INTERRUPT = 2.5
# Seconds for which a stuck child may delay the exit of this process. They also apply after
# sys.exit(1), which an exit handler cannot distinguish from success.
EXIT_WITHIN = 600.0


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
        seconds = _END_WITHIN if has_raised else self.exit_within
        stopped: list[int] = []
        with suppress(KeyboardInterrupt):  # _stop_processes has then killed the children
            stopped = _stop_processes(self.children, seconds, self.save_within)
        for index, child in enumerate(self.children):
            status = child.returncode
            verdict = _status_in_words(status)
            if index in stopped:
                verdict = f"did not exit within {seconds:g} s and was stopped"
            is_expected = status == 0 or status in STOP_STATUSES or (has_raised and status > 0)
            if not is_expected:
                sys.stderr.write(f"local rank {index + 1} (pid {child.pid}) {verdict}\n")


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


def join_ranks(context: Any, *, results_file: str, stop_within: float, first_rank: int) -> None:
    """Wait for the ranks of this node, which run as processes, and pass SIGTERM on to them.

    After the first failure, the other ranks get some time to print why they exit.

    Args:
        context: torch's object for the started processes.
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
        what = (
            "exited with status 0 before it finished its work; look for sys.exit() or an interrupt"
        )
        raise _error_of(RankFailedError, context.processes, 0, first_rank, what)


def _run_to_end(processes: Sequence[Any], stop_within: float) -> int | None:
    """Wait until all processes exit, and stop those that run on after a failure.

    Return the number of the first one that failed, if any.
    """
    try:
        failed = _wait_for_failure(processes)
        if failed is not None:
            is_stopping = processes[failed].exitcode in STOP_STATUSES
            _stop_processes(processes, stop_within if is_stopping else _END_WITHIN, stop_within)
        return failed
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            _pass_on(processes, signal.SIGTERM)  # in a notebook, it reaches this process only
        _stop_processes(processes, _END_WITHIN_AFTER_INTERRUPT, stop_within)
        raise


def _wait_for_failure(processes: Sequence[Any]) -> int | None:
    """Wait until a process has failed, and return its number, or until all have exited."""
    running = {process.sentinel: index for index, process in enumerate(processes)}
    while running:
        for sentinel in connection.wait(list(running)):
            index = running.pop(sentinel)
            processes[index].join()
            if processes[index].exitcode != 0:
                return index
    return None


def _pass_on(processes: Sequence[Any], signum: int) -> None:
    """Pass a signal on to the first running rank, which makes all ranks stop.

    The thread of ``StopSignals`` calls this, and the main thread after Ctrl-C.
    """
    for process in processes:
        if process.exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signum)
            return


def _raise_failure(context: Any, failed: int, first_rank: int) -> None:
    status = context.processes[failed].exitcode
    if status in STOP_STATUSES:
        raise SystemExit(status)
    if status < 0:
        what = f"died: it {_status_in_words(status)}; the other ranks were stopped"
        raise _error_of(RankDiedError, context.processes, failed, first_rank, what)
    context.sentinels = {context.processes[failed].sentinel: failed}
    context.join()  # raises the error of this process


def _error_of(
    kind: type[RankFailedError], processes: Sequence[Any], index: int, first_rank: int, what: str
) -> RankFailedError:
    host = socket.gethostname()
    pid = processes[index].pid
    return kind(
        f"local rank {index} (host {host}, pid {pid}) {what}",
        rank=first_rank + index,
        host=host,
        pid=pid,
    )


# Ranks of both.


def _stop_processes(processes: Sequence[Process], seconds: float, save_within: float) -> list[int]:
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


def _wait_for_exits(processes: Sequence[Process], seconds: float) -> list[int]:
    """Wait up to ``seconds``, and return the numbers of processes that still run."""
    deadline = time.monotonic() + seconds
    while True:
        running = [index for index, process in enumerate(processes) if _status_of(process) is None]
        if not running or time.monotonic() >= deadline:
            return running
        time.sleep(_LOOK_EVERY)


def _status_of(process: Process) -> int | None:
    """Return the exit status of a process; ``None`` while it is running."""
    return process.poll() if isinstance(process, subprocess.Popen) else process.exitcode


def _status_in_words(status: int) -> str:
    """Describe an exit status: "exited with status 1", "was killed by SIGKILL"."""
    if status >= 0:
        return f"exited with status {status}"
    names = (each.name for each in signal.Signals if each == -status)
    return f"was killed by {next(names, f'signal {-status}')}"


# The process that started this rank.


def stop_with_script() -> None:
    """Stop with the script that started this rank; called at the import.

    Do nothing in other processes.
    """
    if os.environ.get(LAUNCHER_PID) == str(os.getppid()):
        stop_with_parent()


def stop_with_launching_process() -> None:
    """Stop with the process that started this one with multiprocessing."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    stop_with_parent()
    if launcher.pid != os.getppid():  # a fork server is the parent, or the launcher has exited
        start_thread("ddpx-launcher", _stop_after, launcher)


def stop_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when its parent exits.

    The kernel sends it when the thread exits that started this process, so do nothing
    unless that is the parent's main thread.
    """
    parent = os.getppid()
    with suppress(OSError):  # the parent may be outside of this container, or hidden
        children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        if str(os.getpid()) in children:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has exited meanwhile
        _terminate()


def _stop_after(launcher: Any) -> None:
    launcher.join()
    _terminate()


def _terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def launcher_exit() -> str | None:
    """Describe the exit of the script that started this rank, if it has exited."""
    pid = os.environ.get(LAUNCHER_PID)
    if pid is None or Path(f"/proc/{pid}").exists():
        return None
    return f"the process that started this rank (pid {pid}) exited before all ranks had connected"
