"""Measure our samplers beside torch's DistributedSampler, which makes a list of all
indices in each epoch.

    python benchmarks/samplers.py                       # about 2 minutes on 2 cores; 8 GiB
    python benchmarks/samplers.py index --repeats 3     # one table

Every measurement runs in a separate process. Memory is the peak resident size, minus
that before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import torch
from measuring import Effort, Figures, Table, alone, main, power, ratio, spread, take_turns
from memory import MIB, peak, reset_peak
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from lightning_ddp_ext import DistributedBatchSamplerWrapper, ScalableDistributedSampler
from lightning_ddp_ext.data.samplers import TorchOrderSampler


class Sized:
    """A dataset of which only the length is known."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


class InMemory(torch.utils.data.Dataset[Any]):
    """Samples in one tensor; whole batches are indexed, so that the sampler dominates."""

    def __init__(self, length: int) -> None:
        self.samples = torch.arange(length)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        return self.samples[indices]


def exhaust(indices: Iterable[Any]) -> None:
    deque(indices, maxlen=0)


def first_index(kind: Any, length: int, position: int = 0) -> Figures:
    """Return the time to the first index on rank 3 of 8, and the memory for it and
    200,000 more.
    """
    next(iter(kind(Sized(1000), 8, 3)))  # first calls
    sampler = kind(Sized(length), 8, 3)
    before = reset_peak()
    begin = time.perf_counter()
    if position:
        sampler.resume_at(1, position)
    indices = iter(sampler)
    next(indices)
    seconds = time.perf_counter() - begin
    exhaust(islice(indices, 200_000))
    return {"ms": seconds * 1000, "MiB": (peak() - before) / MIB}


def measure_first(effort: Effort) -> Table:
    ours = ScalableDistributedSampler
    long, longer, longest = effort.choose((10**8, 10**9, 10**12), quick=(10**6, 10**6, 10**6))
    turns: dict[str, Callable[[], Figures]] = {
        f"torch, {power(long)} samples": partial(first_index, DistributedSampler, long),
        f"`ScalableDistributedSampler`, {power(long)}": partial(first_index, ours, long),
        f"`ScalableDistributedSampler`, {power(longer)}": partial(first_index, ours, longer),
        f"`ScalableDistributedSampler`, {power(longest)}": partial(first_index, ours, longest),
        f"resumed in the middle of {power(longer)}": partial(
            first_index, ours, longer, longer // 2
        ),
        f"torch's order by `ddp_ext`, {power(long)}": partial(first_index, TorchOrderSampler, long),
    }
    results = take_turns({name: alone(work) for name, work in turns.items()}, effort.repeats(3))
    rows = [
        [name, spread(found["ms"]), f"{spread(found['MiB']).median:.2f}"]
        for name, found in results.items()
    ]
    return Table("first", ["first index, 8 ranks", "ms", "extra memory a rank, MiB"], rows)


def next_indices(make: Callable[[], Any], count: int) -> Figures:
    """Return the time of an index after the first one, when torch has built its list."""
    indices = iter(make())
    exhaust(islice(indices, count // 20))  # the block that is read, its memory, first calls
    begin = time.process_time()
    exhaust(islice(indices, count))
    return {"ns": (time.process_time() - begin) / count * 1e9}


def whole_epoch(make: Callable[[], Any], count: int) -> Figures:
    begin = time.process_time()
    exhaust(make())
    return {"ns": (time.process_time() - begin) / count * 1e9}


def measure_index(effort: Effort) -> Table:
    count = effort.choose(1_000_000, quick=10_000)
    length = 8 * (count + count // 20)
    stock = partial(DistributedSampler, Sized(length), 8, 3)
    scalable, longest = (
        partial(ScalableDistributedSampler, Sized(n), 8, 3) for n in (10**8, 10**12)
    )
    in_torchs_order = partial(TorchOrderSampler, Sized(length), 8, 3)
    turns: dict[str, Callable[[], Figures]] = {
        "torch, after it has built its list": partial(next_indices, stock, count),
        f"torch, over a whole epoch of {power(length)}": partial(whole_epoch, stock, length // 8),
        "`ScalableDistributedSampler`, of 1e8": partial(next_indices, scalable, count),
        "`ScalableDistributedSampler`, of 1e12": partial(next_indices, longest, count),
        f"torch's order by `ddp_ext`, over {power(length)}": partial(
            next_indices, in_torchs_order, count
        ),
    }
    results = take_turns({name: alone(work) for name, work in turns.items()}, effort.repeats(5))
    return Table(
        "index",
        ["processor time of an index", "ns"],
        [[n, spread(f["ns"])] for n, f in results.items()],
    )


def epoch(kind: Any, length: int) -> Figures:
    dataset = InMemory(length)
    loader = DataLoader(
        dataset, batch_size=256, sampler=kind(dataset, 1, 0), collate_fn=lambda batch: batch
    )
    begin = time.perf_counter()
    exhaust(loader)
    return {"s": time.perf_counter() - begin}


def measure_epoch(effort: Effort) -> Table:
    length = effort.choose(10**7, quick=10**4)
    samplers = {
        "torch": DistributedSampler,
        "`ScalableDistributedSampler`": ScalableDistributedSampler,
        "torch's order by `ddp_ext`": TorchOrderSampler,
    }
    kinds = {name: alone(partial(epoch, kind, length)) for name, kind in samplers.items()}
    results = take_turns(kinds, effort.repeats(5))
    rows = [
        [name, spread(found["s"]), ratio(found["s"], results["torch"]["s"])]
        for name, found in results.items()
    ]
    return Table(
        "epoch",
        [
            f"one epoch of {power(length)} through a `DataLoader` over data in memory",
            "s",
            "× torch",
        ],
        rows,
    )


def drawing(dealt: bool, length: int) -> Figures:
    batches: Any = BatchSampler(RandomSampler(Sized(length)), 32, drop_last=False)
    drawn: Iterator[Any] = iter(DistributedBatchSamplerWrapper(batches, 1, 0) if dealt else batches)
    begin = time.process_time()
    count = sum(1 for _ in drawn)
    return {"us": (time.process_time() - begin) / count * 1e6}


def measure_batches(effort: Effort) -> Table:
    """Measure a whole epoch, because the wrapper draws all batches when the epoch
    begins.
    """
    length = effort.choose(500_000, quick=1000)
    kinds = {"alone": False, "with `DistributedBatchSamplerWrapper`": True}
    turns = {name: alone(partial(drawing, dealt, length)) for name, dealt in kinds.items()}
    results = take_turns(turns, effort.repeats(5))
    title = "processor time of a batch of 32 that a random batch sampler draws"
    return Table(
        "batches", [title, "µs"], [[name, spread(found["us"])] for name, found in results.items()]
    )


if __name__ == "__main__":
    main(
        __doc__,
        {
            "first": measure_first,
            "index": measure_index,
            "epoch": measure_epoch,
            "batches": measure_batches,
        },
    )
