"""Measure the launch, end and death of ranks, beside stock Lightning in the same run.

    python benchmarks/launching.py                      # everything, about 11 minutes on 2 cores
    python benchmarks/launching.py start --repeats 1    # one table

Ranks on one machine share its cores: read ratios rather than seconds.
"""

from __future__ import annotations

import compileall
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
from measuring import (
    Effort,
    Figures,
    Table,
    fork_ranks,
    main,
    ratio,
    scratch_directory,
    spread,
    statuses,
    take_turns,
)
from training import Net, make_trainer

import lightning_ddp_ext  # also for the ranks that are forked from this process

WORKER = Path(__file__).with_name("worker.py")
IMPORT = """
import time, lightning, lightning.pytorch
from memory import MIB, status
before, begin = status("RssAnon:", "RssShmem:"), time.process_time()
import lightning_ddp_ext
print((time.process_time() - begin) * 1000, (status("RssAnon:", "RssShmem:") - before) / MIB)
"""


@dataclass(frozen=True)
class Start:
    """A way to start the worker's ranks."""

    strategy: str
    by_torchrun: bool = False


STARTS = {
    "stock `ddp`": Start("ddp"),
    "`ddp_ext`": Start("ddp_ext"),
    "stock `ddp_spawn`": Start("ddp_spawn"),
    "`ddp_ext_spawn`": Start("ddp_ext_spawn"),
    "stock `ddp_fork`": Start("ddp_fork"),
    "`ddp_ext_fork`": Start("ddp_ext_fork"),
    "`ddp_ext_forkserver`, safe with CUDA": Start("ddp_ext_forkserver"),
    "stock `ddp`, torchrun": Start("ddp", by_torchrun=True),
    "`ddp_ext`, torchrun": Start("ddp_ext", by_torchrun=True),
}
DEATHS = {
    "plain script": Start("ddp_ext"),
    "spawn": Start("ddp_ext_spawn"),
    "fork": Start("ddp_ext_fork"),
    "forkserver": Start("ddp_ext_forkserver"),
    "torchrun": Start("ddp_ext", by_torchrun=True),
}


@contextmanager
def started(
    start: Start, world_size: int, *, endless: bool = False
) -> Iterator[tuple[psutil.Popen, Path]]:
    """Start the worker; each rank writes a file into the directory when its first step
    begins, and its output into ``output``.
    """
    command = [sys.executable]
    if start.by_torchrun:
        command += ["-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
    command += [str(WORKER), start.strategy, str(world_size)]
    if endless:
        command.append("endless")
    with scratch_directory() as directory:
        environment = {**os.environ, "FIRST_STEP_DIRECTORY": str(directory)}
        with (directory / "output").open("w") as output:
            run = psutil.Popen(command, env=environment, stdout=output, stderr=output)
        yield run, directory


def first_steps(directory: Path) -> list[list[str]]:
    """Return the moment of each rank's first step, and its process id, in the order of
    the ranks.
    """
    return [path.read_text().split() for path in sorted(directory.glob("*.step"))]


def seconds_to_first_step(world_size: int, start: Start) -> Figures:
    begin = time.monotonic()
    with started(start, world_size) as (run, directory):
        if run.wait(timeout=180) != 0:
            output = (directory / "output").read_text()
            raise SystemExit(f"{start} ended with {run.returncode}:\n{output[-4000:]}")
        moments = [float(moment) for moment, _ in first_steps(directory)]
    assert len(moments) == world_size, moments
    return {"seconds": max(moments) - begin}


def measure_start(effort: Effort) -> Table:
    """Return seconds from the start of the script until the last rank begins its first
    training step.
    """
    world_sizes = effort.choose((2, 4), quick=(2,))
    names = effort.choose(list(STARTS), quick=["stock `ddp_fork`", "`ddp_ext_fork`"])
    rows: dict[str, list[object]] = {name: [name] for name in names}
    compile_sources()
    for world_size in world_sizes:
        kinds: dict[str, Callable[[], Figures]] = {
            name: partial(seconds_to_first_step, world_size, STARTS[name]) for name in names
        }
        results = take_turns(kinds, effort.repeats(3))
        for name in names:
            seconds = results[name]["seconds"]
            stock = results[names[0]]["seconds"]
            rows[name] += [spread(seconds), f"{ratio(seconds, stock).median:.2f}"]
    columns = [
        "seconds from launch to the first step",
        *(c for n in world_sizes for c in (f"{n} ranks", "× plain `ddp`")),
    ]
    return Table("start", columns, list(rows.values()))


def import_once() -> Figures:
    command = [sys.executable, "-c", IMPORT]
    ran = subprocess.run(command, cwd=WORKER.parent, capture_output=True, text=True, check=True)
    milliseconds, mebibytes = map(float, ran.stdout.split())
    return {"ms": milliseconds, "MiB": mebibytes}


def measure_imports(effort: Effort) -> Table:
    """Measure the time and memory of importing the package in a process that has
    imported Lightning.
    """
    compile_sources()
    found = take_turns({"ours": import_once}, effort.repeats(7))["ours"]
    row = [
        "`import lightning_ddp_ext` after `import lightning`",
        spread(found["ms"]),
        spread(found["MiB"]),
    ]
    return Table("imports", ["processor time and memory", "ms", "MiB"], [row])


def compile_sources() -> None:
    """Compile what an installation from a wheel would have compiled; each process would
    do it again otherwise.
    """
    for directory in (Path(lightning_ddp_ext.__file__).parent, WORKER.parent):
        compileall.compile_dir(directory, quiet=1)


def seconds_until_exit(start: Start, world_size: int, victim: int) -> float:
    """Measure the time from SIGKILL to one rank in training until the last process
    exited.
    """
    with started(start, world_size, endless=True) as (run, directory):
        while len(first_steps(directory)) < world_size:
            time.sleep(0.05)
            assert run.poll() is None, "the run ended before every rank had trained a step"
        everyone = [run, *run.children(recursive=True)]
        os.kill(int(first_steps(directory)[victim][1]), signal.SIGKILL)
        begin = time.monotonic()
        while any(is_running(process) for process in everyone):
            run.poll()
            time.sleep(0.01)
            assert time.monotonic() - begin < 120, "processes are left"
        return time.monotonic() - begin


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def measure_deaths(effort: Effort) -> Table:
    """Measure one kill of each rank."""
    world_size = effort.choose(4, quick=2)
    rows = []
    for name in effort.choose(list(DEATHS), quick=["fork"]):
        found = [
            [seconds_until_exit(DEATHS[name], world_size, victim) for _ in range(effort.repeats(1))]
            for victim in range(world_size)
        ]
        rows.append(
            [name, f"{statistics.median(map(max, found)):.1f}", f"{max(map(max, found)):.1f}"]
        )
    title = f"seconds until the last process exits, after SIGKILL of each of {world_size} ranks"
    return Table("deaths", [title, "median", "longest"], rows)


def measure_ends(effort: Effort) -> Table:
    """Return the exit statuses of ranks whose training succeeded."""

    def run(strategy: str) -> Figures:
        pids = fork_ranks(2, lambda rank: make_trainer(strategy, 2, max_steps=4).fit(Net()))
        return {"failed": any(statuses(pids))}

    kinds = {"stock `ddp`": partial(run, "ddp"), "`ddp_ext`": partial(run, "ddp_ext")}
    results = take_turns(kinds, effort.repeats(40))
    rows = [
        [name, f"{sum(found['failed']):.0f} of {len(found['failed'])}"]
        for name, found in results.items()
    ]
    return Table("ends", ["runs of 2 ranks over gloo", "ended with a status other than 0"], rows)


if __name__ == "__main__":
    main(
        __doc__,
        {
            "start": measure_start,
            "imports": measure_imports,
            "deaths": measure_deaths,
            "ends": measure_ends,
        },
    )
