"""Join the ranks that a process started as functions, and raise the first failure."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import connection
from typing import Any

from lightning_ddp_ext.errors import RankDiedError, RankFailedError
from lightning_ddp_ext.supervision.process_exits import (
    END_WITHIN,
    status_in_words,
    stop_processes,
)
from lightning_ddp_ext.supervision.signals import STOP_STATUSES, StopSignals

# Seconds in which the ranks may exit after Ctrl-C, before those that are not saving are stopped.
_END_WITHIN_AFTER_INTERRUPT = 2.5


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
            stop_processes(processes, stop_within if is_stopping else END_WITHIN, stop_within)
        return failed
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            _pass_on(processes, signal.SIGTERM)  # in a notebook, it reaches this process only
        stop_processes(processes, _END_WITHIN_AFTER_INTERRUPT, stop_within)
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
        what = f"died: it {status_in_words(status)}; the other ranks were stopped"
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
