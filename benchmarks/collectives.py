"""Measure all-reduce by size: torch's own and a ring of sends and receives, beside a
model and the machine's limit.

    python benchmarks/collectives.py    # 2 and 4 ranks over gloo, about 2 minutes

The model says that a message of b bytes takes alpha + b / beta. Both are fitted to the
ring's own transfers, so a ring of N ranks should take 2 (N - 1) (alpha + size / N /
beta). Over loopback every byte is copied by the same cores, so the limit is how fast
one core copies memory.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from measuring import (
    Effort,
    Figures,
    Results,
    Table,
    alone,
    main,
    on_rank_zero,
    open_group,
    ratio,
    spread,
    take_turns,
)
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from ring_all_reduce import ring_sum

SIZES = [2**power for power in range(10, 27, 4)]  # bytes: 1 KiB to 64 MiB


def exchange(tensor: Tensor, rank: int, world_size: int) -> None:
    """Run one step of the ring with a whole tensor."""
    sent = dist.isend(tensor, (rank + 1) % world_size)
    dist.recv(torch.empty_like(tensor), (rank - 1) % world_size)
    sent.wait()


def timed(reduce: Callable[[Tensor], object], tensor: Tensor) -> Figures:
    tensor.fill_(1.0)
    dist.barrier()
    began = time.perf_counter()
    reduce(tensor)
    return {"ms": 1000 * (time.perf_counter() - began)}


def milliseconds(sizes: list[int], world_size: int, repeats: int) -> list[Results]:
    """Return the times of torch's all-reduce, of the ring and of one of its transfers
    on rank 0, by size.
    """

    def work(rank: int, directory: Path) -> list[Results]:
        open_group(rank, world_size, directory)
        assert dist.group.WORLD is not None
        kinds: dict[str, Callable[[Tensor], object]] = {
            "torch": dist.all_reduce,
            "ring": partial(ring_sum, group=dist.group.WORLD),
            "transfer": partial(exchange, rank=rank, world_size=world_size),
        }
        found = []
        for size in sizes:
            turns = {
                name: partial(timed, kind, torch.ones(size // 4)) for name, kind in kinds.items()
            }
            take_turns(turns, 1)  # warms up
            found.append(take_turns(turns, repeats))
        dist.barrier()
        return found

    return on_rank_zero(work, world_size)


def copy_speed() -> Figures:
    """Measure the copy bandwidth of one core, in bytes per second, with buffers larger
    than the caches.
    """
    source = torch.ones(2**26)
    target = torch.ones(2**26)
    began = time.perf_counter()
    target.copy_(source)
    return {"bytes": source.nbytes / (time.perf_counter() - began)}


def shown(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def measure(world_size: int, effort: Effort) -> Table:
    sizes = effort.choose(SIZES, quick=SIZES[:2])
    results = milliseconds(sizes, world_size, effort.repeats(15))
    # The latency is that of the smallest message; the bandwidth is that of what the
    # largest one takes beyond it.
    transfers = [statistics.median(found["transfer"]["ms"]) for found in results]
    alpha = transfers[0]
    beta = sizes[-1] / max(transfers[-1] - transfers[0], 1e-9)
    rows = []
    for size, found in zip(sizes, results, strict=True):
        model = 2 * (world_size - 1) * (alpha + size / world_size / beta)
        torchs = found["torch"]["ms"]
        ring = found["ring"]["ms"]
        speed = size / statistics.median(torchs) / 1e6
        times = f"{ratio(ring, torchs).median:.2f} ×"
        rows.append(
            [shown(size), spread(torchs), spread(ring), times, f"{model:.2f}", f"{speed:.2f}"]
        )
    columns = ["torch", "ring", "ring / torch", "model of the ring", "torch, GB/s"]
    title = f"ms on {world_size} ranks; alpha {1000 * alpha:.0f} µs, beta {beta / 1e6:.2f} GB/s"
    return Table(f"on_{world_size}", [title, *columns], rows)


def measure_copy(effort: Effort) -> Table:
    speeds = take_turns({"copy": alone(copy_speed)}, effort.repeats(5))["copy"]["bytes"]
    return Table(
        "copy",
        ["copied from memory to memory", "GB/s"],
        [["by one core", f"{spread(speeds).median / 1e9:.1f}"]],
    )


if __name__ == "__main__":
    main(__doc__, {"on_2": partial(measure, 2), "on_4": partial(measure, 4), "copy": measure_copy})
