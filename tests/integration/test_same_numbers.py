"""`DDPExtStrategy` in place of `ddp`: the same numbers, to the last bit, whatever the Trainer is told to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState

from tests.harness.training import (
    Batch,
    Kind,
    Net,
    Recorder,
    assert_same,
    make_strategy,
    make_trainer,
    on_both,
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


class HalfUsed(Net):
    """Leaves a layer out of its loss, another one on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])

    def loss(self, batch: Batch) -> Tensor:
        return super().loss(batch) + self.branches[self.global_rank](batch[1]).square().mean()


@dataclass(frozen=True)
class Case:
    """Options of the Trainer and of the strategy; those of the strategy are made in the rank, by a function."""

    model: type[Net] = Net
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: Callable[[], dict[str, Any]] = dict


CASES = {
    "plain": Case(),
    "accumulation": Case(trainer={"accumulate_grad_batches": 3}),
    "clipping by norm": Case(trainer={"gradient_clip_val": 0.1}),
    "clipping by value": Case(trainer={"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}),
    "bf16-mixed": Case(trainer={"precision": "bf16-mixed"}),
    "64-true": Case(trainer={"precision": "64-true"}),
    "manual optimisation": Case(Manual),
    "several optimisers": Case(TwoOptimizers, strategy=lambda: {"find_unused_parameters": True}),
    "unused parameters": Case(HalfUsed, strategy=lambda: {"find_unused_parameters": True}),
    "static graph": Case(strategy=lambda: {"static_graph": True}),
    "static graph, manual": Case(Manual, strategy=lambda: {"static_graph": True}),
    "bucket views": Case(strategy=lambda: {"gradient_as_bucket_view": True, "bucket_cap_mb": 1}),
    "own buffers": Case(strategy=lambda: {"broadcast_buffers": False, "init_sync": False}),
    "model averaging": Case(
        strategy=lambda: {"ddp_comm_state": PostLocalSGDState(None, None, 2), "model_averaging_period": 2}
    ),
    "own sampling": Case(trainer={"use_distributed_sampler": False}),
    "flags": Case(
        trainer={
            "num_sanity_val_steps": 1,
            "limit_train_batches": 3,
            "val_check_interval": 2,
            "deterministic": True,
            "reload_dataloaders_every_n_epochs": 1,
            "log_every_n_steps": 1,
        }
    ),
}


def train(kind: Kind, directory: Path, name: str) -> dict[str, Any]:
    """All that a user would look at after fit, validate, test and predict."""
    case = CASES[name]
    L.seed_everything(7)
    recorder, model = Recorder(), case.model()
    strategy = make_strategy(kind, directory, **case.strategy())
    trainer = make_trainer(strategy, callbacks=[recorder], **case.trainer)
    trainer.fit(model)
    result = {"weights": weights(model), "trained": [*model.parameters()], "step": trainer.global_step}
    result["validate"] = trainer.validate(model, verbose=False)
    result["test"] = trainer.test(model, verbose=False)
    result["predict"] = trainer.predict(model)
    result["metrics"] = recorder.metrics
    return result


def train_all(kind: Kind, directory: Path) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name in CASES:
        try:
            results[name] = train(kind, directory, name)
        except Exception as error:
            raise RuntimeError(f"in the case {name!r}: {error}") from error
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What ours and what stock say to each case, by rank; one Trainer after another in the same two processes."""
    return on_both(train_all, tmp_path_factory.mktemp("numbers"), time_limit=90)


@pytest.mark.lowest
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_stock_ddp(name: str, results: tuple[list[dict[str, Any]], list[dict[str, Any]]]) -> None:
    """Weights, every logged metric, evaluations and predictions equal stock's on each rank, to the last bit."""
    ours, stock = ([by_case[name] for by_case in by_rank] for by_rank in results)
    assert_same(ours, stock)
    assert_same(ours[0]["trained"], ours[1]["trained"])
    assert ours[0]["step"] > 2
    assert len(ours[0]["metrics"]) > 4
