"""Ranks that log different values with ``self.log(..., sync_dist=True)`` raise, instead of
waiting. Ranks that log the same values make one collective a step.

``test_stock_sweep`` compares the values at every read with stock's.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
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
    on_both,
    on_ranks,
    raised,
)

# Ranks that log different values.

A = "training_step.a (mean)"
B = "training_step.b (mean)"
NOTHING = "no further value"
LAST_STEP = 3
MANY = [*map(str, range(200))]


@dataclass(frozen=True)
class Difference:
    """Names that only one of two ranks logs, and the error of both.

    Attributes:
        rank_1_logs: the names that rank 1 logs in ``first_step`` and later.
        message: a clause of the error.
        error: the error's class.
        first_step: the first step of each epoch in which the ranks differ.
        both_log: the names that both ranks log before, and rank 0 in all steps.
        is_of_epoch: whether the names are reduced at the end of an epoch, and not in steps.
    """

    rank_1_logs: list[str]
    message: str
    error: type[DDPExtError] = DivergenceError
    first_step: int = 2
    both_log: Sequence[str] = ("a",)
    is_of_epoch: bool = False


def different(by_rank_0: str, by_rank_1: str) -> str:
    return (
        f"rank 0 logged {by_rank_0}; rank 1 logged {by_rank_1}; every rank must log the same"
        " names in the same order"
    )


DIFFERENCES = {
    "one more": Difference(["a", "b"], different(NOTHING, B)),
    "another": Difference(["b"], different(A, B)),
    "nothing": Difference([], f"rank 0 began the reduction of {A}", RankAbsentError, first_step=0),
    "something": Difference(
        ["a"], f"rank 1 began the reduction of {A}", RankAbsentError, both_log=()
    ),
    # The error lists the first eight.
    "many": Difference(
        MANY[:70],
        different(
            A, ", ".join(f"training_step.{name} (mean)" for name in MANY[:8]) + " and 62 more"
        ),
        first_step=0,
    ),
    "the last of many": Difference([*MANY, "b"], different(A, B), both_log=[*MANY, "a"]),
    "nothing in the last step": Difference([], different(A, NOTHING), first_step=LAST_STEP),
    "another after the epoch": Difference(["b"], different(A, B), first_step=0, is_of_epoch=True),
    "one more after the epoch": Difference(
        ["a", "b"],
        f"rank 1 began the reduction of {B}",
        RankAbsentError,
        first_step=0,
        is_of_epoch=True,
    ),
}


class Differs(Net):
    """Logs the names of a difference."""

    def __init__(self, difference: Difference) -> None:
        super().__init__()
        self.difference = difference

    def training_step(self, batch: Batch, index: int) -> Tensor:
        differs = self.global_rank == 1 and index >= self.difference.first_step
        is_of_epoch = self.difference.is_of_epoch
        for name in self.difference.rank_1_logs if differs else self.difference.both_log:
            self.log(name, 1.0, sync_dist=True, on_step=not is_of_epoch, on_epoch=is_of_epoch)
        return self.loss(batch)


def messages_of_all(kind: Kind, directory: Path) -> dict[str, str]:
    """Return the error of each difference. One process has all, because ranks take longer to
    start than to fail.
    """
    return {
        name: str(
            raised(difference.error, fit, kind, directory, Differs(difference), limit_val_batches=0)
        )
        for name, difference in DIFFERENCES.items()
    }


def test_ranks_that_log_different_values_all_raise(tmp_path: Path) -> None:
    """The error names each rank's values, in a step and at the end of an epoch."""
    for messages in on_ranks("ours", messages_of_all, tmp_path):
        for name, difference in DIFFERENCES.items():
            assert difference.message in messages[name], name


class ValidatesMoreSteps(Net):
    """Logs in each validation step, of which rank 0 has three and rank 1 two."""

    def validation_step(self, batch: Batch, index: int) -> None:
        self.log("val", self.loss(batch).detach(), on_step=True, on_epoch=True, sync_dist=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Streamed(data(3 - self.global_rank)))


def test_a_rank_with_more_validation_steps_is_named(tmp_path: Path) -> None:
    """The error says that the ranks have logged different values."""
    for outcome in fit_on(2, tmp_path, ValidatesMoreSteps(), num_sanity_val_steps=0):
        assert "ranks logged different values with sync_dist=True" in outcome.failure.message, (
            outcome.story()
        )


# Ranks that log the same values.

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
            reduce_fx = ("mean", "max")[number % 2]
            self.log(f"{number}", loss, reduce_fx=reduce_fx, **self.options)
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
    """A step with fewer values than a message holds, which are 128, makes one collective, and
    so does the end of an epoch.

    Stock makes a barrier and an all-reduce for each number in both.
    """
    (ours, _), (stock, _) = on_both(count_collectives, tmp_path)
    assert ours["values"] == ours["four times as many"] == {"all_gather": STEPS}
    assert stock["values"] == {"barrier": STEPS * VALUES, "all_reduce": STEPS * VALUES}
    numbers = VALUES + VALUES // 2  # the batch size of each mean is also reduced
    assert ours["values of epoch"] == {"all_gather": 1}
    assert stock["values of epoch"] == {"barrier": numbers, "all_reduce": numbers}


class StepsAfterTheEpoch(Net):
    """Also makes an optimiser step at the end of an epoch, and logs a value in each."""

    automatic_optimization = False

    def training_step(self, batch: Batch, index: int) -> None:
        self.batch = batch
        self.on_train_epoch_end()

    def on_train_epoch_end(self) -> None:
        self.manual_backward(self.loss(self.batch))
        self.optimizers().step()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("step", float(self.global_step + self.global_rank), sync_dist=True)
        self.log("both", 1.0 + self.global_rank, sync_dist=True, on_step=True, on_epoch=True)


def values_of_steps_after_the_epoch(kind: Kind, directory: Path) -> dict[str, Tensor]:
    return fit(kind, directory, StepsAfterTheEpoch()).callback_metrics


def test_values_of_a_step_after_the_epoch_equal_those_of_stock(tmp_path: Path) -> None:
    """They are values of a step, although no batch is trained."""
    ours, stock = on_both(values_of_steps_after_the_epoch, tmp_path)
    assert_same(ours, stock)
