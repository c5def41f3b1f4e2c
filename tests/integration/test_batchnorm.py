"""With BatchNorm over all ranks a model learns as in one process."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_ddp_ext import SyncBatchNorm, SyncBatchNormConversion
from tests.harness import ranks, training

STEPS_OF_EPOCH = 4
SAMPLES_OF_STEP = 6


class Joint(training.Net):
    """Learns from batches of six samples on any number of ranks together."""

    def train_dataloader(self) -> DataLoader[Any]:
        world_size = self.trainer.world_size
        samples = training.data(STEPS_OF_EPOCH * SAMPLES_OF_STEP)
        sampler = DistributedSampler(samples, world_size, self.trainer.global_rank, seed=3)
        return DataLoader(samples, SAMPLES_OF_STEP // world_size, sampler=sampler)


class Manual(Joint):
    """Optimises by hand, with three forward and two backward passes for a step."""

    automatic_optimization = False

    def training_step(self, batch: Sequence[Tensor], index: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch) + 0.5 * self.loss([-x, y]))
        self.manual_backward(self.loss(batch))
        optimizer.step()


class Recomputed(Joint):
    """Runs its layers once more in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.layers, x, use_reentrant=False)
        return out


class Doubled(SyncBatchNorm):
    """Overrides forward, and still synchronises."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Odd(Joint):
    """Has layers of all kinds that can be converted.

    One is in two places, and others have another mode or a class of the user's.
    """

    def __init__(self) -> None:
        super().__init__()
        shared = nn.BatchNorm2d(8)
        self.layers = nn.Sequential(
            nn.Linear(4, 32),
            nn.BatchNorm1d(32),
            nn.Unflatten(1, (8, 4, 1)),
            shared,
            nn.BatchNorm2d(8).eval(),
            Doubled(8),
            shared,
            nn.Flatten(),
            nn.Linear(32, 1),
        )

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001)


@dataclass
class Feature:
    """A feature that users combine with BatchNorm.

    Attributes:
        model: makes the module.
        trainer: options of the Trainer.
        strategy: options of the strategy.
        averaging: a callback that averages weights, or none.
        tolerance: how far weights may be from those of one process.
        by_callback: whether our callback converts layers.
    """

    model: Callable[[], Joint] = Joint
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    averaging: Sequence[L.Callback] = ()
    tolerance: float = 1e-9
    by_callback: bool = True


# Lightning averages in float32, and not before the second epoch.
AVERAGING: dict[str, Any] = {"trainer": {"max_epochs": 2}, "tolerance": 1e-6}
FEATURES = {
    "nothing": Feature(strategy={"broadcast_buffers": False}),
    "the Trainer's flag": Feature(trainer={"sync_batchnorm": True}, by_callback=False),
    "both": Feature(trainer={"sync_batchnorm": True}),
    "static graph": Feature(strategy={"static_graph": True}),
    "odd layers": Feature(Odd),
    "manual optimisation": Feature(Manual),
    "activation checkpointing": Feature(Recomputed),
    "accumulation": Feature(trainer={"accumulate_grad_batches": 2}),
    "bfloat16": Feature(trainer={"precision": "bf16-mixed", "max_steps": 1}, tolerance=2e-2),
    "SWA": Feature(averaging=[StochasticWeightAveraging(0.01, 1)], **AVERAGING),
    "EMA": Feature(averaging=[EMAWeightAveraging(decay=0.5)], **AVERAGING),
}


def learned(feature: Feature, strategy: Any, *callbacks: L.Callback, **options: Any) -> Any:
    """Train with a feature, and return what the model and the Trainer have then."""
    torch.manual_seed(1)
    model = feature.model()
    options = {"precision": "64-true", "max_epochs": 1, **options, **feature.trainer}
    trainer = training.make_trainer(strategy, callbacks=[*feature.averaging, *callbacks], **options)
    trainer.fit(model)
    return {
        "weights": training.weights(model),  # with running statistics
        "metrics": dict(trainer.callback_metrics),
        "steps": trainer.global_step,
    }


def learn_alone(rank: int, world_size: int, names: Collection[str]) -> dict[str, Any]:
    """Train with each feature in one process, without conversion."""
    return {name: learned(FEATURES[name], "auto", devices=1) for name in names}


def learn(kind: training.Kind, directory: Path, names: Collection[str]) -> dict[str, Any]:
    """Train with each feature on several ranks."""
    results = {}
    for name in names:
        feature = FEATURES[name]
        strategy = training.make_strategy(kind, directory, **feature.strategy)
        callbacks = [SyncBatchNormConversion()] if feature.by_callback else []
        results[name] = learned(feature, strategy, *callbacks)
    return results


def test_ranks_learn_what_one_process_learns(tmp_path: Path) -> None:
    """Ranks learn what one process learns, up to rounding.

    This holds with any layer, DDP's options and Lightning's ways to optimise, and with
    stock. Ranks are equal to the last bit.
    """
    (alone,) = ranks.run_ranks(learn_alone, 1, list(FEATURES))
    first, second = training.on_ranks("ours", learn, tmp_path, list(FEATURES))
    training.assert_same(first, second)
    for name, feature in FEATURES.items():
        tolerances = {"rtol": feature.tolerance, "atol": feature.tolerance}
        torch.testing.assert_close({name: first[name]}, {name: alone[name]}, **tolerances)
    stock, _ = training.on_ranks("stock", learn, tmp_path, ["nothing"])
    torch.testing.assert_close(stock["nothing"], alone["nothing"], rtol=1e-9, atol=1e-9)


def resume(kind: training.Kind, directory: Path, is_by_flag: bool) -> dict[str, Any]:
    """Save a checkpoint after the first step of the second epoch, and resume it.

    Return the weights after the whole and the resumed run, and what was saved.
    """
    path = directory / "middle.ckpt"
    save = training.At(
        "on_train_batch_end", lambda trainer: trainer.save_checkpoint(path), earlier=STEPS_OF_EPOCH
    )

    def fit(model: Joint, ckpt_path: Path | None = None) -> L.Trainer:
        callbacks = [save] if is_by_flag else [save, SyncBatchNormConversion()]
        options = {"sync_batchnorm": is_by_flag, "ckpt_path": ckpt_path}
        return training.fit(kind, directory, model, *callbacks, **options)

    whole = Joint()
    fit(whole)
    resumed = Joint()
    trainer = fit(resumed, path)
    return {
        "whole": training.weights(whole),
        "resumed": training.weights(resumed),
        "steps": trainer.global_step,
        "saved names": list(torch.load(path, weights_only=True)["state_dict"]),
    }


@pytest.mark.parametrize("is_by_flag", [True, False])
def test_checkpoints_are_those_of_plain_layers_and_resuming_changes_nothing(
    is_by_flag: bool, tmp_path: Path
) -> None:
    """A file from the middle of training has a plain model's keys.

    A resumed run equals an unbroken one, bit by bit.
    """
    for result in training.on_ranks("ours", resume, tmp_path, is_by_flag):
        assert result["saved names"] == list(Joint().state_dict())
        assert result["steps"] == 2 * STEPS_OF_EPOCH
        training.assert_same(result["resumed"], result["whole"])
