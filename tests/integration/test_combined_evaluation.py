"""Evaluation of combined loaders, and by steps and metrics that cannot leave out a sample."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import lightning as L
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from tests.harness.training import Kind, assert_same, make_strategy, make_trainer, on_both
from tests.integration.evaluating import AtTheEnd, loader


class Pulls(AtTheEnd):
    """Takes batches from an iterator."""

    def validation_step(self, dataloader_iter: Iterator[Any]) -> None:
        batch, _, _ = next(dataloader_iter)
        super().validation_step(batch, 0)


class Pairs(AtTheEnd):
    """Takes batches of two loaders."""

    def validation_step(self, batch: Any, index: int) -> None:
        for number, each in enumerate(batch):
            if each is not None:
                super().validation_step(each, index, number)


def evaluate_as_stock(kind: Kind, directory: Path) -> dict[str, list[Any]]:
    """Return what evaluations log and read that leave out no sample."""
    found = {}

    def validate(
        name: str,
        model: AtTheEnd,
        loaders: Any,
        strategy: Any = MappingProxyType({}),
        **options: Any,
    ) -> L.Trainer:
        trainer = make_trainer(make_strategy(kind, directory, **strategy), **options)
        logged = trainer.validate(model, loaders, verbose=False)
        found[name] = [logged, model.seen]
        return trainer

    for mode in ("min_size", "max_size", "max_size_cycle"):
        for options in ({}, {"limit_val_batches": 1}, {"fast_dev_run": True}):
            both = CombinedLoader([loader(11, 2), loader(5, 2)], mode)
            validate(f"{mode} {options}", Pairs(2), both, **options)
    validate("dataloader_iter", Pulls(), loader(5, 2))
    validate("drop_last", AtTheEnd(), loader(9, 2, drop_last=True))
    validate("whole batches", AtTheEnd(), loader(9, batch_sampler=Whole(range(9), 5, False)))
    chosen = {"exact_evaluation": False} if kind == "ours" else {}
    trainer = validate("exact_evaluation=False", AtTheEnd(), loader(5, 2), chosen)
    own = DistributedSampler(range(5), 2, trainer.global_rank, shuffle=False)
    validate("the user's sampler", AtTheEnd(), loader(5, sampler=own))
    return found


def test_evaluations_that_leave_out_no_sample_are_as_with_stock(tmp_path: Path) -> None:
    """Values, samples and batches are stock's.

    Such evaluations have combined loaders, ``dataloader_iter``, ``drop_last``, a
    sampler of the user's that repeats samples, or ``exact_evaluation=False``.
    """
    ours, stock = on_both(evaluate_as_stock, tmp_path)
    assert_same(ours, stock)


class Whole(BatchSampler):
    """Yields whole batches only, although it says ``drop_last=False``."""

    def __iter__(self) -> Iterator[list[int]]:
        samples = list(self.sampler)
        for first in range(0, len(samples) - self.batch_size + 1, self.batch_size):
            yield samples[first : first + self.batch_size]

    def __len__(self) -> int:
        return len(self.sampler) // self.batch_size
