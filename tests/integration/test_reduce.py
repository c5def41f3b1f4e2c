"""The mean of values on several ranks is that of all samples, also of integers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_ddp_ext.data.samplers import ExactDistributedSampler
from tests.harness.training import Kind, assert_same, make_strategy, make_trainer, on_both


class Mean(L.LightningModule):
    """Logs the mean of its numbers, by itself and by a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()
        self.idle: list[bool] = []

    def test_step(self, x: Tensor, index: int) -> None:
        self.idle.append(getattr(self.trainer.strategy, "is_idle", False))
        self.metric.update(x)
        self.log("metric", self.metric)
        self.log("logged", x.mean(), sync_dist=True)


@dataclass
class Evaluated:
    """Logged means of 0 to 4, and in which of the model's steps the rank was idle."""

    means: list[dict[str, float]]  # by the strategy's sampler, and by one that repeats nothing
    idle: list[bool]


def evaluate_five(kind: Kind, directory: Path) -> Evaluated:
    numbers: Any = torch.arange(5.0)
    trainer = make_trainer(make_strategy(kind, directory))
    model = Mean()
    means = [
        dict(trainer.test(model, DataLoader(numbers, 1, sampler=sampler), verbose=False)[0])
        for sampler in (None, ExactDistributedSampler(numbers))
    ]
    return Evaluated(means, model.idle)


@pytest.mark.lowest
def test_the_mean_of_five_samples_on_two_ranks(tmp_path: Path) -> None:
    """The mean of 0 to 4 is 2; stock's padding gives 5/3, and no padding 5/2."""
    ours, stock = on_both(evaluate_five, tmp_path)
    assert [rank.idle for rank in ours] == [[False] * 6, [False, False, True] * 2]
    for mine, stocks in zip(ours, stock, strict=True):
        assert mine.means == [{"metric": 2.0, "logged": 2.0}] * 2
        padded, unequal = stocks.means
        assert padded == pytest.approx({"metric": 5 / 3, "logged": 5 / 3})
        assert unequal == {"metric": 2.0, "logged": 2.5}


@dataclass
class Reduced:
    """What ``strategy.reduce`` makes of tensors and numbers of two ranks."""

    integer_means: list[Tensor]
    others: list[Any]


def reduce_values(kind: Kind, directory: Path) -> Reduced:
    trainer = make_trainer(make_strategy(kind, directory))
    trainer.test(Mean(), DataLoader(torch.arange(2.0), 1), verbose=False)  # type: ignore[arg-type]
    rank = trainer.global_rank
    reduce = trainer.strategy.reduce
    in_place = torch.tensor(float(rank))
    reduce(in_place, reduce_op="mean")
    return Reduced(
        integer_means=[
            reduce(torch.tensor([1 + rank, 4]), reduce_op=op)  # type: ignore[misc]
            for op in ("mean", "avg")
        ],
        others=[
            *(
                reduce(torch.tensor(rank + 3), reduce_op=op)
                for op in ("sum", "min", "max", ReduceOp.SUM)
            ),
            in_place,
            reduce(3.0),
            reduce(torch.tensor(0.5 * rank, dtype=torch.half)),
        ],
    )


@pytest.mark.lowest
def test_a_mean_of_integers_is_not_rounded(tmp_path: Path) -> None:
    """The mean of 1 and 2 is 1.5, where stock divides to whole numbers.

    All else that ``reduce`` returns is stock's.
    """
    for mine, stocks in zip(*on_both(reduce_values, tmp_path), strict=True):
        assert_same(mine.integer_means, [torch.tensor([1.5, 4.0])] * 2)
        assert_same(mine.others, stocks.others)
