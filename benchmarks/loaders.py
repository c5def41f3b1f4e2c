"""Measure steps over our loaders beside stock Lightning's, and the first step of an
epoch resumed in the middle.

    python benchmarks/loaders.py    # about 2 minutes on 2 cores

The same model and data with strategy="ddp", and with ours, on one rank, each fit in a
separate process.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning as L
import torch
from measuring import (
    Effort,
    Figures,
    Table,
    alone,
    main,
    power,
    ratio,
    scratch_directory,
    spread,
    take_turns,
)
from torch import Tensor
from torch.utils.data import DataLoader
from training import make_trainer

from lightning_ddp_ext import ScalableDistributedSampler

GROUP = 20  # steps that are timed together
Moment = tuple[float, float]  # seconds: by the clock, and of processor time of this process


class Tiny(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 1)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.layer(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Timed(Tiny):
    """Times steps of a bare loop over the loader that the strategy has made, and then
    those of the fit.
    """

    def __init__(self, workers: int, steps: int) -> None:
        super().__init__()
        self.workers = workers
        self.steps = steps
        self.bare: list[Moment] = []
        self.fit: list[Moment] = []

    def train_dataloader(self) -> DataLoader[Tensor]:
        data: Any = torch.ones(self.steps * 16, 64)
        return DataLoader(data, batch_size=16, shuffle=True, num_workers=self.workers)

    def on_train_start(self) -> None:
        for _ in self.trainer.train_dataloader:
            self.bare.append((time.perf_counter(), time.process_time()))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.fit.append((time.perf_counter(), time.process_time()))
        return super().training_step(batch, index)


def typical_step(moments: list[Moment]) -> float:
    """Return microseconds by the clock: the median over groups of steps, without the
    first group.
    """
    groups = [after[0] - before[0] for before, after in pairwise(moments[GROUP::GROUP])]
    return statistics.median(groups) / GROUP * 1e6


def steps_of(strategy: str, workers: int, steps: int) -> Figures:
    model = Timed(workers, steps)
    make_trainer(strategy, 1, max_epochs=1).fit(model)
    return {
        "loop over the loader": typical_step(model.bare),
        "`Trainer.fit`": typical_step(model.fit),
    }


def measure_step(effort: Effort) -> Table:
    """Return batches of 16 with 64 numbers each."""
    strategies = ("ddp", "ddp_ext")
    loops = ("loop over the loader", "`Trainer.fit`")
    rows: dict[tuple[str, str], list[object]] = {
        (loop, strategy): [f"{loop}, `{strategy}`"] for loop in loops for strategy in strategies
    }
    steps = effort.choose(1000 + GROUP, quick=4 * GROUP)
    for workers in effort.choose((0, 2), quick=(0,)):
        kinds = {
            strategy: alone(partial(steps_of, strategy, workers, steps)) for strategy in strategies
        }
        results = take_turns(kinds, effort.repeats(5))
        for loop, strategy in rows:
            mine = results[strategy][loop]
            stock = results["ddp"][loop]
            rows[loop, strategy] += [spread(mine), ratio(mine, stock)]
    columns = [
        column
        for workers in effort.choose((0, 2), quick=(0,))
        for column in (f"{workers} workers: µs", "× `ddp`")
    ]
    return Table("step", ["a training step on one rank", *columns], list(rows.values()))


# Resuming in the middle of a long epoch.


class Free(torch.utils.data.Dataset[Any]):
    """Samples that cost nothing, so that the middle of a long epoch is soon reached."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: list[int]) -> Tensor:
        return torch.ones(1, 64)


class Resumed(Tiny):
    """Records when its data are requested, and when its first step begins."""

    def __init__(self, length: int, batch_size: int, *, is_scalable: bool) -> None:
        super().__init__()
        self.length = length
        self.batch_size = batch_size
        self.is_scalable = is_scalable
        self.asked = self.first = 0.0

    def train_dataloader(self) -> DataLoader[Tensor]:
        self.asked = time.perf_counter()
        data = Free(self.length)
        sampler = ScalableDistributedSampler(data) if self.is_scalable else None
        return DataLoader(
            data,
            batch_size=self.batch_size,
            shuffle=sampler is None,
            sampler=sampler,
            collate_fn=lambda batch: batch,
        )

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.first = self.first or time.perf_counter()
        return super().training_step(batch, index)


class SaveAt(L.Callback):
    def __init__(self, step: int, path: Path) -> None:
        self.step = step
        self.path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def measure_resume(effort: Effort) -> Table:
    """Measure the first step after a resume; stock counts from the middle, but reads
    the first samples again.
    """
    length, batch_size = effort.choose((10**8, 50_000), quick=(10_000, 500))
    half = length // batch_size // 2
    kinds = {  # of strategy and order
        "stock `ddp`, which reads the epoch's first samples again": ("ddp", False),
        "`ddp_ext`: torch's order, which has to be drawn": ("ddp_ext", False),
        "`ddp_ext` with a `ScalableDistributedSampler`": ("ddp_ext", True),
    }

    def save(strategy: str, is_scalable: bool, path: Path) -> Figures:
        trainer = make_trainer(strategy, 1, max_steps=half, callbacks=[SaveAt(half, path)])
        trainer.fit(Resumed(length, batch_size, is_scalable=is_scalable))
        return {}

    def resume(strategy: str, is_scalable: bool, path: Path) -> Figures:
        model = Resumed(length, batch_size, is_scalable=is_scalable)
        make_trainer(strategy, 1, max_steps=half + 1).fit(model, ckpt_path=path)
        return {"ms": (model.first - model.asked) * 1000}

    with scratch_directory() as directory:
        paths = {name: directory / f"{number}.ckpt" for number, name in enumerate(kinds)}
        for name, path in paths.items():
            alone(partial(save, *kinds[name], path))()
        turns = {name: alone(partial(resume, *kinds[name], path)) for name, path in paths.items()}
        results = take_turns(turns, effort.repeats(2))
    title = f"first step of an epoch of {power(length)} samples that is resumed in its middle"
    return Table(
        "middle", [title, "ms"], [[name, spread(found["ms"])] for name, found in results.items()]
    )


if __name__ == "__main__":
    main(__doc__, {"step": measure_step, "middle": measure_resume})
