"""Find and end the processes that a test has started, also when their parent is gone, whatever session they are in."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Iterable

import psutil

# In the environment of every process that a test run starts; that of a script begins with that of the test run.
MARK = "TEST_HARNESS_MARK"


def marked(mark: str) -> list[psutil.Process]:
    """The processes whose environment, as they were started with it, carries a mark that begins with this one."""
    beginning = f"\0{MARK}={mark}".encode()
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.NoSuchProcess), open(f"/proc/{pid}/environ", "rb") as variables:
            if beginning in b"\0" + variables.read():
                found.append(psutil.Process(pid))
    return found


def wait_until_gone(find: Callable[[], Iterable[psutil.Process]], seconds: float) -> list[psutil.Process]:
    """Wait until ``find`` finds nothing; what it finds after ``seconds``."""
    deadline = time.monotonic() + seconds
    left = list(find())
    while left and time.monotonic() < deadline:
        _wait_for_an_end(left, deadline - time.monotonic())
        left = list(find())
    return left


def kill_until_gone(find: Callable[[], Iterable[psutil.Process]], seconds: float = 5.0) -> list[psutil.Process]:
    """Kill what ``find`` finds, and what that starts in the meantime; what is there after ``seconds`` all the same."""
    deadline = time.monotonic() + seconds
    while (left := list(find())) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _wait_for_an_end(left, deadline - time.monotonic())
    return left


def name_of(process: psutil.Process) -> str:
    """A line that says which process this is."""
    with contextlib.suppress(psutil.Error):
        return f"process {process.pid}: {' '.join(process.cmdline())[:200]}"
    return f"process {process.pid}"


def _wait_for_an_end(processes: Iterable[psutil.Process], seconds: float) -> None:
    """Wait until one of them has ended, whose child it may be; takes no exit status away from ``subprocess``."""
    poll = select.poll()
    with contextlib.ExitStack() as stack:
        for process in processes:
            try:
                descriptor = os.pidfd_open(process.pid)
            except ProcessLookupError:
                return
            stack.callback(os.close, descriptor)
            poll.register(descriptor, select.POLLIN)
        poll.poll(max(0.0, seconds) * 1000)
