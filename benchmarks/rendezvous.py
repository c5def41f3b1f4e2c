"""Measure how ranks connect: the rendezvous alone, with a file of killed ranks, and the
channel with many ranks.

    python benchmarks/rendezvous.py                     # about 1 minute on 2 idle cores
    python benchmarks/rendezvous.py scale --repeats 1   # one table

Every rank is forked from a process that has imported torch. What one host of few cores
needs for 512 ranks is more than a cluster would need: rank 0's own CPU time is what
carries over.

torch's store looks up the name of each rank's address. Where the name server answers
only some questions of a burst, each of the others takes 5 s, which is not what is
measured here. The script therefore starts again in a network namespace, where names do
not resolve, if it may create one.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from measuring import (
    Effort,
    Figures,
    Table,
    fork_ranks,
    free_port,
    main,
    on_ranks,
    scratch_directory,
    spread,
    statuses,
    take_turns,
)

from lightning_ddp_ext.rendezvous import handshake, process_context
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.endpoint import FileEndpoint, TcpEndpoint
from lightning_ddp_ext.rendezvous.init_method import File, parse
from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.rendezvous.request import Request
from lightning_ddp_ext.world import World

LIMIT = 120.0  # seconds
BARRIERS = 10


def request(rank: int, world_size: int, init_method: str) -> Request:
    world = World(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        node_rank=0,
        source="bench",
    )
    method = parse(init_method)
    return Request(
        world=world,
        init_method=init_method,
        make_endpoint=lambda deadline: (
            FileEndpoint(method.path) if isinstance(method, File) else TcpEndpoint(method)  # type: ignore[arg-type]
        ),
        backend="gloo",
        device=torch.device("cpu"),
        timeout=None,
        init_timeout=timedelta(seconds=LIMIT),
    )


# The rendezvous alone.


def join(kind: str, rank: int, world_size: int, directory: Path, port: str) -> None:
    if kind == "bare torch":
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size
        )
        dist.all_reduce(torch.ones(1))  # ours also contains one, which shows that the group works
    else:
        method = f"tcp://127.0.0.1:{port}" if kind == "`tcp://`" else f"file://{directory}/store"
        process_context.join(request(rank, world_size, method))


def milliseconds_to_join(kind: str, world_size: int) -> Figures:
    port = free_port()

    def work(rank: int, directory: Path) -> tuple[float, float]:
        arrived = time.monotonic()
        join(kind, rank, world_size, directory, port)
        joined = time.monotonic()
        Path(directory, f"{rank} is there").touch()
        while not all(Path(directory, f"{other} is there").exists() for other in range(world_size)):
            time.sleep(0.01)  # no rank leaves while others are still in their first collective
        return arrived, joined

    moments = on_ranks(work, world_size)
    return {
        "ms": 1000 * (max(joined for _, joined in moments) - max(arrived for arrived, _ in moments))
    }


def measure_rendezvous(effort: Effort) -> Table:
    """Measure the time from the last rank's arrival until every rank has its group."""
    kinds = ("bare torch", "`tcp://`", "`file://`")
    rows = []
    for world_size in effort.choose((2, 8, 32), quick=(2,)):
        turns = {kind: partial(milliseconds_to_join, kind, world_size) for kind in kinds}
        results = take_turns(turns, effort.repeats(5))
        rows.append([f"{world_size} ranks", *(spread(results[kind]["ms"]) for kind in kinds)])
    return Table(
        "rendezvous", ["milliseconds from the last rank's arrival to a group", *kinds], rows
    )


# A file that killed ranks left.


def measure_stale_files(effort: Effort) -> Table:
    """Count failed reuses of one file, each after a run whose ranks were killed at
    another point.
    """
    reuses = effort.repeats(20)
    failures = 0
    with scratch_directory() as directory:

        def run(rank: int, then: object = None) -> None:
            join("`file://`", rank, 2, directory, "")
            if then:
                signal.pause()

        for number in range(reuses):
            killed = fork_ranks(2, lambda rank: run(rank, signal.pause))
            while not (directory / "store").exists():
                time.sleep(0.001)
            time.sleep(0.01 * (number % 7))
            for pid in killed:
                os.kill(pid, signal.SIGKILL)
            statuses(killed)
            failures += any(statuses(fork_ranks(2, run)))
    return Table(
        "stale", ["reuses of a `file://` that killed ranks left", "failures"], [[reuses, failures]]
    )


# The control channel alone, at hundreds of ranks.


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def connect(rank: int, world_size: int, directory: Path) -> ProcessContext:
    """Measure the handshake alone, without a store and a process group."""
    wanted = request(rank, world_size, f"file://{directory}/rank-0")
    return ProcessContext(wanted, handshake.connect(wanted, Deadline(LIMIT)))


def handshake_barriers_and_a_death(world_size: int) -> Figures:
    """Run once; the last rank kills a child process that holds its connection."""

    def work(rank: int, directory: Path) -> Figures:
        began = time.monotonic()
        cpu = cpu_seconds()
        context = connect(rank, world_size, directory)
        found = {"began": began, "connected": time.monotonic(), "cpu": cpu_seconds() - cpu}
        context.barriers.enter("all are there")
        moment = time.monotonic()
        cpu = cpu_seconds()
        for number in range(BARRIERS):
            context.barriers.enter(f"barrier {number}")
        found["barrier"] = (time.monotonic() - moment) / BARRIERS
        found["barrier cpu"] = (cpu_seconds() - cpu) / BARRIERS
        if rank < world_size - 1:
            assert context.peers.wait(LIMIT) is not None
        found["end"] = time.monotonic()  # of the last rank; the others are notified
        return found

    found = on_ranks(work, world_size)
    return {
        "handshake": (
            max(each["connected"] for each in found) - max(each["began"] for each in found)
        ),
        "handshake cpu": 1e3 * found[0]["cpu"] / world_size,
        "barrier": 1e3 * found[0]["barrier"],
        "barrier cpu": 1e6 * found[0]["barrier cpu"] / world_size,
        "death": max(each["end"] for each in found[:-1]) - found[-1]["end"],
    }


def measure_scale(effort: Effort) -> Table:
    rows = []
    for world_size in effort.choose((64, 256, 512), quick=(4,)):
        run = partial(handshake_barriers_and_a_death, world_size)
        figures = take_turns({"ours": run}, effort.repeats(3))["ours"]
        rows.append([world_size, *map(spread, figures.values())])
    columns = [
        "ranks",
        "handshake, s from the last rank's start",
        "rank 0's CPU in it, ms a rank",
        "a barrier, ms",
        "rank 0's CPU in it, µs a rank",
        "s until the last rank detects a death",
    ]
    return Table("scale", columns, rows)


def enter_namespace() -> None:
    """Start this script again in a network namespace, if it may create one."""
    enter = ["unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"']
    try:
        is_allowed = subprocess.run([*enter, "sh", "true"], capture_output=True).returncode == 0
    except OSError:
        is_allowed = False
    if is_allowed and "IN_NAMESPACE" not in os.environ:
        os.environ["IN_NAMESPACE"] = "1"
        os.execvp(enter[0], [*enter, "sh", sys.executable, *sys.argv])


if __name__ == "__main__":
    enter_namespace()
    main(
        __doc__,
        {"rendezvous": measure_rendezvous, "stale": measure_stale_files, "scale": measure_scale},
    )
