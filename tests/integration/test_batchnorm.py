"""With BatchNorm over all ranks a model learns as in one process. `fit` converts the layers
for this and restores them afterwards; ranks that run different layers raise.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as lightning_callbacks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from lightning_ddp_ext import (
    DDPExtError,
    RankFailedError,
    SyncBatchNorm,
    SyncBatchNormConversion,
    convert_sync_batchnorm,
)
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
    """Has layers of all kinds that can be converted: one in two places, one in evaluation
    mode, and one of the user's own class.
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
        averaging: makes a callback that averages weights, or none.
        tolerance: how far weights may be from those of one process.
        by_callback: whether our callback converts layers.
    """

    model: Callable[[], Joint] = Joint
    trainer: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    averaging: Callable[[], Sequence[L.Callback]] = list
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
    "SWA": Feature(
        averaging=lambda: [lightning_callbacks.StochasticWeightAveraging(0.01, 1)], **AVERAGING
    ),
    "EMA": Feature(
        averaging=lambda: [lightning_callbacks.EMAWeightAveraging(decay=0.5)], **AVERAGING
    ),
}


def learned(feature: Feature, strategy: Any, *callbacks: L.Callback, **options: Any) -> Any:
    """Train with a feature, and return what the model and the Trainer have then."""
    torch.manual_seed(1)
    model = feature.model()
    options = {"precision": "64-true", "max_epochs": 1, **options, **feature.trainer}
    trainer = training.make_trainer(
        strategy, callbacks=[*feature.averaging(), *callbacks], **options
    )
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

    def learn_one(feature: Feature) -> Any:
        strategy = training.make_strategy(kind, directory, **feature.strategy)
        callbacks = [SyncBatchNormConversion()] if feature.by_callback else []
        return learned(feature, strategy, *callbacks)

    return {name: learn_one(FEATURES[name]) for name in names}


def test_ranks_learn_what_one_process_learns(tmp_path: Path) -> None:
    """Ranks learn what one process learns, up to rounding.

    This holds with any layer, DDP's options and Lightning's ways to optimise, and with
    stock. Ranks are equal to the last bit.
    """
    (alone,) = ranks.run_ranks(learn_alone, 1, list(FEATURES))
    first, second = training.on_ranks("ours", learn, tmp_path, list(FEATURES))
    training.assert_same(first, second)
    for name, feature in FEATURES.items():
        torch.testing.assert_close(
            {name: first[name]}, {name: alone[name]}, rtol=feature.tolerance, atol=feature.tolerance
        )
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
        return training.fit(
            kind, directory, model, *callbacks, sync_batchnorm=is_by_flag, ckpt_path=ckpt_path
        )

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


# Layers that `fit` converts.


By = Literal["callback", "flag"]  # what converts: our callback, or the Trainer's flag


class Scaled(nn.BatchNorm1d):
    """A subclass, which is not converted."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def classes_of(layers: Any) -> list[str]:
    """Return the name of the class of each layer."""
    return [type(layer).__name__ for layer in layers]


NORMS = ["BatchNorm1d", "BatchNorm1d", "BatchNorm1d", "Scaled", "SyncBatchNorm1d", "SyncBatchNorm"]
PLAIN = ["Linear", *NORMS, "Linear"]
CONVERTED = ["Linear", *["SyncBatchNorm1d"] * 3, *NORMS[3:], "Linear"]


class Observed(training.Net):
    """Has layers that are converted and others, and records their classes in hooks.

    As momentum encoders do, it trains beside a copy of layers.

    Args:
        error: what the second training step raises.
    """

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        shared = nn.BatchNorm1d(8)  # converted: one layer in two places
        by_hand = [convert_sync_batchnorm(nn.BatchNorm1d(8)), SyncBatchNorm(8)]
        layers = [shared, shared, nn.BatchNorm1d(8).eval(), Scaled(8), *by_hand]
        self.layers = nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 1))
        self.teacher: Any = ()
        self.error = error
        self.seen: dict[str, list[str]] = {}

    def on_train_start(self) -> None:
        self.teacher = copy.deepcopy(self.layers[:4])

    def training_step(self, batch: training.Batch, index: int) -> Any:
        if index == 1 and self.error is not None:
            raise self.error
        self.seen["training"] = classes_of(self.layers)
        return super().training_step(batch, index)

    def on_train_end(self) -> None:
        self.seen["on_train_end"] = classes_of(self.layers)

    def on_fit_end(self) -> None:
        self.seen["on_fit_end"] = classes_of(self.layers)


def fit_and_see(
    rank: int,
    world_size: int,
    directory: Path,
    kind: training.Kind,
    by: By,
    error: BaseException | None = None,
    **options: Any,
) -> dict[str, list[str]]:
    """Return the classes of a model's layers in the hooks of a fit, however it ends, and
    after it.
    """
    callbacks = [SyncBatchNormConversion()] if by == "callback" else []
    model = Observed(error)
    with (
        training.stock_group(rank, world_size, directory) if kind == "stock" else nullcontext(),
        suppress(ZeroDivisionError, RankFailedError, SystemExit),
    ):
        training.fit(kind, directory, model, *callbacks, sync_batchnorm=by == "flag", **options)
    after = {"after fit": classes_of(model.layers), "the copy": classes_of(model.teacher)}
    return {**model.seen, **after}


@pytest.mark.parametrize(
    ("kind", "by"), [pytest.param("ours", "flag", marks=pytest.mark.lowest), ("stock", "callback")]
)
def test_layers_are_converted_during_training_only(
    kind: training.Kind, by: By, tmp_path: Path
) -> None:
    """The callback restores layers before ``on_train_end``, the flag before
    ``on_fit_end``.

    Rank 0 logs a line about converted layers, and names the others in a warning.
    """
    first, second = ranks.launch_ranks(fit_and_see, 2, tmp_path, kind, by)
    for outcome in (first, second):
        assert outcome.result == {
            "training": CONVERTED,
            "on_train_end": CONVERTED if by == "flag" else PLAIN,
            "on_fit_end": PLAIN,
            "after fit": PLAIN,
            "the copy": PLAIN[:4],
        }, outcome.story()
    summary = "SyncBatchNorm: 2 of 5 layers, statistics over 2 ranks\n"
    assert first.output.count(summary) == 1, first.story()
    assert first.output.count("are not converted: layers.4 (Scaled). To use the") == 1
    assert "BatchNorm" not in second.output


@pytest.mark.parametrize(
    ("kind", "by", "end"),
    [
        pytest.param("stock", "callback", {"limit_train_batches": 0}, id="no batches"),
        pytest.param("stock", "callback", {"error": ZeroDivisionError()}, id="error"),
        pytest.param("ours", "flag", {"error": ZeroDivisionError()}, id="error, by the flag"),
        pytest.param("ours", "flag", {"error": KeyboardInterrupt()}, id="Ctrl-C, by the flag"),
    ],
)
def test_layers_are_restored_however_fit_ends(
    kind: training.Kind, by: By, end: dict[str, Any], tmp_path: Path
) -> None:
    """After an error, an interrupt or a fit without batches, all layers have the classes
    that they had before.
    """
    for seen in ranks.run_ranks(fit_and_see, 2, tmp_path, kind, by, **end):
        assert seen["after fit"] == PLAIN


def choose_layers_beside_the_flag(kind: training.Kind, directory: Path) -> str:
    """Return the error of a fit whose callback excludes a layer."""
    model = Observed()
    conversion = SyncBatchNormConversion(exclude="layers.1")
    error = training.raised(
        DDPExtError, training.fit, kind, directory, model, conversion, sync_batchnorm=True
    )
    assert classes_of(model.layers) == PLAIN
    return str(error)


def test_the_trainers_flag_allows_no_choice_of_layers(tmp_path: Path) -> None:
    """All ranks raise an error that names the flag."""
    for message in training.on_ranks("ours", choose_layers_beside_the_flag, tmp_path):
        assert "sync_batchnorm=True synchronises all layers" in message


# Ranks that run different layers.

LAYERS = ("first", "middle", "last")


class Normalised(training.Net):
    """Three BatchNorm layers with a linear one behind each of them.

    Args:
        others: the layers that rank 1 runs in its second step.
    """

    def __init__(self, others: Sequence[str]) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({name: nn.BatchNorm1d(4) for name in LAYERS})
        self.linears = nn.ModuleDict({name: nn.Linear(4, 4) for name in LAYERS})
        self.layers = nn.Linear(4, 1)
        self.others = others

    def training_step(self, batch: training.Batch, index: int) -> Tensor:
        is_other = self.global_rank == 1 and index == 1
        x, y = batch
        for name in self.others if is_other else LAYERS:
            x = self.linears[name](self.norms[name](x))
        return self.loss([x, y])


@pytest.mark.lowest
@pytest.mark.parametrize(
    ("others", "by_flag", "place_of_rank_0", "place_of_rank_1"),
    [
        (LAYERS[:2], False, "forward pass of norms.last", "backward pass of norms.middle"),
        (LAYERS + LAYERS, True, "backward pass of norms.last", "forward pass of norms.first"),
    ],
)
def test_ranks_that_run_other_layers_raise(
    others: Sequence[str],
    by_flag: bool,
    place_of_rank_0: str,
    place_of_rank_1: str,
    tmp_path: Path,
) -> None:
    """Every rank's error names each rank's layer."""
    message = (
        f"ranks are in different BatchNorm layers or passes: rank 0 is in the {place_of_rank_0},"
        f" rank 1 is in the {place_of_rank_1}"
    )
    callbacks = [] if by_flag else [SyncBatchNormConversion()]
    options = {"strategy": {"find_unused_parameters": True}, "sync_batchnorm": by_flag}
    outcomes = training.fit_on(2, tmp_path, Normalised(others), *callbacks, **options)
    assert "BatchNormError" in [outcome.failure.type_name for outcome in outcomes]
    for outcome in outcomes:
        assert message in outcome.failure.message
