"""Wait until processes exit, and stop those that do not."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from typing import TypeAlias

Process: TypeAlias = subprocess.Popen[bytes] | BaseProcess

# Seconds in which the other ranks may exit after the first failure, before those that
# are not saving are stopped.
END_WITHIN = 5.0
_LOOK_EVERY = 0.02  # seconds


def stop_processes(processes: Sequence[Process], seconds: float, save_within: float) -> list[int]:
    """Stop processes that are still running after some seconds, and return their numbers.

    They get SIGTERM, and those that are not saving then exit. Those that still run
    after ``save_within`` are killed.
    """
    try:
        running = wait_for_exits(processes, seconds)
        for index in running:
            processes[index].terminate()  # a second SIGINT would interrupt a save
        wait_for_exits(processes, save_within)
    finally:
        for process in processes:
            process.kill()
        wait_for_exits(processes, END_WITHIN)
    return running


def wait_for_exits(processes: Sequence[Process], seconds: float) -> list[int]:
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


def status_in_words(status: int) -> str:
    """Describe an exit status: "exited with status 1", "was killed by SIGKILL"."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"
