"""A model, a callback and Trainers for tests of checkpoints: with all that a checkpoint may hold."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader

from tests.harness.ranks import by_hand_env, run_ranks
from tests.harness.training import Batch, data, make_trainer, stock_group

# Ours, or stock `ddp` with our callback.
Side = Literal["strategy", "callback"]


class Net(L.LightningModule):
    """Tied weights, buffers that are saved and one that is not, two parameter groups, Adam and a schedule."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 4)
        self.back = nn.Linear(4, width)
        self.back.weight = self.first.weight
        self.norm = nn.BatchNorm1d(width)
        self.out = nn.Linear(width, 1)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x).relu())
        out: Tensor = self.out(self.back(self.second(hidden)).relu())
        return out

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss = mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        self.log("val_loss", mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        biases = [parameter for name, parameter in self.named_parameters() if name.endswith("bias")]
        others = [parameter for name, parameter in self.named_parameters() if not name.endswith("bias")]
        optimizer = torch.optim.Adam([{"params": others}, {"params": biases, "lr": 0.02}], lr=0.01, amsgrad=True)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(data(), batch_size=3, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(data(8), batch_size=2)

    test_dataloader = val_dataloader


def odd_tensors() -> dict[str, Any]:
    """One tensor of each kind that a checkpoint may hold; always the same."""
    base = torch.arange(60.0)
    return {
        "scalar": torch.tensor(1.5),
        "integers": torch.arange(7, dtype=torch.int16),
        "booleans": torch.tensor([True, False, True]),
        "complex": torch.complex(base, -base),
        "conjugated": torch.complex(base, base).conj(),
        "negated": torch.complex(base, base).conj().imag,
        "float8": base.to(torch.float8_e4m3fn),
        "half": base.half(),
        "empty": torch.empty(0, 3),
        "strided": base.reshape(6, 10)[::2, 1::3],
        "views": [base, base[10:20], base.reshape(6, 10)],
        "sparse": torch.eye(5).to_sparse(),
        "large": torch.arange(100_000.0).reshape(100, 1000),
        "parameter": nn.Parameter(torch.ones(2)),
    }


class Keeper(L.Callback):
    """Keeps tensors of its own, which travel in the checkpoint."""

    def __init__(self, content: Any = None) -> None:
        self.content = content

    def state_dict(self) -> dict[str, Any]:
        return {"content": self.content}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.content = state_dict["content"]


class AtStart(L.Callback):
    """What a rank has when training or an evaluation begins: all that was restored."""

    def __init__(self, keeper: Keeper | None = None) -> None:
        self.keeper = keeper
        self.state: dict[str, Any] = {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.state = everything(trainer, self.keeper)

    def on_test_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.state = everything(trainer, self.keeper)


def everything(trainer: L.Trainer, keeper: Keeper | None = None) -> dict[str, Any]:
    """Weights, optimisers, schedules, progress and what the keeper keeps, as they are now."""
    assert trainer.lightning_module is not None
    found = {
        "weights": trainer.lightning_module.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "schedules": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
        "kept": None if keeper is None else keeper.content,
        "mapped": mapped_checkpoints(),
    }
    return copy.deepcopy(found)


def mapped_checkpoints() -> list[str]:
    """Checkpoint files that are mapped into this process."""
    return [line.rstrip() for line in Path("/proc/self/maps").read_text().splitlines() if ".ckpt" in line]


def strategy_for(side: Side, directory: Path, **options: Any) -> DDPStrategy:
    if side == "callback":
        return DDPStrategy(**options)
    from lightning_ddp_ext import DDPExtStrategy  # not before: a rank's coverage begins with it

    return DDPExtStrategy(init_method=f"file://{directory}/store", **options)


def checkpoint_callback(side: Side, **options: Any) -> ModelCheckpoint:
    """Lightning's with our strategy, ours with stock."""
    from lightning_ddp_ext import RankZeroCheckpoint

    return RankZeroCheckpoint(**options) if side == "callback" else ModelCheckpoint(**options)


def trainer_for(side: Side, directory: Path, io: Any = None, callbacks: Any = (), **options: Any) -> L.Trainer:
    """A Trainer on two ranks whose checkpoints are ours, one way or the other."""
    callbacks = list(callbacks)
    if side == "callback" and not any(isinstance(callback, ModelCheckpoint) for callback in callbacks):
        callbacks.append(checkpoint_callback(side, save_top_k=0))
    enabled = any(isinstance(callback, Checkpoint) for callback in callbacks)  # else Lightning adds one of its own
    options = {"enable_checkpointing": enabled, **options}
    plugins = [] if io is None else [io]
    return make_trainer(strategy_for(side, directory), callbacks=callbacks, plugins=plugins, **options)


def on_ranks(function: Callable[..., Any], side: Side, directory: Path, *args: Any, **options: Any) -> list[Any]:
    """What ``function(side, directory, *args)`` returns on two ranks, by rank."""
    world_size = options.pop("world_size", 2)
    results = run_ranks(_in_group, world_size, function, side, directory, *args, env=by_hand_env(world_size), **options)
    return [torch.load(io.BytesIO(result), weights_only=False) for result in results]


def _in_group(
    rank: int, world_size: int, function: Callable[..., Any], side: Side, directory: Path, *args: Any
) -> bytes:
    with stock_group(rank, world_size, directory) if side == "callback" else nullcontext():
        result = function(side, directory, *args)
    written = io.BytesIO()
    torch.save(result, written)  # a plain pickle knows no float8
    return written.getvalue()
