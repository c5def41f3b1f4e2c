"""Ranks that have come apart in training are found, under our strategy and under stock ``ddp``."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState
from torch.distributed.optim import ZeroRedundancyOptimizer

from lightning_ddp_ext import ConfigurationError, DivergenceError, OptionError, RankConsistency, RankFailedError
from tests.harness.ranks import by_hand_env, launch_ranks, run_ranks
from tests.harness.training import (
    KINDS,
    Batch,
    Kind,
    Net,
    assert_same,
    make_strategy,
    make_trainer,
    on_ranks,
    weights,
)


class Nudge(L.Callback):
    """Does something to one rank's model after a batch."""

    def __init__(self, rank: int, batch: int, nudge: Callable[[L.LightningModule], object]) -> None:
        self.rank, self.batch, self.nudge = rank, batch, nudge

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.fit_loop.epoch_loop.total_batch_idx + 1 == self.batch:
            self.nudge(pl_module)


@torch.no_grad()
def nudge_weight(model: Any) -> None:
    model.layers[0].weight[1, 2] += 1e-6


@torch.no_grad()
def nudge_statistics(model: Any) -> None:
    model.layers[1].running_var[0] *= 2


def set_rate(model: Any) -> None:
    model.trainer.optimizers[0].param_groups[0]["lr"] = 0.5


@dataclass
class Fit:
    """How a fit ended on a rank."""

    error: Exception | None
    warnings: list[str]
    steps: int
    weights: dict[str, Tensor]


def fit(kind: Kind, directory: Path, model: L.LightningModule, *callbacks: L.Callback, **options: Any) -> Fit:
    strategy = make_strategy(kind, directory, **options.pop("strategy", {}))
    options = {"devices": torch.distributed.get_world_size() if kind == "stock" else 2, **options}
    trainer = make_trainer(strategy, callbacks=list(callbacks), **options)
    error: Exception | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(model)
        except (DivergenceError, ConfigurationError) as raised:
            error = raised
    said = [
        str(warning.message)
        for warning in caught
        if "rank 0 in" in str(warning.message) or "rank 1 in" in str(warning.message)
    ]
    return Fit(error, said, trainer.global_step, weights(model))


# --- found at the next check, on every rank -------------------------------------------------------


def diverge(kind: Kind, directory: Path) -> Fit:
    return fit(
        kind, directory, Net(), Nudge(1, 4, nudge_weight), RankConsistency(every_n_steps=3), max_epochs=4, devices=3
    )


@pytest.mark.parametrize("kind", KINDS)
def test_one_element_on_one_rank_of_three_is_found_at_the_next_check(kind: Kind, tmp_path: Path) -> None:
    """All three raise the same error after step 6, and name the rank and the parameter."""
    for found in on_ranks(kind, diverge, tmp_path, world_size=3):
        assert isinstance(found.error, DivergenceError)
        assert str(found.error).startswith(
            "the ranks differ after step 6, and did not after step 3: rank 1 in parameter layers.0.weight; "
        )
        assert (found.error.ranks, found.error.names, found.steps) == ((1,), ("parameter layers.0.weight",), 6)


# --- warned of, and repaired ----------------------------------------------------------------------


class Manual(Net):
    """Steps its optimiser by itself; rank 1 leaves out a step."""

    def __init__(self, left_out: int = -1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.left_out = left_out

    def training_step(self, batch: Batch, index: int) -> None:
        self.manual_backward(self.loss(batch))
        if (self.global_rank, index) != (1, self.left_out):
            self.optimizers().step()
        self.zero_grad()

    def on_train_epoch_start(self) -> None:
        self.optimizers().zero_grad()


class Gan(Net):
    """Has two optimisers, which both step in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, index: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.layers[0].parameters()), torch.optim.SGD(self.layers[3].parameters(), lr=0.1)


class Plateau(Net):
    """Has a schedule that looks at a metric which every rank has for itself."""

    def training_step(self, batch: Batch, index: int) -> Any:
        self.log("own", float(self.global_rank * index))
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "own", "interval": "step"}}


class Sharded(Net):
    """Its optimiser has a part of the state on each rank."""

    def configure_optimizers(self) -> Any:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam, lr=0.01)


class Constant(Net):
    """Has a buffer that nobody writes to, and one that everybody does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("seen", torch.zeros(1))

    def training_step(self, batch: Batch, index: int) -> Any:
        self.seen += batch[0].sum()
        return super().training_step(batch, index)


@dataclass(frozen=True)
class Case:
    """What is trained, what happens to a rank, and what is said of it, in this order."""

    model: Callable[[], L.LightningModule] = Net
    nudge: tuple[int, int, Callable[[Any], object]] | None = None
    said: tuple[str, ...] = ()
    every: int = 1
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: Callable[[], dict[str, Any]] = dict
    is_repairable: bool = True


CASES = {
    "nothing": Case(),
    "no batch that steps": Case(trainer={"accumulate_grad_batches": 3, "val_check_interval": 2}),
    "half precision": Case(trainer={"precision": "bf16-true"}),
    "own buffers": Case(Constant, strategy=lambda: {"broadcast_buffers": False}),
    "two optimisers": Case(Gan, strategy=lambda: {"find_unused_parameters": True}),
    "sharded": Case(Sharded),
    "a weight": Case(
        nudge=(0, 2, nudge_weight),
        said=("after step 2, and did not after step 1: rank 1 in parameter layers.0.weight",),
    ),
    "a rate": Case(
        nudge=(1, 2, set_rate),
        trainer={"max_epochs": 1},
        said=(
            "rank 1 in optimizer 0: lr of group 0 (0.1 on rank 0, 0.5 on rank 1); ",
            " and parameter layers.3.bias; ",
        ),
    ),
    "synchronised statistics": Case(
        nudge=(1, 2, nudge_statistics),
        trainer={"sync_batchnorm": True},
        said=("after step 2, and did not after step 1: rank 1 in buffer layers.1.running_var",),
    ),
    "accumulation": Case(
        nudge=(1, 3, nudge_weight),
        trainer={"accumulate_grad_batches": 2},
        said=("after step 2, and did not after step 1: rank 1 in parameter layers.0.weight",),
    ),
    "a step left out": Case(
        lambda: Manual(2),
        every=2,
        trainer={"max_epochs": 1},
        said=(
            "after step 4, and did not after step 2: rank 1 in number of optimiser steps (4 on rank 0, 3 on rank 1), ",
        ),
        is_repairable=False,
    ),
    "a schedule on a rank's own metric": Case(
        Plateau,
        every=4,
        trainer={"max_epochs": 1},
        said=("after step 4, and did not at the start of training: rank 1 in optimizer 0: lr of group 0 (0.01",),
    ),
}


def train(kind: Kind, directory: Path, how: Any) -> dict[str, Fit]:
    """All cases, one after another, in the same processes."""
    found = {}
    for name, case in CASES.items():
        if (name == "synchronised statistics" and kind == "stock") or (how == "broadcast" and not case.is_repairable):
            continue  # torch's own layers are for CUDA
        L.seed_everything(3)
        nudges = [Nudge(*case.nudge)] if case.nudge else []
        options = {"strategy": case.strategy(), **case.trainer}
        found[name] = fit(kind, directory, case.model(), *nudges, RankConsistency(case.every, how), **options)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_differs_is_warned_of_and_what_may_differ_is_not(kind: Kind, tmp_path: Path) -> None:
    """Rank 0 says it, once of each finding; training goes on to its end."""
    first, second = on_ranks(kind, train, tmp_path, "warn", time_limit=90)
    for name, here in first.items():
        said = CASES[name].said
        assert here.error is None
        assert len(here.warnings) == len(said), name
        assert all(part in text for part, text in zip(said, here.warnings, strict=True)), name
        assert second[name].warnings == []


@pytest.mark.parametrize("kind", KINDS)
def test_rank_zero_replaces_what_differs(kind: Kind, tmp_path: Path) -> None:
    """Rank 0 warns of it once; from then on the ranks have the same weights, to the last bit."""
    first, second = on_ranks(kind, train, tmp_path, "broadcast", time_limit=90)
    for name, here in first.items():
        said = CASES[name].said[:1]
        assert here.error is None
        assert (len(here.warnings) >= 1) == bool(said), name
        assert all(part in text for part, text in zip(said, here.warnings, strict=False)), name
        parameters = [key for key in here.weights if not key.startswith(("layers.1.running", "seen"))]
        assert_same(*({key: each.weights[key] for key in parameters} for each in (here, second[name])))


# --- before the first step ------------------------------------------------------------------------


class Configured(Net):
    """Is not the same on all ranks, in a way of the test's choosing."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__()
        self.rank, self.what = rank, what
        self.save_hyperparameters({"directory": f"/scratch/{rank}", "model": {"lr": 0.1 + (what == "lr") * rank}})

    def configure_model(self) -> None:
        if self.what == "width" and self.rank == 1:
            self.layers = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 1))
        if self.what == "frozen" and self.rank == 1:
            self.layers[0].requires_grad_(False)


class Numbers(L.LightningDataModule):
    """Has a hyper-parameter, too."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.save_hyperparameters()


def set_up(kind: Kind, directory: Path, what: str) -> str:
    rank = int(os.environ["RANK"])
    consistency = RankConsistency(ignore=["directory"])
    options = {"max_epochs": 1 + (what == "max_epochs") * rank}
    trainer = make_trainer(make_strategy(kind, directory), callbacks=[consistency], **options)
    with pytest.raises(DivergenceError) as caught:
        trainer.fit(Configured(rank, what), datamodule=Numbers(4 + (what == "batch_size") * rank))
    return str(caught.value)


SETUPS = {
    "width": "parameter layers.0.weight (float32 (8, 4), requires_grad=True on rank 0, float32 (9, 4), ",
    "frozen": "(float32 (8, 4), requires_grad=True on rank 0, float32 (8, 4), requires_grad=False on rank 1)",
    "lr": "rank 1 in hyper-parameter model.lr (0.1 on rank 0, 1.1 on rank 1); ",
    "batch_size": "rank 1 in datamodule's hyper-parameter batch_size (4 on rank 0, 5 on rank 1); ",
    "max_epochs": "rank 1 in Trainer's max_epochs (1 on rank 0, 2 on rank 1); ",
}


def set_up_all(kind: Kind, directory: Path) -> dict[str, str]:
    return {what: set_up(kind, directory, what) for what in SETUPS}


def test_ranks_that_are_set_up_otherwise_are_told_what_differs(tmp_path: Path) -> None:
    """Before DDP looks at the model; what is ignored may differ."""
    for by_case in on_ranks("stock", set_up_all, tmp_path):
        for what, said in SETUPS.items():
            assert by_case[what].startswith("the ranks are not set up alike: rank 1 in ")
            assert said in by_case[what]


def test_our_strategy_lets_the_callback_look_first(tmp_path: Path) -> None:
    """The model with another width is named by its parameters there, too."""
    for said in on_ranks("ours", set_up, tmp_path, "width"):
        assert SETUPS["width"] in said


def average(kind: Kind, directory: Path) -> tuple[str, int]:
    state = {"ddp_comm_state": PostLocalSGDState(None, None, 2), "model_averaging_period": 2}
    refused = fit(kind, directory, Net(), RankConsistency(), strategy=state)
    return str(refused.error), fit(kind, directory, Net(), max_epochs=1).steps


def test_models_that_are_averaged_are_refused(tmp_path: Path) -> None:
    """They differ on purpose; the Trainer can be used without the callback."""
    for message, steps in on_ranks("stock", average, tmp_path):
        assert message.startswith(
            "RankConsistency cannot compare models that differ on purpose until they are averaged"
        )
        assert steps == 4


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "10"])
def test_numbers_of_steps_that_make_no_sense_are_refused(value: Any) -> None:
    """Fields, rule, value and remedy."""
    with pytest.raises(OptionError, match="every_n_steps must be a whole number, at least 1"):
        RankConsistency(value)


class Overflowing(Net):
    """Has a loss that is not finite, in one batch of one rank."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss + math.inf if (self.global_rank, self.global_step) == (1, 2) else loss


def overflow(rank: int, world_size: int, directory: Path, on_divergence: Any) -> tuple[int, list[str]]:
    callback = RankConsistency(check_finite=True, on_divergence=on_divergence, ignore=["*"])
    trainer = make_trainer(make_strategy("ours", directory), callbacks=[callback], max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Overflowing())
    return trainer.global_step, [str(each.message) for each in caught if "the loss of rank" in str(each.message)]


SENTENCE = "the loss of rank 1 is inf in step 2, batch 2 of epoch 0; look at that batch, or find the operation with"


def test_a_loss_that_is_not_finite_is_named_with_rank_step_and_batch(tmp_path: Path) -> None:
    """It is an error of that rank, which releases the others, or its warning."""
    first, second = launch_ranks(overflow, 2, tmp_path, "raise", env=by_hand_env(2))
    assert second.error is not None
    assert second.error.message.startswith(SENTENCE)
    assert first.error is not None
    assert isinstance(first.error.exception, RankFailedError)
    assert SENTENCE in first.error.message
    (_, nothing), (steps, said) = run_ranks(overflow, 2, tmp_path, "warn", env=by_hand_env(2))
    assert (nothing, steps) == ([], 4)
    assert [sentence[: len(SENTENCE)] for sentence in said] == [SENTENCE]
