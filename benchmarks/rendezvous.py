"""Start, rendezvous, death and end of ranks, beside stock Lightning in the same run; prints Markdown tables.

    python benchmarks/rendezvous.py                        # everything, about 25 minutes on 2 cores
    python benchmarks/rendezvous.py start --repeats 1      # one table

Stock Lightning and we take turns within each repeat, so that a noisy machine is noisy for both. Medians are followed
by the lowest and highest value. Ranks on one machine share its cores: read ratios rather than seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import lightning.pytorch  # noqa: F401  # the processes that are forked from this one are to find it imported
import psutil
import torch
import torch.distributed as dist
from measuring import fork_ranks, free_port, print_table, scratch_directory, spread, statuses
from worker import fit

from lightning_ddp_ext.rendezvous.endpoint import FileEndpoint, TcpEndpoint
from lightning_ddp_ext.rendezvous.init_method import File, parse
from lightning_ddp_ext.rendezvous.process_context import join
from lightning_ddp_ext.rendezvous.request import Request
from lightning_ddp_ext.world import World

WORKER = Path(__file__).with_name("worker.py")


# 1. How processes end.


def train_stock(rank: int) -> None:
    fit("ddp")


def train_ours(rank: int) -> None:
    fit("ddp_ext")


def measure_ends(repeats: int) -> None:
    """Exit statuses of ranks whose training has gone well."""
    ended: dict[str, list[list[int]]] = {"stock `ddp`": [], "`ddp_ext`": []}
    for _ in range(repeats):
        for runs, work in zip(ended.values(), (train_stock, train_ours), strict=True):
            pids = fork_ranks(2, work, MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port())
            runs.append(statuses(pids))
    print_table(
        f"How {repeats} runs of 2 ranks over gloo end",
        ("strategy", "runs with a status other than 0", "statuses seen"),
        [
            (
                name,
                f"{sum(any(run) for run in runs)} of {len(runs)}",
                sorted({status for run in runs for status in run}),
            )
            for name, runs in ended.items()
        ],
    )


# 2. From launch to the first training step.

STARTS: dict[str, tuple[list[str], str]] = {
    "stock `ddp`": ([], "ddp"),
    "`ddp_ext`": ([], "ddp_ext"),
    "stock `ddp_spawn`": ([], "ddp_spawn"),
    "`ddp_ext_spawn`": ([], "ddp_ext_spawn"),
    "stock `ddp_fork`": ([], "ddp_fork"),
    "`ddp_ext_fork`": ([], "ddp_ext_fork"),
    "`ddp_ext_forkserver`": ([], "ddp_ext_forkserver"),
    "stock `ddp`, torchrun": (["torchrun"], "ddp"),
    "`ddp_ext`, torchrun": (["torchrun"], "ddp_ext"),
}


def seconds_to_first_step(launcher: list[str], strategy: str, world_size: int) -> float:
    command = [sys.executable, str(WORKER), strategy, str(world_size)]
    if launcher:
        command[1:1] = ["-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
    with scratch_directory() as directory:
        begin = time.monotonic()
        subprocess.run(
            command,
            env={**os.environ, "FIRST_STEP_DIRECTORY": directory},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
            timeout=180,
        )
        moments = [float(path.read_text()) for path in Path(directory).iterdir()]
    assert len(moments) == world_size, moments
    return max(moments) - begin


def measure_starts(repeats: int, world_sizes: Sequence[int] = (2, 4, 8)) -> None:
    """Seconds from the start of the script until the last rank begins its first training step."""
    found: dict[tuple[str, int], list[float]] = {}
    for _ in range(repeats):
        for world_size in world_sizes:
            for name, (launcher, strategy) in STARTS.items():
                found.setdefault((name, world_size), []).append(seconds_to_first_step(launcher, strategy, world_size))

    def cell(name: str, world_size: int) -> str:
        values = found[name, world_size]
        ratio = statistics.median(values) / statistics.median(found["stock `ddp`", world_size])
        return f"{spread(values, 1)}, {ratio:.2f} ×"

    print_table(
        "Seconds from launch to the first training step, and relative to stock `ddp`",
        ("strategy", *(f"{world_size} ranks" for world_size in world_sizes)),
        [(name, *(cell(name, world_size) for world_size in world_sizes)) for name in STARTS],
    )


# 3. Rendezvous alone.


def measure_rendezvous(repeats: int, world_sizes: Sequence[int] = (2, 8, 16, 32)) -> None:
    """Milliseconds from the last rank's arrival until every rank has its group."""
    rows = []
    for world_size in world_sizes:
        found: dict[str, list[float]] = {"bare": [], "tcp": [], "file": []}
        for _ in range(repeats):
            for kind, values in found.items():
                values.append(milliseconds_to_meet(kind, world_size))
        bare = statistics.median(found["bare"])
        rows.append(
            (
                world_size,
                spread(found["bare"], 0),
                *(
                    f"{spread(found[kind], 0)}, +{statistics.median(found[kind]) - bare:.0f}"
                    for kind in ("tcp", "file")
                ),
            )
        )
    print_table(
        "Milliseconds from the last rank's arrival to a group on every rank, and over the bare one",
        ("ranks", "bare `init_process_group(tcp://)`", "ours, `tcp://`", "ours, `file://`"),
        rows,
    )


def milliseconds_to_meet(kind: str, world_size: int) -> float:
    with scratch_directory() as directory:
        port = free_port()

        def meet(rank: int) -> None:
            arrived = time.monotonic()
            (meet_bare if kind == "bare" else meet_ours)(rank, world_size, port, f"{directory}/store", kind)
            Path(directory, str(rank)).write_text(json.dumps([arrived, time.monotonic()]))
            while not all(Path(directory, str(other)).exists() for other in range(world_size)):
                time.sleep(0.01)  # nobody leaves, without a goodbye, while others are still in their first collective

        ended = statuses(fork_ranks(world_size, meet, ends_like_a_script=False))
        assert not any(ended), (kind, ended)
        moments = [json.loads(Path(directory, str(rank)).read_text()) for rank in range(world_size)]
    return 1000 * (max(end for _, end in moments) - max(arrival for arrival, _ in moments))


def meet_bare(rank: int, world_size: int, port: str, path: str, kind: str) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    dist.all_reduce(torch.ones(1))  # ours contains one, too; without it the group is not known to work


def meet_ours(rank: int, world_size: int, port: str, path: str, kind: str) -> None:
    join(request(rank, world_size, f"tcp://127.0.0.1:{port}" if kind == "tcp" else f"file://{path}"))


def request(rank: int, world_size: int, init_method: str, init_timeout: float = 60.0) -> Request:
    method = parse(init_method)
    return Request(
        world=World(
            rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, node_rank=0, source="bench"
        ),
        init_method=init_method,
        endpoint=FileEndpoint(method.path) if isinstance(method, File) else TcpEndpoint(method),  # type: ignore[arg-type]
        backend="gloo",
        device=torch.device("cpu"),
        timeout=None,
        init_timeout=timedelta(seconds=init_timeout),
    )


# 4. A file that killed ranks left.


def measure_stale_files(repeats: int) -> None:
    """Reuses of one file, each after a run whose ranks were killed."""
    failures, seconds = 0, []
    with scratch_directory() as directory:
        path = f"{directory}/store"

        def meet_and_hang(rank: int) -> None:
            meet_ours(rank, 2, "", path, "file")
            signal.pause()

        def meet_again(rank: int) -> None:
            meet_ours(rank, 2, "", path, "file")

        for number in range(repeats):
            killed = fork_ranks(2, meet_and_hang)
            wait_until_published(path, 0.01 * (number % 7))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            statuses(killed)
            begin = time.monotonic()
            failures += any(statuses(fork_ranks(2, meet_again)))
            seconds.append(time.monotonic() - begin)
    print_table(
        "Reuse of a `file://` that killed ranks left",
        ("reuses", "failures", "seconds until both processes had ended"),
        [(repeats, failures, spread(seconds))],
    )


def wait_until_published(path: str, seconds: float) -> None:
    """Wait until rank 0 has published its address, and a little longer: the kill comes at different points."""
    while not os.path.exists(path):
        time.sleep(0.001)
    time.sleep(seconds)


# 5. Death.

DEATHS: dict[str, tuple[list[str], str]] = {
    "plain script": ([], "ddp_ext"),
    "spawn": ([], "ddp_ext_spawn"),
    "fork": ([], "ddp_ext_fork"),
    "forkserver": ([], "ddp_ext_forkserver"),
    "torchrun": (["torchrun"], "ddp_ext"),
}


def measure_deaths(repeats: int, world_size: int = 4) -> None:
    """Seconds from SIGKILL to one rank in training until the last process of the run is gone."""
    rows = []
    for name, (launcher, strategy) in DEATHS.items():
        found = [
            [seconds_until_gone(launcher, strategy, world_size, victim) for _ in range(repeats)]
            for victim in range(world_size)
        ]
        rows.append((name, *(spread(values, 1) for values in found), f"{max(map(max, found)):.1f}"))
    print_table(
        f"Seconds from SIGKILL to one of {world_size} ranks in training until the last process is gone",
        ("started by", *(f"rank {victim} killed" for victim in range(world_size)), "longest"),
        rows,
    )


def seconds_until_gone(launcher: list[str], strategy: str, world_size: int, victim: int) -> float:
    command = [sys.executable, str(WORKER), strategy, str(world_size), "endless"]
    if launcher:
        command[1:1] = ["-m", "torch.distributed.run", "--nproc-per-node", str(world_size)]
    with scratch_directory() as directory:
        mark = os.path.basename(directory)
        run = subprocess.Popen(
            command,
            env={**os.environ, "FIRST_STEP_DIRECTORY": directory, "BENCHMARK_MARK": mark},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while len(list(Path(directory).glob("*.pid"))) < world_size:
            time.sleep(0.05)
            assert run.poll() is None, "the run ended before every rank had trained a step"
        everyone = [process for process in psutil.process_iter() if is_of_run(process, mark)]
        os.kill(int(Path(directory, f"{victim}.pid").read_text()), signal.SIGKILL)
        begin = time.monotonic()
        while any(is_running(process) for process in everyone):
            run.poll()
            time.sleep(0.01)
            assert time.monotonic() - begin < 120, "processes are left"
        return time.monotonic() - begin


def is_of_run(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get("BENCHMARK_MARK") == mark
    except (psutil.Error, OSError):
        return False


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


MEASUREMENTS: dict[str, tuple[Callable[..., None], int]] = {
    "ends": (measure_ends, 200),
    "start": (measure_starts, 3),
    "rendezvous": (measure_rendezvous, 11),
    "stale": (measure_stale_files, 20),
    "death": (measure_deaths, 2),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=list(MEASUREMENTS), help=f"of {', '.join(MEASUREMENTS)}")
    parser.add_argument("--repeats", type=int, help="instead of each measurement's own number")
    parser.add_argument("--ranks", type=int, nargs="*", help="world sizes of `start` and `rendezvous`")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name in args.what:
        measure, repeats = MEASUREMENTS[name]
        sizes = {"world_sizes": args.ranks} if args.ranks and name in ("start", "rendezvous") else {}
        measure(args.repeats or repeats, **sizes)


if __name__ == "__main__":
    main()
