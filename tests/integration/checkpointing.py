"""A model and Trainers for tests of checkpoints: with our strategy, or with stock and
our callback; and saves in the background that fail.
"""

import copy
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO

from lightning_ddp_ext import RankZeroCheckpoint, RankZeroCheckpointIO
from tests.harness import training

MAPPED_AND_SENT = pytest.mark.parametrize(("kind", "is_mapped"), [("ours", True), ("stock", False)])


class Net(training.Net):
    """With tied weights, a buffer that is not saved, two parameter groups and Adam."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = self.layers[0].weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        optimizer = torch.optim.Adam(
            [{"params": others}, {"params": [first], "lr": 0.02}], lr=0.01, amsgrad=True
        )
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def reachable(path: Path, directory: Path, *, is_mapped: bool) -> Path:
    """Return a path at which every rank sees the file and maps it, or only rank 0 does
    and sends it.
    """
    if is_mapped:
        return path
    os.chdir(path.parent if os.environ["RANK"] == "0" else directory)
    return Path(path.name)


def everything(trainer: L.Trainer) -> dict[str, Any]:
    """Return weights, optimisers, schedules, scaler and progress."""
    assert trainer.lightning_module is not None
    found = {
        "weights": trainer.lightning_module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedules": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "scaler": trainer.precision_plugin.state_dict(),
        "step": trainer.global_step,
    }
    return copy.deepcopy(found)


def train_and_save(path: Path, plugins: Any = ()) -> dict[str, Any]:
    """Train a little in this process alone, with stock Lightning, and save.

    Return the state that was saved.
    """
    torch.manual_seed(1)
    trainer = training.make_trainer("auto", devices=1, max_epochs=1, plugins=list(plugins))
    trainer.fit(Net())
    trainer.save_checkpoint(path)
    return everything(trainer)


def checkpoint_callback(kind: training.Kind, **options: Any) -> ModelCheckpoint:
    """Return Lightning's callback for our strategy, and ours for stock's."""
    return RankZeroCheckpoint(**options) if kind == "stock" else ModelCheckpoint(**options)


def make_io(*, is_background: bool) -> Any:
    """Return our IO, within Lightning's for saves in the background."""
    return AsyncCheckpointIO(RankZeroCheckpointIO()) if is_background else RankZeroCheckpointIO()


def trainer_for(
    kind: training.Kind,
    directory: Path,
    io: Any = None,
    callbacks: Any = (),
    plugins: Any = (),
    **options: Any,
) -> L.Trainer:
    """Return a Trainer on two ranks whose checkpoints are ours, one way or the other."""
    callbacks = list(callbacks)
    if kind == "stock" and not any(isinstance(callback, ModelCheckpoint) for callback in callbacks):
        callbacks.append(checkpoint_callback(kind, save_top_k=0))
    return training.make_trainer(
        training.make_strategy(kind, directory),
        callbacks=callbacks,
        plugins=[*plugins, *([] if io is None else [io])],
        # Otherwise Lightning adds one.
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        **options,
    )


def fit_from(trainer: L.Trainer, path: Path | str) -> dict[str, Any]:
    """Train from a checkpoint, and return the whole state at the start of training."""
    states: list[dict[str, Any]] = []
    trainer.callbacks.append(
        training.At("on_train_start", lambda trainer: states.append(everything(trainer)))
    )
    trainer.fit(Net(), ckpt_path=path)
    return states[0]


# Saves in the background that fail only when the ranks wait for them.


class _Failing(RankZeroCheckpointIO):
    def __init__(self, fails: Callable[[str], bool]) -> None:
        super().__init__()
        self.fails = fails
        self.awaited = threading.Event()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        if self.fails(str(path)):
            self.awaited.wait()
            path = "/dev/null/it.ckpt"
        super().save_checkpoint(checkpoint, path, storage_options)


class FailsWhenAwaited(AsyncCheckpointIO):
    """Lightning's IO for background saves, of which some fail.

    Args:
        fails: whether the save to a path fails.
    """

    def __init__(self, fails: Callable[[str], bool]) -> None:
        self.failing = _Failing(fails)
        super().__init__(self.failing)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.failing.awaited.clear()
        super().save_checkpoint(*args, **kwargs)

    def teardown(self) -> None:
        self.failing.awaited.set()
        super().teardown()
