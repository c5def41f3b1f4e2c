"""Ranks that have come apart in training are found, under our strategy and under stock ``ddp``."""

from __future__ import annotations

import math
import os
import re
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

from lightning_ddp_ext import ConfigurationError, DivergenceError, RankConsistency, RankFailedError
from tests.harness.ranks import by_hand_env, launch_ranks, run_ranks
from tests.harness.training import Batch, Kind, Net, assert_same, make_strategy, make_trainer, on_ranks, weights

Change = Callable[[Any], object]


class Nudge(L.Callback):
    """Does something to some ranks' model after a batch."""

    def __init__(self, batch: int, changes: dict[int, Change]) -> None:
        self.batch, self.changes = batch, changes

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        change = self.changes.get(trainer.global_rank)
        if change is not None and trainer.fit_loop.epoch_loop.total_batch_idx + 1 == self.batch:
            change(pl_module)


@torch.no_grad()
def flip(*tensors: Tensor) -> None:
    """The least that can be done to each: a bit of one element."""
    for tensor in tensors:
        tensor.view(torch.uint8).view(-1)[0] ^= 1


def state_of(model: Any, name: str = "layers.3.bias") -> dict[str, Any]:
    found: dict[str, Any] = model.trainer.optimizers[0].state[model.get_parameter(name)]
    return found


def set_rate(rate: float) -> Change:
    return lambda model: model.trainer.optimizers[0].param_groups[0].update(lr=rate)


def flip_weight(model: Any) -> None:
    flip(model.layers[0].weight)


def flip_much(model: Any) -> None:
    flip(*model.parameters(), *(state_of(model, f"layers.{name}")["momentum_buffer"] for name in ("0.bias", "3.bias")))
    set_rate(0.7)(model)


@dataclass
class Fit:
    """How a fit ended on a rank."""

    error: Exception | None
    warnings: list[str]
    steps: int
    weights: dict[str, Tensor]


def fit(kind: Kind, directory: Path, model: L.LightningModule, *callbacks: L.Callback, **options: Any) -> Fit:
    trainer = make_trainer(make_strategy(kind, directory), callbacks=list(callbacks), **options)
    error: Exception | None = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(model)
        except DivergenceError as raised:
            error = raised
    said = [text for each in caught if re.search("rank [01] (in|is)", text := str(each.message))]
    return Fit(error, said, trainer.global_step, weights(model))


def diverge(kind: Kind, directory: Path) -> Fit:
    return fit(kind, directory, Net(), Nudge(4, {1: flip_weight}), RankConsistency(3), max_epochs=4, devices=3)


def test_one_element_on_one_rank_of_three_is_found_at_the_next_check(tmp_path: Path) -> None:
    """All three raise the same error after step 6, and name the rank and the parameter."""
    for found in on_ranks("stock", diverge, tmp_path, world_size=3):
        assert isinstance(found.error, DivergenceError)
        assert str(found.error).startswith(
            "the ranks differ after step 6, and did not after step 3: rank 1 in parameter layers.0.weight; "
        )
        assert (found.error.ranks, found.error.names, found.steps) == ((1,), ("parameter layers.0.weight",), 6)


class Manual(Net):
    """Steps its optimiser by itself; rank 1 leaves out a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, index: int) -> None:
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        if (self.global_rank, index) != (1, 2):
            self.optimizers().step()


class Buffers(Net):
    """Has buffers: a constant one, one of each rank's own, one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(2))
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def training_step(self, batch: Batch, index: int) -> Any:
        self.seen += batch[0].sum()
        return super().training_step(batch, index)


@dataclass(frozen=True)
class Case:
    """What is trained, what ranks do to themselves after the second batch, and what is said of it."""

    changes: dict[int, Change] = field(default_factory=dict)
    said: str | None = None
    model: Callable[[], L.LightningModule] = Net
    batch: int = 2
    every: int = 1
    ignore: tuple[str, ...] = ()
    trainer: dict[str, Any] = field(default_factory=dict)
    is_repairable: bool = True


AFTER_2, AFTER_4 = (f"after step {n}, and did not after step {n - 1}: rank 1 in " for n in (2, 4))
CASES = {
    "own buffers": Case({1: lambda model: flip(model.seen, model.scratch)}, None, Buffers),
    "a constant buffer": Case({1: lambda model: flip(model.mask)}, f"{AFTER_2}buffer mask; ", Buffers),
    "synchronised statistics": Case(
        {1: lambda model: flip(model.layers[1].running_var)},
        f"{AFTER_2}buffer layers.1.running_var",
        trainer={"sync_batchnorm": True},
    ),
    "an accumulation": Case(
        {1: flip_weight},
        f"{AFTER_2}parameter layers.0.weight",
        batch=3,
        trainer={"accumulate_grad_batches": 2, "val_check_interval": 2},
    ),
    "optimiser state": Case(
        {1: lambda model: flip(state_of(model)["momentum_buffer"])},
        f"{AFTER_4}optimizer 0: momentum_buffer of layers.3.bias; ",
        batch=4,
    ),
    "after the last check": Case(
        {1: flip_weight},
        "at the end of training, and did not after step 3: rank 1 in parameter layers.0.weight",
        batch=4,
        every=3,
    ),
    "state that one rank lacks": Case(
        {1: lambda model: state_of(model).clear()},
        f"{AFTER_4}optimizer 0: momentum_buffer of layers.3.bias (float32 (1,) on rank 0, nothing on rank 1); ",
        batch=4,
        is_repairable=False,
    ),
    "much": Case({1: flip_much}, " and 1 more; ", batch=4),
    "ignored": Case(
        {1: lambda model: [flip_weight(model), set_rate(7.0)(model)]},
        ignore=("layers.*", "optimizer 0: lr of *"),
    ),
    "a step left out": Case(
        model=Manual,
        every=2,
        said="after step 4, and did not after step 2: rank 1 in number of optimiser steps (4 on rank 0, 3 on rank 1), ",
        is_repairable=False,
    ),
}


def train(kind: Kind, directory: Path, how: Any) -> dict[str, Fit]:
    """All cases, one after another, in the same processes; those that cannot be repaired come last, as they raise."""
    found = {}
    for name, case in sorted(CASES.items(), key=lambda each: not each[1].is_repairable):
        if kind == "stock" and "sync_batchnorm" in case.trainer:
            continue  # torch's own layers are for CUDA
        L.seed_everything(3)
        callbacks = [Nudge(case.batch, case.changes), RankConsistency(case.every, how, ignore=case.ignore)]
        found[name] = fit(kind, directory, case.model(), *callbacks, **{"max_epochs": 1, **case.trainer})
    return found


def test_what_differs_is_warned_of_and_what_may_differ_is_not(tmp_path: Path) -> None:
    """Rank 0 says it once, though it is found again at each check; training goes on to its end."""
    first, second = on_ranks("ours", train, tmp_path, "warn", time_limit=90)
    for name, here in first.items():
        said = CASES[name].said
        assert here.error is None, name
        assert [said in text for text in here.warnings] == ([True] if said else []), (name, here.warnings)
        assert second[name].warnings == []


def test_rank_zero_replaces_what_differs(tmp_path: Path) -> None:
    """With a warning; then ranks have the same weights to the last bit. What has another form is an error on both."""
    first, second = on_ranks("stock", train, tmp_path, "broadcast", time_limit=90)
    for name, here in first.items():
        case, other = CASES[name], second[name]
        if not case.is_repairable:
            assert str(here.error) == str(other.error), name
            assert "cannot make" in str(here.error), name
            continue
        assert here.error is other.error is None, name
        assert [case.said in text for text in here.warnings[:1]] == ([True] if case.said else []), name
        assert all("what rank 0 has took its place" in text for text in here.warnings)
        same = [key for key in here.weights if not key.startswith(("layers.1.running", "seen", "mask"))]
        if not case.ignore:
            assert_same(*({key: each.weights[key] for key in same} for each in (here, other)))


class Sharded(Net):
    """Its optimiser has a part of the state on each rank."""

    def configure_optimizers(self) -> Any:
        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.Adam, lr=0.01)


def resume_sharded(kind: Kind, directory: Path) -> None:
    path = directory / "sharded.ckpt"
    for epochs in (1, 2):
        trainer = make_trainer(make_strategy(kind, directory), callbacks=[RankConsistency(1)], max_epochs=epochs)
        trainer.fit(Sharded(), ckpt_path=path if epochs == 2 else None)
        trainer.save_checkpoint(path)


def test_a_sharded_optimiser_is_no_divergence(tmp_path: Path) -> None:
    """Each rank has the state of other parameters, from the beginning and when a run is resumed."""
    on_ranks("ours", resume_sharded, tmp_path)


class Configured(Net):
    """Is not the same on all ranks, in a way of the test's choosing."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__()
        self.rank, self.what = rank, what
        self.save_hyperparameters({"directory": f"/scratch/{rank}", "model": {"lr": 0.1 + (what == "lr") * rank}})

    def configure_model(self) -> None:
        if self.what == "width" and self.rank == 1:
            self.layers = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 1))


class Numbers(L.LightningDataModule):
    """Has a hyper-parameter, too."""

    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.save_hyperparameters()


SETUPS = {
    "width": "parameter layers.0.weight (float32 (8, 4), requires_grad=True on rank 0, float32 (9, 4), ",
    "lr": "rank 1 in hyper-parameter model.lr (0.1 on rank 0, 1.1 on rank 1); ",
    "batch_size": "rank 1 in datamodule's hyper-parameter batch_size (4 on rank 0, 5 on rank 1); ",
    "max_epochs": "rank 1 in Trainer's max_epochs (1 on rank 0, 2 on rank 1); ",
}


def set_up(kind: Kind, directory: Path) -> list[str]:
    rank, said = int(os.environ["RANK"]), []
    for what in SETUPS:
        options = {"max_epochs": 1 + (what == "max_epochs") * rank}
        trainer = make_trainer(make_strategy(kind, directory), callbacks=[RankConsistency(ignore=["dir*"])], **options)
        with pytest.raises(DivergenceError) as caught:
            trainer.fit(Configured(rank, what), datamodule=Numbers(4 + (what == "batch_size") * rank))
        said.append(str(caught.value))
    return said


def test_ranks_that_are_set_up_otherwise_are_told_what_differs(tmp_path: Path) -> None:
    """Before DDP or our strategy looks at the model; what is ignored may differ."""
    for said in on_ranks("ours", set_up, tmp_path):
        for what, text in zip(SETUPS, said, strict=True):
            assert text.startswith("the ranks are not set up alike: rank 1 in ")
            assert SETUPS[what] in text


def average(kind: Kind, directory: Path) -> str:
    state = PostLocalSGDState(None, None, 2)
    strategy = make_strategy(kind, directory, ddp_comm_state=state, model_averaging_period=2)
    with pytest.raises(ConfigurationError) as refused:
        make_trainer(strategy, callbacks=[RankConsistency()]).fit(Net())
    return str(refused.value)


def test_models_that_are_averaged_are_refused(tmp_path: Path) -> None:
    """They differ on purpose."""
    for message in on_ranks("stock", average, tmp_path):
        assert message.startswith(
            "RankConsistency cannot compare models that differ on purpose until they are averaged"
        )


class Overflowing(Net):
    """Has a loss that is not finite, in one batch of one rank."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss + math.inf if (self.global_rank, self.global_step) == (1, 2) else loss


def overflow(rank: int, world_size: int, directory: Path, on_divergence: Any) -> tuple[int, list[str]]:
    callback = RankConsistency(check_finite=True, on_divergence=on_divergence, ignore=["*"])
    found = fit("ours", directory, Overflowing(), callback, max_epochs=1)
    if found.error is not None:
        raise found.error
    return found.steps, found.warnings


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
