"""Metrics of an evaluation on several ranks are those of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_ddp_ext.data.samplers import ExactDistributedSampler
from tests.harness.ranks import by_hand_env, run_ranks
from tests.harness.training import Kind, assert_same, make_strategy, make_trainer, on_both
from tests.integration.evaluating import Case, Measured, Values, cases, loaders_of, measured, trainer_on

WORLD_SIZES = (2, 3, 4, 5)
CASES = {world_size: cases(world_size, 13 - world_size) for world_size in WORLD_SIZES}


def evaluate(rank: int, world_size: int, directory: Path, numbers: list[Case], run: str = "validate") -> Values:
    """The values of an evaluation of loaders of these numbers, one after another."""
    trainer = trainer_on(rank, world_size, directory)
    model = Measured(len(numbers), all_kinds=3)
    getattr(trainer, run)(model, loaders_of(numbers), verbose=False)
    return measured(trainer, model)


def evaluate_all(rank: int, world_size: int, directory: Path) -> dict[int, Values]:
    return {ranks: evaluate(rank, world_size, directory, numbers) for ranks, numbers in CASES.items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Values]:
    """What one process finds."""
    found: dict[int, Values] = run_ranks(evaluate_all, 1, tmp_path_factory.mktemp("alone"), env=by_hand_env(1))[0]
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_metrics_equal_those_of_one_process(world_size: int, alone: dict[int, Values], tmp_path: Path) -> None:
    """Every metric of every loader equals one process's on every rank, and each sample was counted once."""
    numbers = CASES[world_size]
    found = run_ranks(evaluate, world_size, tmp_path, numbers, env=by_hand_env(world_size))
    for values in found:
        assert_equal(values, alone[world_size])
    assert found[0]["seen"] == [list(range(samples)) for samples, _ in numbers]


class Mean(L.LightningModule):
    """Logs the mean of its numbers, by itself and by a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()

    def test_step(self, x: Tensor, index: int) -> None:
        self.metric.update(x)
        self.log("metric", self.metric)
        self.log("logged", x.mean(), sync_dist=True)


class Told(NamedTuple):
    """Means of 0 to 4, by the strategy's samplers and by one that repeats nothing; and what its reduce makes."""

    means: list[dict[str, float]]
    whole: list[Tensor]
    others: list[Any]


def of_five(kind: Kind, directory: Path) -> Told:
    numbers: Any = torch.arange(5.0)
    trainer = make_trainer(make_strategy(kind, directory))
    loaders = [DataLoader(numbers, 4, sampler=sampler) for sampler in (None, ExactDistributedSampler(numbers))]
    means = [dict(trainer.test(Mean(), loader, verbose=False)[0]) for loader in loaders]
    return Told(means, *reduced(trainer.global_rank, trainer.strategy.reduce))


def reduced(rank: int, reduce: Callable[..., Any]) -> tuple[list[Tensor], list[Any]]:
    """Means of integers and booleans, and everything else, of tensors that differ by rank."""
    whole = [torch.tensor([1 + rank, 4]), torch.tensor(rank == 0)]
    half, in_place = torch.tensor(0.5 * rank, dtype=torch.half), torch.tensor(float(rank))
    reduce(in_place, reduce_op="mean")
    others = [reduce(torch.tensor(rank + 3), reduce_op=op) for op in ("sum", "min", "max", ReduceOp.SUM)]
    return [reduce(each, reduce_op=op) for each in whole for op in ("mean", "avg")], [reduce(half), in_place, *others]


@pytest.mark.lowest
@pytest.mark.lowest
def test_five_samples_on_two_ranks(tmp_path: Path) -> None:
    """Where stock's padding gives 5/3, and its floor division 5/2, the mean of 0 to 4 is 2; so is that of integers."""
    for ours, stock in zip(*on_both(of_five, tmp_path), strict=True):
        assert ours.means == [{"metric": 2.0, "logged": 2.0}] * 2
        padded, floored = stock.means
        assert padded == pytest.approx({"metric": 5 / 3, "logged": 5 / 3})
        assert floored == {"metric": 2.0, "logged": 2.5}
        assert_same(ours.whole, [torch.tensor([1.5, 4.0])] * 2 + [torch.tensor(0.5)] * 2)
        assert_same(ours.others, stock.others)


def assert_equal(mine: Values, expected: Values) -> None:
    mine, expected = dict(mine), dict(expected)
    assert mine.pop("seen") == expected.pop("seen")
    assert mine == pytest.approx(expected, rel=1e-6, abs=1e-6)
