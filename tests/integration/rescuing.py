"""A run whose ranks die at a moment, and what it ends with."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_ext import RankZeroCheckpointIO
from tests.harness.training import At, Batch, data, make_strategy, make_trainer

NAME = "last-rescued.ckpt"
EPOCHS, BATCHES, VALIDATED = 3, 12, 2  # of each rank: epochs, batches in each, and batches of a validation
# Moments that a rank passes in a run, and how often at least.
MOMENTS = {
    **dict.fromkeys(("on_train_batch_start", "on_before_backward", "on_after_backward", "on_train_batch_end"), BATCHES),
    **dict.fromkeys(("on_before_zero_grad", "on_before_optimizer_step"), BATCHES // 2),
    **dict.fromkeys(("on_train_epoch_start", "on_validation_start", "on_validation_end", "on_train_epoch_end"), 2),
    **dict.fromkeys(("on_validation_batch_start", "on_validation_batch_end"), 2 * VALIDATED),
    "writing": 2 * EPOCHS,
}


@dataclass(frozen=True)
class Kill:
    """Which ranks end when they come to a moment for the ``earlier + 1``-th time, and how."""

    moment: str
    earlier: int = 0
    ranks: Sequence[int] = (1,)
    by: str = "kill"

    def strike(self) -> None:
        if self.by == "exception":
            raise ValueError("this rank fails")
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True)
class Plan:
    """A run, and what happens in it.

    Args:
        kill: which ranks end, and when.
        rescue: what happens to a survivor that saves: "killed", "full" or "stuck".
        strategy: options of the strategy.
        trainer: options of the Trainer.
        kind: of the module.
    """

    kill: Kill | None = None
    rescue: str = ""
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    kind: Any = None


class Net(L.LightningModule):
    """With all that a checkpoint of another rank could have wrong: dropout, noise from each library, statistics."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.layers = nn.Sequential(*layers)

    def on_fit_start(self) -> None:
        torch.manual_seed(torch.initial_seed() + 10 * self.global_rank)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        noise = torch.from_numpy(np.random.randn(len(batch[0]), 4)).float() + random.gauss(0, 1)
        loss: Tensor = (self.layers(batch[0] + 0.01 * noise) - batch[1]).square().mean()
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        self.log("result", (self.layers(batch[0]) - batch[1]).square().mean() + torch.rand(()), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(data(2 * BATCHES * self.trainer.world_size), batch_size=2, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(data(2 * VALIDATED * self.trainer.world_size), batch_size=2)


class StruckIO(RankZeroCheckpointIO):
    """Fails in a save: of the Trainer's own checkpoints, or of a survivor's."""

    def __init__(self, plan: Plan, rank: int, directory: Path) -> None:
        super().__init__()
        self.plan, self.directory = plan, directory
        kill = plan.kill
        self.left = kill.earlier if kill and kill.moment == "writing" and rank in kill.ranks else -1

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        with patch.object(os, "write", self.full if Path(path).name == NAME else self.kill):
            super().save_checkpoint(checkpoint, path, storage_options)

    def kill(self, descriptor: int, content: Any, write: Any = os.write) -> int:
        self.left -= 1
        if self.left == -1:
            self.plan.kill.strike()
        return write(descriptor, content)

    def full(self, descriptor: int, content: Any, write: Any = os.write) -> int:
        if self.plan.rescue == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.plan.rescue == "stuck":
            threading.Event().wait()
        if self.plan.rescue == "killed" and not (self.directory / "killed").exists():
            (self.directory / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return write(descriptor, content)


class Steps(L.Callback):
    """Writes down which step this rank has finished."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_before_zero_grad(self, trainer: L.Trainer, *_: Any) -> None:
        self.path.write_text(str(trainer.global_step))

    on_validation_start = on_train_batch_end = on_before_zero_grad


def train(rank: int, world_size: int, plan: Plan, directory: Path) -> dict[str, Tensor]:
    """Train from the newest checkpoint on, with another seed, and return what the model holds at the end."""
    is_first = not any(directory.glob("*.ckpt"))
    L.seed_everything(7 if is_first else 8 + rank, verbose=False)
    net = (plan.kind or Net)()
    kill = plan.kill
    callbacks: list[L.Callback] = [Steps(directory / f"{rank}.steps")]
    if kill is not None and rank in kill.ranks and hasattr(L.Callback, kill.moment):
        callbacks.append(At(kill.moment, lambda trainer: kill.strike(), earlier=kill.earlier))
    if kill is not None and rank in kill.ranks and kill.moment == "step":
        net.strike_at = kill
    io = StruckIO(plan, rank, directory)
    chosen = {"rescue_checkpoint": directory / NAME, "timeout": 60, **plan.strategy}
    strategy = make_strategy("ours", directory, rank=rank, world_size=world_size, checkpoint_io=io, **chosen)
    own = [make(directory) for make in plan.trainer.get("callbacks", ())]
    options = {
        "devices": world_size,
        "max_epochs": EPOCHS,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": True,
        **plan.trainer,
        "callbacks": [*callbacks, *own, saver(directory)],
    }
    trainer = make_trainer(strategy, **options)
    trainer.fit(net, ckpt_path="last")
    return {name: value.clone() for name, value in net.state_dict().items()}


def saver(directory: Path) -> ModelCheckpoint:
    return ModelCheckpoint(directory, "{epoch}-{step}", monitor="result", save_top_k=1)


# What is not saved.


class Twice(Net):
    """Whose optimiser calls the closure several times a step; the rank ends in a later call."""

    strike_at: Kill | None = None

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        self.calls = 1 if index != getattr(self, "index", None) else self.calls + 1
        self.index = index
        if self.strike_at is not None and index == 2 and self.calls == 2:
            self.strike_at.strike()
        return super().training_step(batch, index)


class Manual(Net):
    """Makes its steps itself; the rank ends between the two of a batch."""

    strike_at: Kill | None = None

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, index: int) -> Tensor:
        optimizer = self.optimizers()
        for number in range(2):
            loss = super().training_step(batch, index)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            if self.strike_at is not None and (index, number) == (2, 0):
                self.strike_at.strike()
        return loss


class Sharded(Net):
    """Whose ranks each have a part of the optimiser's state."""

    def configure_optimizers(self) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=0.05)


class Averaging(L.Callback):
    """Has other weights validated than are trained."""

    def __init__(self, directory: Path) -> None:
        self.kept: list[Tensor] = []

    def on_validation_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._swap(module)

    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._swap(module)

    @torch.no_grad()
    def _swap(self, module: L.LightningModule) -> None:
        others = self.kept or [torch.zeros_like(each) for each in module.parameters()]
        self.kept = [each.clone() for each in module.parameters()]
        for each, other in zip(module.parameters(), others, strict=True):
            each.copy_(other)


STEP = Kill("step")
REFUSED = {
    "several times a step": Plan(STEP, kind=Twice),
    "manual optimisation": Plan(STEP, kind=Manual),
    "shard of the optimiser's state": Plan(Kill("on_after_backward", 2), kind=Sharded),
    "weight averaging": Plan(Kill("on_validation_batch_start", 1), trainer={"callbacks": [Averaging]}),
    "no step has been finished": Plan(Kill("on_before_backward")),
    "no step has been finished since": Plan(Kill("on_sanity_check_end"), trainer={"num_sanity_val_steps": 2}),
    "model_averaging_period": Plan(Kill("on_after_backward", 2), strategy={"model_averaging_period": 2}),
    'resume_data="stock"': Plan(Kill("on_after_backward", 2), strategy={"resume_data": "stock"}),
    "not on a file system with locks": Plan(
        Kill("on_after_backward", 2), strategy={"rescue_checkpoint": "memory://run/it.ckpt"}
    ),
}
