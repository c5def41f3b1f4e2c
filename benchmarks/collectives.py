"""All-reduce by size: torch's own, and the ring of sends and receives; beside a model of it and the machine's limit.

    python benchmarks/collectives.py                          # 2 and 4 ranks over gloo, about 2 minutes
    python benchmarks/collectives.py --ranks 8 --plot all_reduce.svg

The model says that a message of b bytes takes alpha + b / beta. Both are fitted to the ring's own transfers, so a ring
of N ranks should take 2 (N - 1) (alpha + size / N / beta). Over loopback every byte is copied by the same cores, so the
limit is how fast one core copies memory. `--plot` needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from measuring import fork_ranks, print_table, scratch_directory, spread, statuses
from torch import Tensor

from lightning_ddp_ext.reductions.ring import ring_sum

SIZES = [2**power for power in range(10, 27, 4)]  # bytes: 1 KiB to 64 MiB
_UNITS = {2**20: "MiB", 2**10: "KiB"}

Seconds = dict[str, dict[int, list[float]]]


def measure(rank: int, world_size: int, directory: str, repeats: int) -> None:
    """One rank's part; rank 0 writes what it has measured."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)
    group = dist.group.WORLD
    contestants: dict[str, Callable[[Tensor], object]] = {
        "torch": dist.all_reduce,
        "ring": lambda tensor: ring_sum(tensor, group),
        "transfer": lambda tensor: exchange(tensor, rank, world_size),
    }
    found: Seconds = {name: {} for name in contestants}
    for size in SIZES:
        tensor = torch.ones(size // 4)
        for turn in range(repeats + 1):  # the first one warms up; the order of the contestants rotates
            names = list(contestants)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                dist.barrier()
                began = time.perf_counter()
                contestants[name](tensor)
                if turn > 0:
                    found[name].setdefault(size, []).append(time.perf_counter() - began)
                tensor.fill_(1.0)
    if rank == 0:
        Path(directory, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def exchange(tensor: Tensor, rank: int, world_size: int) -> None:
    """What the ring does in one of its steps, with a whole tensor."""
    sent = dist.isend(tensor, (rank + 1) % world_size)
    dist.recv(torch.empty_like(tensor), (rank - 1) % world_size)
    sent.wait()


def on_ranks(world_size: int, repeats: int) -> Seconds:
    with scratch_directory() as directory:
        pids = fork_ranks(world_size, lambda rank: measure(rank, world_size, directory, repeats))
        ended = statuses(pids, 600.0)
        if any(ended):
            raise SystemExit(f"ranks ended with {ended}")
        found = json.loads(Path(directory, "found.json").read_text())
    return {name: {int(size): times for size, times in by_size.items()} for name, by_size in found.items()}


def fit(transfers: dict[int, list[float]]) -> tuple[float, float]:
    """Latency in seconds, of the smallest message; bandwidth in bytes a second, of what the largest takes beyond it."""
    alpha = statistics.median(transfers[SIZES[0]])
    return alpha, SIZES[-1] / (statistics.median(transfers[SIZES[-1]]) - alpha)


def copy_bandwidth() -> float:
    """Bytes a second that one core copies from memory to memory, in buffers that no cache holds."""
    torch.set_num_threads(1)
    source, target = torch.ones(2**26), torch.ones(2**26)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return source.nbytes / statistics.median(times)


def shown(size: int) -> str:
    unit = next(unit for unit in _UNITS if size >= unit)
    return f"{size // unit} {_UNITS[unit]}"


def report(world_size: int, found: Seconds, limit: float) -> None:
    alpha, beta = fit(found["transfer"])
    rows = []
    for size in SIZES:
        model = 2 * (world_size - 1) * (alpha + size / world_size / beta)
        torchs, ring = ([1000 * value for value in found[name][size]] for name in ("torch", "ring"))
        ratio = statistics.median(ring) / statistics.median(torchs)
        speed = size / statistics.median(found["torch"][size]) / 1e9
        rows.append(
            (shown(size), spread(torchs), spread(ring), f"{ratio:.2f} ×", f"{1000 * model:.2f}", f"{speed:.2f}")
        )
    title = (
        f"All-reduce on {world_size} ranks, ms; alpha {1e6 * alpha:.0f} µs, beta {beta / 1e9:.2f} GB/s, "
        f"one core copies {limit / 1e9:.1f} GB/s"
    )
    print_table(title, ("size", "torch", "ring", "ring / torch", "model of the ring", "torch, GB/s"), rows)


def plot(path: str, results: dict[int, Seconds], limit: float) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for world_size, found in results.items():
        for name in ("torch", "ring"):
            medians = [statistics.median(found[name][size]) for size in SIZES]
            axes.loglog(SIZES, medians, marker="o", label=f"{name}, {world_size} ranks")
    axes.loglog(SIZES, [size / limit for size in SIZES], linestyle=":", color="grey", label="copy in memory")
    axes.set(xlabel="bytes", ylabel="seconds", title="All-reduce")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--plot", metavar="FILE", help="draw the medians, too")
    options = parser.parse_args()
    results = {world_size: on_ranks(world_size, options.repeats) for world_size in options.ranks}
    limit = copy_bandwidth()
    for world_size, found in results.items():
        report(world_size, found, limit)
    if options.plot:
        plot(options.plot, results, limit)


if __name__ == "__main__":
    main()
