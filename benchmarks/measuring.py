"""What all benchmarks need: tables, medians, and ranks that are forked from a process that has imported everything."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    print(f"\n**{title}**\n\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")
    sys.stdout.flush()


def spread(values: Sequence[float], digits: int = 2) -> str:
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


@contextmanager
def scratch_directory() -> Iterator[str]:
    """A temporary directory that this process removes, and not the ones forked from it, which leave the block, too."""
    owner, directory = os.getpid(), tempfile.mkdtemp(prefix="benchmark-")
    try:
        yield directory
    finally:
        if os.getpid() == owner:
            shutil.rmtree(directory)


def fork_ranks(
    world_size: int, work: Callable[[int], None], *, ends_like_a_script: bool = True, **variables: str
) -> list[int]:
    """Run ``work(rank)`` in processes forked from this one, which has imported everything; their process ids.

    Each ends as a script does, through the interpreter's whole finalisation, since that is where processes crash;
    or at once, where only what came before is measured.
    """
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            os.environ.update(variables, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
            os.dup2(sys.stdout.fileno(), 1)
            os.dup2(sys.stdout.fileno(), 2)
            work(rank)
            if not ends_like_a_script:
                os._exit(0)
            sys.exit(0)
        pids.append(pid)
    return pids


def statuses(pids: Sequence[int], seconds: float = 60.0) -> list[int]:
    """Exit statuses, by signal as negative numbers; processes that hang are killed and count as such."""
    moment = time.monotonic() + seconds
    found = {}
    while len(found) < len(pids):
        for pid in pids:
            if pid not in found:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    found[pid] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > moment:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return [found[pid] for pid in pids]


def free_port() -> str:
    from socket import socket

    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
