"""`DDPExtStrategy` in place of `ddp`: the same numbers, to the last bit, with any Trainer options."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from tests.harness.training import (
    KINDS,
    At,
    Batch,
    Kind,
    Net,
    Recorder,
    assert_same,
    make_strategy,
    make_trainer,
    on_both,
    on_ranks,
    weights,
)


class Manual(Net):
    """Steps its optimiser by itself, every second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, index: int) -> None:
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.log("loss", loss, sync_dist=True)
        optimizer = self.optimizers()
        if index % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.5)
            optimizer.step()
            optimizer.zero_grad()


class HalfUsed(Net):
    """Leaves a layer out of its loss, another one on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + self.branches[self.global_rank](batch[1]).square().mean()


class Sparse(Net):
    """Has sparse gradients, in which a row occurs several times."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 1, sparse=True)
        self.layers.sparse = torch.ones(2)  # not a setting, but a name of the user's

    def loss(self, batch: Batch) -> Tensor:
        rows = batch[0].mul(7).long().abs() % 3
        return super().loss(batch) + self.table(rows).sub(batch[0].unsqueeze(2)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TwoOptimizers(Net):
    """Trains its two halves in turn, each with its own optimiser, as a GAN does."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, index: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            self.log("loss", loss, sync_dist=True)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.layers[0].parameters()), torch.optim.SGD(self.layers[3].parameters(), lr=0.1)


FLAGS = {
    "num_sanity_val_steps": 1,
    "limit_train_batches": 3,
    "val_check_interval": 2,
    "deterministic": True,
    "reload_dataloaders_every_n_epochs": 1,
    "log_every_n_steps": 1,
}
Options = Callable[[], dict[str, Any]]  # made in the rank
# The model, and options of the Trainer and of the strategy.
SHORT = {"max_epochs": 1}
CASES: dict[str, tuple[type[Net], dict[str, Any], Options]] = {
    "plain": (Net, {}, dict),
    "accumulation": (Net, {"accumulate_grad_batches": 3}, dict),
    "clipping by value": (Net, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value", **SHORT}, dict),
    "bf16-mixed": (Net, {"precision": "bf16-mixed", **SHORT}, dict),
    "64-true": (Net, {"precision": "64-true", **SHORT}, dict),
    "manual optimisation": (Manual, {}, dict),
    "several optimisers": (TwoOptimizers, SHORT, lambda: {"find_unused_parameters": True}),
    "unused parameters": (HalfUsed, SHORT, lambda: {"find_unused_parameters": True}),
    "static graph": (Manual, {}, lambda: {"static_graph": True}),
    "bucket views": (Net, SHORT, lambda: {"gradient_as_bucket_view": True, "bucket_cap_mb": 1}),
    "own buffers": (Net, SHORT, lambda: {"broadcast_buffers": False, "init_sync": False}),
    "model averaging": (
        Net,
        {},
        lambda: {"ddp_comm_state": PostLocalSGDState(None, None, 2), "model_averaging_period": 2},
    ),
    "own sampling": (Net, {"use_distributed_sampler": False}, dict),
    "flags": (Net, FLAGS, dict),
}
EVALUATED = ("plain", "bf16-mixed", "64-true", "several optimisers", "own sampling", "flags")


def train(kind: Kind, directory: Path, name: str) -> dict[str, Any]:
    """Return the results of fit and, where the case makes a difference to them, of validate, test and predict."""
    make_model, options, strategy_options = CASES[name]
    L.seed_everything(7)
    recorder, model = Recorder(), make_model()
    trainer = make_trainer(make_strategy(kind, directory, **strategy_options()), callbacks=[recorder], **options)
    trainer.fit(model)
    result = {"weights": weights(model), "trained": [*model.parameters()], "step": trainer.global_step}
    if name in EVALUATED:
        result["validate"] = trainer.validate(model, verbose=False)
        result["test"] = trainer.test(model, verbose=False)
        result["predict"] = trainer.predict(model)
    result["metrics"] = recorder.metrics
    return result


def train_all(kind: Kind, directory: Path) -> dict[str, Any]:
    return {name: train(kind, directory, name) for name in CASES}


@pytest.mark.lowest
def test_numbers_are_those_of_stock_ddp(tmp_path: Path) -> None:
    """Weights, every logged metric, evaluations and predictions equal stock's on each rank, to the last bit.

    One Trainer follows another in the same two processes.
    """
    ours, stock = on_both(train_all, tmp_path)
    for name in CASES:
        first, second = ours[0][name], ours[1][name]
        assert_same([first, second], [by_case[name] for by_case in stock])
        assert_same(first["trained"], second["trained"])
        assert first["step"] > 2, name
        assert len(first["metrics"]) > 4, name


ON_OTHER_RANKS: dict[str, tuple[type[Net], dict[str, Any]]] = {
    **{name: CASES[name][:2] for name in ("plain", "accumulation", "manual optimisation", "bf16-mixed")},
    "sparse": (Sparse, {}),
}


def train_on_ranks(kind: Kind, directory: Path, ranks: int) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, (make_model, options) in ON_OTHER_RANKS.items():
        L.seed_everything(7)
        model = make_model()
        wrapper: list[Any] = []
        keep = At("on_train_batch_end", lambda trainer, wrapper=wrapper: wrapper.append(trainer.strategy.model))
        make_trainer(make_strategy(kind, directory), devices=ranks, callbacks=[keep], **options).fit(model)
        found[name] = weights(model)
        assert isinstance(wrapper[0], nn.parallel.DistributedDataParallel)
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_other_numbers_of_ranks_learn_what_they_learn_with_stock_ddp(ranks: int, tmp_path: Path) -> None:
    """One rank, which has nothing to average, and three, for which the division by their number is not exact."""
    ours, stock = (on_ranks(kind, train_on_ranks, tmp_path, ranks, world_size=ranks) for kind in KINDS)
    assert_same(ours, stock)
