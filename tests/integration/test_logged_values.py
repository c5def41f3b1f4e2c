"""Ranks that log different values with ``self.log(..., sync_dist=True)`` raise, instead of
waiting, and others make one collective a step.

``test_stock_sweep`` compares the values at every read with stock's.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lightning_ddp_ext import DDPExtError, DivergenceError, RankAbsentError
from tests.harness.training import (
    Batch,
    Kind,
    Net,
    Streamed,
    assert_same,
    data,
    fit,
    fit_on,
    make_strategy,
    make_trainer,
    on_both,
    on_ranks,
)


def reduce_values(kind: Kind, directory: Path) -> dict[str, Any]:
    """Reduce values of two ranks, of which rank 0 has the smaller ones."""
    trainer = make_trainer(make_strategy(kind, directory))
    trainer.test(Net(), verbose=False)
    rank = trainer.global_rank
    reduce: Any = trainer.strategy.reduce
    in_place = torch.tensor(float(rank))
    reduce(in_place, reduce_op="mean")
    reduced = {
        f"{op}": reduce(torch.tensor([1 + rank, 4]), reduce_op=op)
        for op in ("mean", "sum", "min", ReduceOp.SUM)
    }
    return {
        **reduced,
        "in place": in_place,
        "number": reduce(3.0),
        "half": reduce(torch.tensor(0.5 * rank, dtype=torch.half)),
    }


@pytest.mark.lowest
def test_tensors_that_are_not_logged_are_reduced_as_with_stock(tmp_path: Path) -> None:
    """``Strategy.reduce`` returns what stock's does, and changes the same tensors."""
    ours, stock = on_both(reduce_values, tmp_path)
    assert_same(ours, stock)


# Ranks that log different values.

A = "training_step.a (mean)"
B = "training_step.b (mean)"
LAST_STEP = 3


@dataclass(frozen=True)
class Difference:
    """The names that rank 1 logs from a step on, and the error of all ranks.

    Rank 0 logs ``common`` in all steps, and so does rank 1 before.
    """

    names: list[str]
    message: str
    error: type[DDPExtError] = DivergenceError
    first_step: int = 2
    common: Sequence[str] = ("a",)
    is_of_epoch: bool = False


NOTHING = "no further value"
CASES = {
    "one more": Difference(["a", "b"], f"rank 0 logged {NOTHING}; rank 1 logged {B}; every rank"),
    "another": Difference(["b"], f"rank 0 logged {A}; rank 1 logged {B}; every rank"),
    "nothing": Difference([], f"rank 0 began the reduction of {A}", RankAbsentError, first_step=0),
    "something": Difference(
        ["a"], f"rank 1 began the reduction of {A}", RankAbsentError, common=()
    ),
    "many": Difference(
        [f"{number}" for number in range(70)],
        "training_step.7 (mean) and 62 more; every rank",  # the first eight are listed
        first_step=0,
    ),
    "the last of many": Difference(
        [*map(str, range(200)), "b"],
        f"rank 0 logged {A}; rank 1 logged {B}; every rank",
        common=[*map(str, range(200)), "a"],
    ),
    "nothing in the last step": Difference(
        [], f"rank 0 logged {A}; rank 1 logged {NOTHING}", first_step=LAST_STEP
    ),
    "another after the epoch": Difference(
        ["b"], f"rank 0 logged {A}; rank 1 logged {B}", first_step=0, is_of_epoch=True
    ),
    "one more after the epoch": Difference(
        ["a", "b"], f"began the reduction of {B}", DDPExtError, first_step=0, is_of_epoch=True
    ),
}


class Differs(Net):
    """Logs what a case says."""

    def __init__(self, case: Difference) -> None:
        super().__init__()
        self.case = case

    def training_step(self, batch: Batch, index: int) -> Tensor:
        is_other = self.global_rank == 1 and index >= self.case.first_step
        on = {"on_step": False, "on_epoch": True} if self.case.is_of_epoch else {}
        for name in self.case.names if is_other else self.case.common:
            self.log(name, 1.0, sync_dist=True, **on)
        return self.loss(batch)


def fail(kind: Kind, directory: Path) -> dict[str, str]:
    """Return the error of each case, one after another in one process."""
    messages = dict.fromkeys(CASES, "no error")
    for name, case in CASES.items():
        try:
            fit(kind, directory, Differs(case), limit_val_batches=0)
        except case.error as error:
            messages[name] = str(error)
    return messages


def test_ranks_that_log_different_values_all_raise(tmp_path: Path) -> None:
    """The error names each rank's values, in a step and at the end of an epoch."""
    for messages in on_ranks("ours", fail, tmp_path):
        for name, case in CASES.items():
            assert case.message in messages[name], name


class ValidatesMoreSteps(Net):
    """Rank 0 has one validation step more than rank 1."""

    def validation_step(self, batch: Batch, index: int) -> None:
        self.log("val", self.loss(batch).detach(), on_step=True, on_epoch=True, sync_dist=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Streamed(data(3 - self.global_rank)))


def test_a_rank_with_more_validation_steps_is_named(tmp_path: Path) -> None:
    """The error says that the ranks have logged different values."""
    for outcome in fit_on(2, tmp_path, ValidatesMoreSteps(), num_sanity_val_steps=0):
        error = outcome.failure.message
        assert "ranks logged different values with sync_dist=True" in error, outcome.story()


# Collectives.

STEPS = 4  # in an epoch of ``Net`` on two ranks
VALUES = 10


class Logs(Net):
    """Logs a number of values in each training step, and nothing else."""

    def __init__(self, values: int, **options: Any) -> None:
        super().__init__()
        self.values = values
        self.options = {"sync_dist": True, **options}

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss = self.loss(batch)
        for number in range(self.values):
            op = ("mean", "max")[number % 2]
            self.log(f"{number}", loss, reduce_fx=op, **self.options)
        return loss


def count_collectives(kind: Kind, directory: Path) -> dict[str, Counter[str]]:
    """Return the additional collectives of an epoch with values, by kind."""

    def count(model: Net) -> Counter[str]:
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            fit(kind, directory, model, max_epochs=1, limit_val_batches=0)
        names = [event.name for event in recorded.events()]
        return Counter(name.removeprefix("gloo:") for name in names if "gloo:" in name)

    count(Logs(1))  # opens groups
    nothing = count(Logs(0))
    return {
        "values": count(Logs(VALUES)) - nothing,
        "four times as many": count(Logs(4 * VALUES)) - nothing,
        "values of epoch": count(Logs(VALUES, on_step=False, on_epoch=True)) - nothing,
    }


@pytest.mark.nightly
def test_a_step_makes_one_collective(tmp_path: Path) -> None:
    """A step with up to 127 values makes one collective, and so does the end of an epoch.

    Stock makes a barrier and an all-reduce for each number in both.
    """
    (ours, _), (stock, _) = on_both(count_collectives, tmp_path)
    assert ours["values"] == ours["four times as many"] == {"all_gather": STEPS}
    assert stock["values"] == {"barrier": STEPS * VALUES, "all_reduce": STEPS * VALUES}
    numbers = VALUES + VALUES // 2  # of a mean also the batch size
    assert ours["values of epoch"] == {"all_gather": 1}
    assert stock["values of epoch"] == {"barrier": numbers, "all_reduce": numbers}


class StepsAfterTheEpoch(Net):
    """Also makes an optimiser step at the end of an epoch, and logs a value in each."""

    automatic_optimization = False

    def make_step(self, batch: Batch) -> None:
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        self.optimizers().step()

    def training_step(self, batch: Batch, index: int) -> None:
        self.batch = batch
        self.make_step(batch)

    def on_train_epoch_end(self) -> None:
        self.make_step(self.batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = sum(parameter.sum() for parameter in self.parameters()) * (1 + self.global_rank)
        self.log("step", norm, sync_dist=True)
        self.log("both", norm, sync_dist=True, on_step=True, on_epoch=True)


def values_of_steps_after_the_epoch(kind: Kind, directory: Path) -> dict[str, Tensor]:
    return fit(kind, directory, StepsAfterTheEpoch()).callback_metrics


def test_values_of_a_step_after_the_epoch_equal_those_of_stock(tmp_path: Path) -> None:
    """They are values of a step, although no batch is trained."""
    ours, stock = on_both(values_of_steps_after_the_epoch, tmp_path)
    assert_same(ours, stock)
