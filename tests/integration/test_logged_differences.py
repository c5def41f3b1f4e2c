"""Ranks that log different values with `sync_dist=True` raise, instead of waiting."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ddp_ext import DDPExtError, DivergenceError
from lightning_ddp_ext.errors import RankAbsentError
from tests.harness.training import Batch, Kind, Net, Rows, fit, on_ranks

A = "training_step.a (mean)"
B = "training_step.b (mean)"
LAST_STEP = 3


@dataclass(frozen=True)
class Case:
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
    "one more": Case(["a", "b"], f"rank 0 logged {NOTHING}; rank 1 logged {B}; every rank"),
    "another": Case(["b"], f"rank 0 logged {A}; rank 1 logged {B}; every rank"),
    "nothing": Case([], f"rank 0 began the reduction of {A}", RankAbsentError, first_step=0),
    "something": Case(["a"], f"rank 1 began the reduction of {A}", RankAbsentError, common=()),
    "many": Case(
        [f"{number}" for number in range(70)],
        "training_step.7 (mean) and 62 more; every rank",  # the first eight are listed
        first_step=0,
    ),
    "the last of many": Case(
        [*map(str, range(200)), "b"],
        f"rank 0 logged {A}; rank 1 logged {B}; every rank",
        common=[*map(str, range(200)), "a"],
    ),
    "nothing in the last step": Case(
        [], f"rank 0 logged {A}; rank 1 logged {NOTHING}", first_step=LAST_STEP
    ),
    "another after the epoch": Case(
        ["b"], f"rank 0 logged {A}; rank 1 logged {B}", first_step=0, is_of_epoch=True
    ),
    "one more after the epoch": Case(
        ["a", "b"], f"began the reduction of {B}", DDPExtError, first_step=0, is_of_epoch=True
    ),
}


class Differs(Net):
    """Logs what a case says."""

    def __init__(self, case: Case) -> None:
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


class ReadsEarly(Net):
    """Rank 1 reads a value and then waits for the others, while rank 0 logs another."""

    def training_step(self, batch: Batch, index: int) -> Tensor:
        self.log("a", 1.0, sync_dist=True)
        if self.global_rank == 1:
            float(self.trainer.callback_metrics["a"])
            self.trainer.strategy.barrier("own call")
        self.log("b", 1.0, sync_dist=True)
        return self.loss(batch)


class ValidatesMoreSteps(Net):
    """Rank 0 has one validation step more than rank 1."""

    def validation_step(self, batch: Batch, index: int) -> None:
        self.log("val", self.loss(batch).detach(), on_step=True, on_epoch=True, sync_dist=True)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Rows(3 - self.global_rank), batch_size=1)


def train(kind: Kind, directory: Path, make_model: Callable[[], Net]) -> str:
    """Return the error of a training."""
    with pytest.raises(DDPExtError) as raised:
        fit(kind, directory, make_model(), num_sanity_val_steps=0)
    return str(raised.value)


@pytest.mark.parametrize(
    ("make_model", "message"),
    [
        pytest.param(ReadsEarly, f"the reduction of {B}", id="another call"),
        pytest.param(
            ValidatesMoreSteps, "ranks logged different values with sync_dist=True", id="steps"
        ),
    ],
)
def test_ranks_that_get_out_of_step_are_named(
    make_model: Callable[[], Net], message: str, tmp_path: Path
) -> None:
    """The error names the values that one of the ranks reduces."""
    for error in on_ranks("ours", train, tmp_path, make_model):
        assert message in error
