"""Evaluation of combined loaders, and by steps and metrics that cannot leave out a sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler
from torchmetrics import ExplainedVariance, Metric

from tests.harness.ranks import run_ranks
from tests.harness.training import Kind, assert_same, make_strategy, make_trainer, on_both
from tests.integration.evaluating import AtTheEnd, Batch, InPlace, loader, make_on


class Pulls(AtTheEnd):
    """Takes batches from an iterator."""

    def validation_step(self, dataloader_iter: Iterator[Any]) -> None:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        super().validation_step(batch, 0)


class Pairs(AtTheEnd):
    """Takes batches of two loaders."""

    def validation_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        for number, each in enumerate(batch):
            if each is not None:
                super().validation_step(each, index, number)


def as_stock(kind: Kind, directory: Path) -> list[Any]:
    """Evaluate in steps that have more than one batch, or that take their batches
    themselves.
    """
    found = []

    def validate(model: AtTheEnd, loaders: Any, **options: Any) -> None:
        trainer = make_trainer(make_strategy(kind, directory), **options)
        logged = trainer.validate(model, loaders, verbose=False)
        found.append([logged, model.seen])

    for mode in ("min_size", "max_size", "max_size_cycle"):
        for options in ({}, {"limit_val_batches": 1}, {"fast_dev_run": True}):
            both = CombinedLoader([loader(11, 2), loader(5, 2)], mode)  # type: ignore[arg-type]
            validate(Pairs(2), both, **options)
    validate(Pulls(), loader(5, 2))
    validate(AtTheEnd(), loader(9, 2, drop_last=True))
    validate(AtTheEnd(), loader(9, batch_sampler=Whole(range(9), 5, False)))
    return found


def test_steps_that_cannot_leave_out_a_sample_are_as_with_stock(tmp_path: Path) -> None:
    """Values, samples and batches of such steps are stock's.

    They have combined loaders, ``dataloader_iter`` or ``drop_last``.
    """
    ours, stock = on_both(as_stock, tmp_path)
    assert_same(ours, stock)


class Whole(BatchSampler):
    """Yields whole batches only, although it says ``drop_last=False``."""

    def __iter__(self) -> Iterator[list[int]]:
        samples = list(self.sampler)
        for first in range(0, len(samples) - self.batch_size + 1, self.batch_size):
            yield samples[first : first + self.batch_size]

    def __len__(self) -> int:
        return len(self.sampler) // self.batch_size  # type: ignore[arg-type]


class Counts(Metric):
    """Counts labels in a counter beside its state."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0), "sum")
        self.seen: Counter[int] = Counter()

    def update(self, labels: Tensor) -> None:
        self.seen.update(labels.tolist())
        self.total += len(labels)

    def compute(self) -> Tensor:
        return self.total


class Shaped(L.LightningModule):
    """Has a metric that takes its shape from data, and logs what it has reduced itself
    and what one process counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.variance = ExplainedVariance()
        self.sums = InPlace()
        self.counts = Counts()

    def validation_step(self, batch: Batch, index: int, dataloader_idx: int = 0) -> None:
        x = batch["x"].repeat(2, 1).T
        self.variance.update(x, x.square())
        self.sums.update(x)
        self.counts.update(batch["label"])
        self.log("sums", self.sums)
        self.log("counts", self.counts)
        self.log("gathered", self.all_gather(x.mean()).mean())  # type: ignore[union-attr]

    def on_validation_epoch_end(self) -> None:
        self.variance.compute()


def reduce_otherwise(rank: int, world_size: int, directory: Path) -> list[Any]:
    loaders = [[loader(5, 2), loader(1, 1)], [loader(1, 1)]]
    return [
        make_on(world_size, directory).validate(Shaped(), each, verbose=False) for each in loaders
    ]


def test_metrics_of_any_shape_and_values_that_users_reduce(tmp_path: Path) -> None:
    """A rank that only repeats a sample takes part in all reductions.

    A value that a step gathered stays.
    """
    first, second = run_ranks(reduce_otherwise, 2, tmp_path)
    assert first == second
    assert first[1][0]["counts"] == 1
