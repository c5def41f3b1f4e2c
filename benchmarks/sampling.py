"""Our samplers beside torch's DistributedSampler, and our loaders beside stock Lightning's; prints Markdown tables.

    python benchmarks/sampling.py                       # everything, about 20 minutes on 2 cores; takes 8 GiB of memory
    python benchmarks/sampling.py index --repeats 3     # one measurement: see MEASUREMENTS

Every measurement runs in a process of its own, forked from one that has imported everything. All kinds take turns
within each repeat, beginning with another one each time. Medians are followed by the lowest and highest value; read
ratios, which are those within each repeat, rather than seconds. Memory is the most that a process has had for itself,
over what it had before.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.strategies import DDPStrategy
from measuring import fork_ranks, free_port, print_table, scratch_directory, spread, statuses
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from lightning_ddp_ext import DDPExtStrategy
from lightning_ddp_ext.data.samplers import ScalableDistributedSampler, TorchOrderSampler
from lightning_ddp_ext.data.shared_samplers import DistributedBatchSamplerWrapper
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
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        found = statuses(fork_ranks(1, one, ends_like_a_script=False, **variables), seconds=600)
        assert not any(found), f"exit statuses {found}"
        figures: dict[str, float] = json.loads((directory / "figures.json").read_text())
        return figures


def take_turns(kinds: dict[str, Work], repeats: int) -> dict[str, dict[str, list[float]]]:
    """Each kind once in each repeat, beginning with another one each time: kind, figure, values."""
    results: dict[str, dict[str, list[float]]] = {kind: defaultdict(list) for kind in kinds}
    names = list(kinds)
    for repeat in range(repeats):
        begin = repeat % len(names)
        for kind in names[begin:] + names[:begin]:
            for figure, value in run(kinds[kind]).items():
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


def whole_epoch(make: Callable[[], Any], count: int) -> Work:
    def work() -> dict[str, float]:
        begin = time.process_time()
        deque(make(), maxlen=0)
        return {"ns": (time.process_time() - begin) / count * 1e9}

    return work


def measure_index(repeats: int) -> None:
    """CPU time of an index: once the first one is there, when torch has paid for its list; and over a whole epoch."""
    count = 1_000_000
    kinds: dict[str, Work] = {}
    for ranks in (1, 2, 8):
        for name, kind in (("torch", DistributedSampler), ("ours", ScalableDistributedSampler)):
            longer = partial(kind, Sized(ranks * (count + 50_000)), ranks, ranks // 2)
            kinds[f"{name}, {ranks}, after the first"] = indexing(longer, count)
            whole = partial(kind, Sized(ranks * count), ranks, ranks // 2)
            kinds[f"{name}, {ranks}, whole"] = whole_epoch(whole, count)
    results = take_turns(kinds, repeats)
    rows = []
    for ranks in (1, 2, 8):
        cells = [f"{ranks}"]
        for part in ("after the first", "whole"):
            torchs, ours = (results[f"{name}, {ranks}, {part}"]["ns"] for name in ("torch", "ours"))
            cells += [spread(torchs, 1), spread(ours, 1), ratio(ours, torchs)]
        rows.append(cells)
    after, whole_of = ("torch, after the first", "ours", "× torch"), ("torch, whole epoch", "ours", "× torch")
    title = f"CPU time of an index, ns, epochs of 1e6 samples a rank ({repeats} repeats)"
    print_table(title, ("ranks", *after, *whole_of), rows)


def measure_other_indices(repeats: int) -> None:
    """CPU time of an index of our other samplers and of a longer order, once the first one is there."""
    count = 1_000_000
    length = 8 * (count + 50_000)
    weights = torch.rand(1_000_000)
    kinds: dict[str, Work] = {
        "torch, of 8e6": indexing(lambda: DistributedSampler(Sized(length), 8, 3), count),
        "ours, of 1e8": indexing(lambda: ScalableDistributedSampler(Sized(10**8), 8, 3), count),
        "ours, of 1e12": indexing(lambda: ScalableDistributedSampler(Sized(10**12), 8, 3), count),
        "torch's order by ours, of 8e6": indexing(lambda: TorchOrderSampler(Sized(length), 8, 3), count),
        "ours, weighted, 1e6 weights": indexing(
            lambda: DistributedWeightedSampler(weights, length, num_replicas=8, rank=3), count
        ),
    }
    results = take_turns(kinds, repeats)
    print_table(
        f"CPU time of an index after the first, 8 ranks ({repeats} repeats)",
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
        begin = time.process_time()
        count = sum(1 for _ in wrapped)
        return {"us": (time.process_time() - begin) / count * 1e6}

    return work


def measure_batches(repeats: int) -> None:
    """CPU time of a batch, over a whole epoch: the wrapper draws all batches when the epoch begins."""
    results = take_turns({"a random batch sampler": batching(False), "the same, dealt out": batching(True)}, repeats)
    print_table(
        f"CPU time of a drawn batch of 32 ({repeats} repeats)",
        ("batch sampler", "µs"),
        [(name, spread(figures["us"], 1)) for name, figures in results.items()],
    )


# Training. From the outside: the same model and data with strategy="ddp", and with ours.

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": DDPStrategy,
    "ddp_ext": DDPExtStrategy,
    "ddp_ext, sampler=scalable": lambda: DDPExtStrategy(sampler="scalable"),
}
STEPS = 1000
GROUP = 20  # steps that are timed together


def train(strategy: str, model: L.LightningModule, checkpoint: str | None = None, **options: Any) -> L.Trainer:
    """Fit on one rank."""
    warnings.simplefilter("ignore")
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = L.Trainer(strategy=STRATEGIES[strategy](), accelerator="cpu", devices=1, **quiet, **options)
    trainer.fit(model, ckpt_path=checkpoint)
    return trainer


class Tiny(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 1)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.layer(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


Moment = tuple[float, float]  # seconds: by the clock, and of processor time of this process


def moment() -> Moment:
    return time.perf_counter(), time.process_time()


class Timed(Tiny):
    """Times steps of a bare loop over the loader that the strategy has made, and then those of the fit."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.workers = workers
        self.raw: list[Moment] = []
        self.steps: list[Moment] = []

    def train_dataloader(self) -> DataLoader[Tensor]:
        data: Any = torch.ones((STEPS + GROUP) * 16, 64)
        return DataLoader(data, batch_size=16, shuffle=True, num_workers=self.workers)

    def on_train_start(self) -> None:
        for _ in self.trainer.train_dataloader:
            self.raw.append(moment())

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.steps.append(moment())
        return super().training_step(batch, index)


def typical_step(moments: list[Moment], which: int) -> float:
    """Microseconds: the median over groups of steps, without the first group."""
    groups = [after[which] - before[which] for before, after in pairwise(moments[GROUP::GROUP])]
    return statistics.median(groups) / GROUP * 1e6


def stepping(strategy: str, workers: int) -> Work:
    def work() -> dict[str, float]:
        model = Timed(workers)
        train(strategy, model, max_epochs=1)
        assert len(model.raw) == len(model.steps) == STEPS + GROUP
        return {
            f"{loop}, {clock}": typical_step(moments, which)
            for loop, moments in (("bare loop", model.raw), ("fit", model.steps))
            for which, clock in enumerate(("clock", "processor"))
        }

    return work


def measure_step(repeats: int) -> None:
    """A step of a bare loop over the loader and of a fit, batches of 16 with 64 numbers each, one rank."""
    for workers in (0, 2):
        results = take_turns({strategy: stepping(strategy, workers) for strategy in STRATEGIES}, repeats)
        rows = []
        for loop in ("bare loop", "fit"):
            for strategy, figures in results.items():
                cells = [f"{loop}, {strategy}"]
                for name in (f"{loop}, clock", f"{loop}, processor"):
                    cells += [spread(figures[name], 1), ratio(figures[name], results["ddp"][name])]
                rows.append(cells)
        title = f"A step with {workers} workers, µs, one rank ({repeats} repeats)"
        print_table(title, ("", "by the clock", "× ddp", "of the training process's CPU time", "× ddp"), rows)


BATCH = 50_000
RESUMED = 10**8  # samples an epoch
HALF = RESUMED // BATCH // 2  # batches


class Resumed(Tiny):
    """Samples that cost nothing, so that the middle of a long epoch is soon reached."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = self.first = 0.0
        self.begins_at = -1

    def train_dataloader(self) -> DataLoader[Tensor]:
        self.asked = time.perf_counter()
        return DataLoader(Free(RESUMED), batch_size=BATCH, shuffle=True, collate_fn=lambda batch: batch)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if not self.first:
            self.first, self.begins_at = time.perf_counter(), index
        return super().training_step(batch, index)


class Free(Sized, torch.utils.data.Dataset[Any]):
    def __getitems__(self, indices: list[int]) -> Tensor:
        return torch.ones(1, 64)


class SaveInTheMiddle(L.Callback):
    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == HALF:
            trainer.save_checkpoint(self.path)


def resuming(strategy: str, path: str) -> Work:
    def work() -> dict[str, float]:
        model = Resumed()
        train(strategy, model, path, max_steps=HALF + 1)
        return {"ms": (model.first - model.asked) * 1000, "batch": model.begins_at}

    return work


def saving(strategy: str, path: str) -> Work:
    def work() -> dict[str, float]:
        train(strategy, Resumed(), max_steps=HALF, callbacks=[SaveInTheMiddle(path)])
        return {}

    return work


def measure_resume(repeats: int) -> None:
    """From the fit loop's call of ``train_dataloader`` to the first step, in the middle of an epoch of 1e8 samples.

    Stock Lightning counts on from the middle, but reads the epoch's first samples again.
    """
    with scratch_directory() as directory:
        paths = {strategy: f"{directory}/{number}.ckpt" for number, strategy in enumerate(STRATEGIES)}
        for strategy, path in paths.items():
            run(saving(strategy, path))
        results = take_turns({strategy: resuming(strategy, path) for strategy, path in paths.items()}, repeats)
    print_table(
        f"First step of an epoch of 1e8 resumed in its middle, batches of {BATCH}, one rank ({repeats} repeats)",
        ("strategy", "ms", "first batch's number"),
        [(name, spread(figures["ms"], 1), f"{figures['batch'][0]:.0f}") for name, figures in results.items()],
    )


MEASUREMENTS: dict[str, Callable[[int], None]] = {
    "first": measure_first,
    "index": measure_index,
    "others": measure_other_indices,
    "epoch": measure_epoch,
    "batches": measure_batches,
    "step": measure_step,
    "resume": measure_resume,
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure samplers and loaders beside torch's and Lightning's.")
    parser.add_argument("which", nargs="*", choices=[*MEASUREMENTS, []], help="tables to make (default: all)")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, NumPy {np.__version__}, {os.cpu_count()} cores")
    for name in args.which or MEASUREMENTS:
        MEASUREMENTS[name](args.repeats)


if __name__ == "__main__":
    main()
