"""Our samplers beside torch's DistributedSampler in the same run; prints Markdown tables.

    python benchmarks/sampling.py                       # everything, about 10 minutes on 2 cores; takes 8 GiB of memory
    python benchmarks/sampling.py index --repeats 3     # one table

Every measurement runs in a process of its own, forked from one that has imported everything, and all kinds take turns
within each repeat. Medians are followed by the lowest and highest value; read ratios rather than seconds. Memory is
the most that a process has had for itself, over what it had before.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import fork_ranks, print_table, scratch_directory, spread, statuses
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from lightning_ddp_ext.data.batch_dealing import DistributedBatchSamplerWrapper
from lightning_ddp_ext.data.default_samplers import TorchOrderSampler
from lightning_ddp_ext.data.samplers import ScalableDistributedSampler
from lightning_ddp_ext.data.weighted import DistributedWeightedSampler

MIB = 1 << 20
Work = Callable[[], dict[str, float]]


class Sized:
    """A dataset of which only the length is known."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


class InMemory(torch.utils.data.Dataset[Any]):
    """Samples in one tensor; batches are taken from it at once, so that the sampler is what costs."""

    def __init__(self, length: int) -> None:
        self.samples = torch.arange(length)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.samples[index]

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return self.samples[indices]


def peak_memory() -> int:
    """Bytes: the most that has been resident since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def run(work: Work) -> dict[str, float]:
    """What ``work`` reports from a process of its own."""

    def one(_: int) -> None:
        torch.set_num_threads(1)
        (directory / "figures.json").write_text(json.dumps(work()))

    with scratch_directory() as place:
        directory = Path(place)
        found = statuses(fork_ranks(1, one, ends_like_a_script=False), seconds=600)
        assert not any(found), f"exit statuses {found}"
        figures: dict[str, float] = json.loads((directory / "figures.json").read_text())
        return figures


def take_turns(kinds: dict[str, Work], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Each kind once in each repeat: kind, figure, values."""
    results: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(repeats):
        for kind, work in kinds.items():
            for figure, value in run(work).items():
                results[kind][figure].append(value)
    return results


def ratio(ours: list[float], theirs: list[float]) -> str:
    """The median of the ratios within each repeat."""
    return spread([mine / other for mine, other in zip(ours, theirs, strict=True)])


# The first index, memory and the cost of an index.


def beginning(kind: Any, length: int, position: int = 0) -> Work:
    def work() -> dict[str, float]:
        next(iter(kind(Sized(1000), 8, 3)))  # first calls
        sampler = kind(Sized(length), 8, 3)
        before = peak_after_reset()
        begin = time.perf_counter()
        if position:
            sampler.resume_at(1, position)
        indices = iter(sampler)
        next(indices)
        first = time.perf_counter() - begin
        deque(islice(indices, 200_000), maxlen=0)
        return {"ms": first * 1000, "MiB": (peak_memory() - before) / MIB}

    return work


def peak_after_reset() -> int:
    reset_peak()
    return peak_memory()


def measure_first(repeats: int) -> None:
    """Time to the first index on rank 3 of 8, and memory for it and 200,000 more."""
    cases: dict[str, Work] = {"torch, 1e8": beginning(DistributedSampler, 10**8)}
    for name, length in (("1e8", 10**8), ("1e9", 10**9), ("1e12", 10**12)):
        cases[f"ours, {name}"] = beginning(ScalableDistributedSampler, length)
    cases["ours, middle of 1e9"] = beginning(ScalableDistributedSampler, 10**9, 5 * 10**8)
    cases["torch's order by ours, 1e8"] = beginning(TorchOrderSampler, 10**8)
    results = take_turns(cases, repeats)
    print_table(
        f"First index, 8 ranks ({repeats} repeats)",
        ("sampler", "ms", "extra MiB"),
        [(name, spread(figures["ms"]), spread(figures["MiB"])) for name, figures in results.items()],
    )


def indexing(make: Callable[[], Any], count: int) -> Work:
    def work() -> dict[str, float]:
        indices = iter(make())
        deque(islice(indices, 50_000), maxlen=0)  # the block that is read, its memory, first calls
        begin = time.process_time()
        deque(islice(indices, count), maxlen=0)
        return {"ns": (time.process_time() - begin) / count * 1e9}

    return work


def measure_index(repeats: int) -> None:
    """CPU time of an index once the first one is there; torch's has paid for its list before."""
    count = 1_000_000
    drawing = indexing(lambda: DistributedSampler(Sized(8 * (count + 50_000)), 8, 3), count)

    def torchs_all() -> dict[str, float]:
        begin = time.process_time()
        deque(DistributedSampler(Sized(8 * count), 8, 3), maxlen=0)
        return {"ns": (time.process_time() - begin) / count * 1e9}

    weights = torch.rand(1_000_000)
    kinds: dict[str, Work] = {
        "torch, after the first": drawing,
        "torch, whole epoch of 8e6": torchs_all,
        "ours, of 1e8": indexing(lambda: ScalableDistributedSampler(Sized(10**8), 8, 3), count),
        "ours, of 1e12": indexing(lambda: ScalableDistributedSampler(Sized(10**12), 8, 3), count),
        "torch's order by ours, of 8e6": indexing(lambda: TorchOrderSampler(Sized(8 * (count + 50_000)), 8, 3), count),
        "ours, weighted, 1e6 weights": indexing(
            lambda: DistributedWeightedSampler(weights, 8 * (count + 50_000), num_replicas=8, rank=3), count
        ),
    }
    results = take_turns(kinds, repeats)
    print_table(
        f"CPU time of an index ({repeats} repeats)",
        ("sampler", "ns"),
        [(name, spread(figures["ns"], 1)) for name, figures in results.items()],
    )


# An epoch.


def epoch(kind: Any, length: int) -> Work:
    def work() -> dict[str, float]:
        dataset = InMemory(length)
        loader = DataLoader(dataset, batch_size=256, sampler=kind(dataset, 1, 0), collate_fn=lambda batch: batch)
        begin = time.perf_counter()
        deque(loader, maxlen=0)
        return {"s": time.perf_counter() - begin}

    return work


def measure_epoch(repeats: int) -> None:
    """One epoch of 1e7 samples through a DataLoader with a dataset in memory, batches of 256, no workers."""
    length = 10**7
    kinds = {
        "torch": epoch(DistributedSampler, length),
        "ours": epoch(ScalableDistributedSampler, length),
        "torch's order by ours": epoch(TorchOrderSampler, length),
    }
    results = take_turns(kinds, repeats)
    print_table(
        f"One epoch of 1e7 through a DataLoader ({repeats} repeats)",
        ("sampler", "s", "× torch"),
        [(name, spread(figures["s"]), ratio(figures["s"], results["torch"]["s"])) for name, figures in results.items()],
    )


def batching(deal: bool) -> Work:
    def work() -> dict[str, float]:
        batches: Any = BatchSampler(RandomSampler(Sized(500_000)), 32, drop_last=False)
        wrapped: Iterator[Any] = iter(DistributedBatchSamplerWrapper(batches, 1, 0) if deal else batches)
        deque(islice(wrapped, 100), maxlen=0)
        begin = time.process_time()
        count = sum(1 for _ in wrapped)
        return {"us": (time.process_time() - begin) / count * 1e6}

    return work


def measure_batches(repeats: int) -> None:
    """CPU time of drawing a batch with the generators swapped in and out around it."""
    results = take_turns({"a random batch sampler": batching(False), "the same, dealt out": batching(True)}, repeats)
    print_table(
        f"CPU time of a drawn batch of 32 ({repeats} repeats)",
        ("batch sampler", "µs"),
        [(name, spread(figures["us"], 1)) for name, figures in results.items()],
    )


MEASUREMENTS: dict[str, Callable[[int], None]] = {
    "first": measure_first,
    "index": measure_index,
    "epoch": measure_epoch,
    "batches": measure_batches,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure samplers beside torch's.")
    parser.add_argument("which", nargs="*", choices=[*MEASUREMENTS, []], help="tables to make (default: all)")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, NumPy {np.__version__}, {os.cpu_count()} cores")
    for name in args.which or MEASUREMENTS:
        MEASUREMENTS[name](args.repeats)


if __name__ == "__main__":
    main()
