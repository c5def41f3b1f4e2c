"""The control channel at hundreds of ranks on one host, without process groups; prints Markdown tables.

    python benchmarks/scale.py                    # 64, 256 and 512 forked ranks, about 5 minutes on 2 idle cores
    python benchmarks/scale.py --ranks 64 --repeats 1

Every rank is a process that is forked from one that has imported torch. What one host of few cores needs for all of
them is more than a cluster would need: rank 0's own CPU time is what carries over.

torch's store looks up the name of each rank's address. Where the name server answers only some questions of a burst,
each of the others takes 5 s, which is not what is measured here. In a network namespace there is no name server:

    unshare -n sh -c "ip link set lo up; python benchmarks/scale.py"
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
from measuring import fork_ranks, print_table, scratch_directory, spread, statuses

from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.endpoint import FileEndpoint
from lightning_ddp_ext.rendezvous.process_context import ProcessContext, Start
from lightning_ddp_ext.rendezvous.request import Request
from lightning_ddp_ext.world import World

BARRIERS = 10
_LIMIT = 120.0


def connect(rank: int, world_size: int, path: str) -> ProcessContext:
    """The handshake alone."""
    world = World(
        rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, node_rank=0, source="bench"
    )
    request = Request(
        world=world,
        init_method=f"file://{path}",
        endpoint=FileEndpoint(path),
        backend="gloo",
        device=torch.device("cpu"),
        timeout=None,
        init_timeout=timedelta(seconds=_LIMIT),
    )
    start = Start()
    start.run(request, Deadline(_LIMIT))
    context = ProcessContext(request, start)
    context.peers.start()
    return context


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(world_size: int) -> dict[str, float]:
    """One run: handshake, barriers, and the death of the last rank."""
    with scratch_directory() as directory:

        def work(rank: int) -> None:
            began, cpu = time.monotonic(), cpu_seconds()
            context = connect(rank, world_size, f"{directory}/rank-0")
            found = {"began": began, "connected": time.monotonic(), "cpu": cpu_seconds() - cpu}
            context.barriers.enter("all are there")
            moment, cpu = time.monotonic(), cpu_seconds()
            for number in range(BARRIERS):
                context.barriers.enter(f"barrier {number}")
            found["barrier"] = (time.monotonic() - moment) / BARRIERS
            found["barrier cpu"] = (cpu_seconds() - cpu) / BARRIERS
            if rank == world_size - 1:
                found["killed"] = time.monotonic()
                Path(directory, f"{rank}.json").write_text(json.dumps(found))
                os.kill(os.getpid(), signal.SIGKILL)
            assert context.peers.wait(_LIMIT) is not None
            found["told"] = time.monotonic()
            Path(directory, f"{rank}.json").write_text(json.dumps(found))
            os._exit(0)

        statuses(fork_ranks(world_size, work))
        found = [json.loads(Path(directory, f"{rank}.json").read_text()) for rank in range(world_size)]
    return {
        "wall": max(each["connected"] for each in found) - max(each["began"] for each in found),
        "cpu": found[0]["cpu"] / world_size,
        "barrier": found[0]["barrier"],
        "barrier cpu": found[0]["barrier cpu"] / world_size,
        "death": max(each["told"] for each in found[:-1]) - found[-1]["killed"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[64, 256, 512])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for world_size in args.ranks:
        runs = [measure(world_size) for _ in range(args.repeats)]
        rows.append(
            (
                world_size,
                spread([run["wall"] for run in runs]),
                spread([1000 * run["cpu"] for run in runs]),
                spread([1000 * run["barrier"] for run in runs], 0),
                spread([1e6 * run["barrier cpu"] for run in runs], 0),
                spread([run["death"] for run in runs]),
            )
        )
    print_table(
        "The control channel: handshake, barrier and death",
        (
            "ranks",
            "handshake, s from the last rank's start",
            "rank 0's CPU in it, ms a rank",
            "a barrier, ms",
            "rank 0's CPU in it, µs a rank",
            "s until the last rank knows of a death",
        ),
        rows,
    )


if __name__ == "__main__":
    main()
