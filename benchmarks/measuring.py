"""Shared parts of all benchmarks: ranks in separate processes, kinds that take turns,
tables, and results as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from importlib import metadata
from pathlib import Path
from socket import socket
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tables import markdown

T = TypeVar("T")
Figures = dict[str, float]
Results = dict[str, dict[str, list[float]]]  # kind, figure, values


# Figures and tables.


@dataclass(frozen=True)
class Spread:
    """A median with the lowest and highest value; `values` are missing where only those
    three were kept.
    """

    median: float
    low: float
    high: float
    digits: int
    values: tuple[float, ...] = ()


def spread(values: Sequence[float]) -> Spread:
    """Return the median of values and their range, shown with three digits that count."""
    middle = statistics.median(values)
    digits = 2 - math.floor(math.log10(abs(middle))) if middle else 0
    return Spread(middle, min(values), max(values), max(0, min(3, digits)), tuple(values))


def ratio(mine: Sequence[float], theirs: Sequence[float]) -> Spread:
    """Return the ratios within each repeat."""
    return spread([one / other for one, other in zip(mine, theirs, strict=True)])


def power(number: int) -> str:
    """Return a number as a power of ten: 1e8."""
    return f"{number:.0e}".replace("+0", "").replace("+", "")


@dataclass(frozen=True)
class Table:
    """A table of results; the first column's name has the quantity and its unit."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]  # numbers, text and spreads


# What a script is asked to do.


@dataclass(frozen=True)
class Effort:
    """How much is to be measured."""

    quick: bool
    given_repeats: int | None

    def repeats(self, usual: int) -> int:
        return 1 if self.quick else self.given_repeats or usual

    def choose(self, usual: T, *, quick: T) -> T:
        return quick if self.quick else usual


def main(description: str | None, measurements: dict[str, Callable[[Effort], Table]]) -> None:
    """Measure what the command line selects, print the tables, and write them to
    `--json`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("which", nargs="*", help=f"of {', '.join(measurements)} (default: all)")
    parser.add_argument("--repeats", type=int, help="instead of each measurement's own number")
    parser.add_argument("--quick", action="store_true", help="once and small, to see that it works")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write results, machine and versions"
    )
    chosen = parser.parse_args()
    unknown = set(chosen.which) - set(measurements)
    if unknown:
        parser.error(
            f"no measurement {', '.join(sorted(unknown))}; choose from {', '.join(measurements)}"
        )
    tables = []
    for name in chosen.which or measurements:
        table = measurements[name](Effort(chosen.quick, chosen.repeats))
        tables.append(asdict(table))
        print(f"\n{markdown(table.columns, tables[-1]['rows'])}", flush=True)
    if chosen.json:
        chosen.json.write_text(
            json.dumps(record(tables, quick=chosen.quick), indent=1, ensure_ascii=False) + "\n"
        )


def record(tables: list[dict[str, Any]], *, quick: bool) -> dict[str, Any]:
    """Return what the JSON file holds."""
    names = ("lightning-ddp-ext", "lightning", "torch", "numpy")
    machine = {"cores": os.cpu_count(), "processor": platform.machine(), "load": os.getloadavg()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    return {
        "date": date.today().isoformat(),
        "commit": commit(),
        "quick": quick,
        "machine": machine,
        "versions": {
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in names},
        },
        "tables": {table.pop("name"): table for table in tables},
    }


def commit() -> str:
    """Return the commit that is measured, with ``+`` if the package or a script differs."""

    def answer(*arguments: str) -> str:
        directory = Path(__file__).parent.parent
        asked = ["git", *arguments]
        found = subprocess.run(asked, cwd=directory, capture_output=True, text=True, check=True)
        return found.stdout.strip()

    try:
        commit = answer("describe", "--always")
        changed = answer("status", "--porcelain", "lightning_ddp_ext", "benchmarks/*.py")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}+" if changed else commit


# Turns, and ranks that are forked from a process that has imported everything.


def take_turns(kinds: dict[str, Callable[[], Figures]], repeats: int) -> Results:
    """Run each kind once in each repeat, beginning with another one each time."""
    results: Results = {kind: defaultdict(list) for kind in kinds}
    names = list(kinds)
    for repeat in range(repeats):
        begin = repeat % len(names)
        for kind in names[begin:] + names[:begin]:
            for figure, value in kinds[kind]().items():
                results[kind][figure].append(value)
    return results


def on_ranks(
    work: Callable[[int, Path], Any],
    world_size: int,
    *,
    ends_like_a_script: bool = False,
    seconds: float = 900,
) -> list[Any]:
    """Return what ``work(rank, directory)`` returns on each rank, in processes that are
    forked for it.
    """
    with scratch_directory() as directory:

        def one(rank: int) -> None:
            torch.set_num_threads(1)
            (directory / f"{rank}.json").write_text(json.dumps(work(rank, directory)))

        output = directory / "output"
        pids = fork_ranks(world_size, one, ends_like_a_script=ends_like_a_script, output=output)
        ended = statuses(pids, seconds)
        if any(ended):
            raise SystemExit(f"ranks ended with {ended}:\n{output.read_text()[-4000:]}")
        return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(world_size)]


def on_rank_zero(work: Callable[[int, Path], T], world_size: int = 2) -> T:
    """Run ``work(rank, directory)`` on each rank, and return the result of rank 0."""
    first: T = on_ranks(work, world_size)[0]
    return first


def alone(work: Callable[[], Figures]) -> Callable[[], Figures]:
    """Return a function that runs ``work`` in a separate process."""
    return partial(on_rank_zero, lambda rank, directory: work(), 1)


def open_group(rank: int, world_size: int, directory: Path) -> None:
    """Open torch's process group on a rank, over gloo, by a file in the directory."""
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size
    )


def fork_ranks(
    world_size: int,
    work: Callable[[int], None],
    *,
    ends_like_a_script: bool = True,
    output: Path | str = os.devnull,
) -> list[int]:
    """Run ``work(rank)`` in processes forked from this one, with the variables of a
    launcher; their process ids.

    Each ends as a script does, through the interpreter's whole finalisation, since that
    is where processes crash; or immediately, if only earlier work is measured.
    """
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": str(world_size),
    }
    pids = []
    for rank in range(world_size):
        pid = os.fork()
        if pid == 0:
            os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank))
            sys.stdout = sys.stderr = open(output, "a")  # noqa: SIM115
            os.dup2(sys.stdout.fileno(), 1)
            os.dup2(sys.stdout.fileno(), 2)
            run_rank(work, rank, ends_like_a_script)
        pids.append(pid)
    return pids


def run_rank(work: Callable[[int], None], rank: int, ends_like_a_script: bool) -> None:
    """Do a forked process's work, and end it."""
    if ends_like_a_script:
        work(rank)
        sys.exit(0)
    try:
        work(rank)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def statuses(pids: Sequence[int], seconds: float = 60.0) -> list[int]:
    """Return exit statuses, signals as negative numbers; processes that hang are killed
    and count as such.
    """
    moment = time.monotonic() + seconds
    found: dict[int, int] = {}
    while len(found) < len(pids):
        for pid in set(pids) - found.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                found[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > moment:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return [found[pid] for pid in pids]


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Yield a temporary directory that only this process removes, and not forked ones,
    which also leave the block.
    """
    owner = os.getpid()
    directory = tempfile.mkdtemp(prefix="benchmark-")
    try:
        yield Path(directory)
    finally:
        if os.getpid() == owner:
            shutil.rmtree(directory)


def free_port() -> str:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
