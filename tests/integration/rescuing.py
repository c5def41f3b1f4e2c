"""A run whose ranks die at a moment, and what it ends with."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
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
from tests.harness import training
from tests.harness.outcomes import Outcome, stories
from tests.harness.ranks import launch_ranks

NAME = "last-rescued.ckpt"
SLOW = 6.0  # seconds; longer than ranks have after a failure that do not save
# of each rank: epochs, batches in each, and batches of a validation
EPOCHS = 3
BATCHES = 12
VALIDATED = 2
# Moments that a rank passes in a run, and how often at least.
MOMENTS = {
    **dict.fromkeys(
        ("on_train_batch_start", "on_before_backward", "on_after_backward", "on_train_batch_end"),
        BATCHES,
    ),
    **dict.fromkeys(("on_before_zero_grad", "on_before_optimizer_step"), BATCHES // 2),
    **dict.fromkeys(
        ("on_train_epoch_start", "on_validation_start", "on_validation_end", "on_train_epoch_end"),
        2,
    ),
    **dict.fromkeys(("on_validation_batch_start", "on_validation_batch_end"), 2 * VALIDATED),
    "writing": 2 * EPOCHS,
}


@dataclass(frozen=True)
class Kill:
    """Which ranks end when they reach a moment for the ``earlier + 1``-th time: by
    "kill", "sigterm" or "error".
    """

    moment: str
    earlier: int = 0
    ranks: Sequence[int] = (1,)
    by: str = "kill"

    def strike(self, trainer: L.Trainer | None = None) -> None:
        """End this process, unless it is another rank."""
        if trainer is not None and trainer.global_rank not in self.ranks:
            return
        if self.by == "error":
            raise ValueError("this rank fails")
        os.kill(os.getpid(), signal.SIGTERM if self.by == "sigterm" else signal.SIGKILL)


@dataclass(frozen=True)
class Plan:
    """A run, and what happens in it.

    Args:
        kill: which ranks end, and when.
        rescue: what happens to a survivor that saves: "killed", "full", "slow" or
            "stuck"; or "only" its save succeeds, and others fail in the background.
        strategy: options of the strategy; with a ``start_method`` one process starts
            two ranks.
        trainer: options of the Trainer.
        kind: of the module.
        resumed: the file to resume from.
    """

    kill: Kill | None = None
    rescue: str = ""
    strategy: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    kind: Any = None
    resumed: Any = "last"


class Net(L.LightningModule):
    """With all that a checkpoint of another rank could have wrong: dropout, noise from
    each library, statistics.
    """

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.layers = nn.Sequential(*layers)

    def on_fit_start(self) -> None:
        torch.manual_seed(torch.initial_seed() + 10 * self.global_rank)

    def training_step(self, batch: training.Batch, index: int) -> Tensor:
        drawn = torch.from_numpy(
            np.random.randn(len(batch[0]), 4) + np.random.randn()
        ).float() + random.gauss(0, 1)
        noise = drawn.to(batch[0].device)
        loss: Tensor = (self.layers(batch[0] + 0.01 * noise) - batch[1]).square().mean()
        return loss

    def validation_step(self, batch: training.Batch, index: int) -> None:
        self.log(
            "result",
            (self.layers(batch[0]) - batch[1]).square().mean() + torch.rand(()),
            sync_dist=True,
        )

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)]

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(
            training.data(2 * BATCHES * self.trainer.world_size), batch_size=2, shuffle=True
        )

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(training.data(2 * VALIDATED * self.trainer.world_size), batch_size=2)


class StruckIO(RankZeroCheckpointIO):
    """Fails in a save: of the Trainer's own checkpoints, or of a survivor's."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        super().__init__(background=plan.rescue == "only")
        self.plan = plan
        self.directory = directory
        self.left = plan.kill.earlier if plan.kill and plan.kill.moment == "writing" else -1

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        is_rescue = Path(path).name == NAME
        if self.plan.rescue == "only" and not is_rescue:
            path = "/dev/null/not-a-directory"
        if is_rescue and self.plan.rescue == "slow":
            threading.Event().wait(SLOW)
        with patch.object(os, "write", self.full if is_rescue else self.kill):
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

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_before_zero_grad(self, trainer: L.Trainer, *_: Any) -> None:
        (self.directory / f"{trainer.global_rank}.steps").write_text(str(trainer.global_step))

    on_validation_start = on_train_batch_end = on_before_zero_grad


def train(rank: int, world_size: int, plan: Plan, directory: Path) -> dict[str, Tensor]:
    """Train from the newest checkpoint on, with another seed, and return what the model
    holds at the end.

    Buffers only of rank 0, as in a checkpoint: another rank resumes with these, and
    keeps them if no batch is left.
    """
    L.seed_everything(8 + rank if any(directory.glob("*.ckpt")) else 7, verbose=False)
    net = (plan.kind or Net)()
    kill = plan.kill
    callbacks: list[L.Callback] = [Steps(directory)]
    if kill is not None and hasattr(L.Callback, kill.moment):
        callbacks.append(training.At(kill.moment, kill.strike, earlier=kill.earlier))
    chosen = {"rescue_checkpoint": directory / NAME, "timeout": 60, **plan.strategy}
    training.backend(chosen.get("process_group_backend", "gloo"))
    strategy = training.make_strategy(
        "ours", directory, checkpoint_io=StruckIO(plan, directory), **chosen
    )
    saver = ModelCheckpoint(directory, "{epoch}-{step}", monitor="result", save_top_k=1)
    options: dict[str, Any] = {
        "devices": 2 if "start_method" in plan.strategy else world_size,
        "max_epochs": EPOCHS,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": True,
        **plan.trainer,
        "callbacks": [*callbacks, *plan.trainer.get("callbacks", ())],
    }
    if options["enable_checkpointing"]:
        options["callbacks"].append(saver)
    trainer = training.make_trainer(strategy, **options)
    trainer.fit(net, ckpt_path=plan.resumed)
    held = net.state_dict() if rank == 0 else dict(net.named_parameters())
    return {name: value.detach().cpu().clone() for name, value in held.items()}


def survive(
    world_size: int, plan: Plan, kills: Iterable[Kill], directory: Path, **options: Any
) -> list[Any]:
    """Run the plan again after each kill, until it ends; fail if a step that a survivor
    finished is lost.
    """
    for kill in (*kills, None):
        outcomes = launch_ranks(train, world_size, replace(plan, kill=kill), directory, **options)
        if not any(outcome.exit_code for outcome in outcomes):
            break  # the moment did not come again
        assert kill is not None, stories(outcomes)
        assert finished(directory, outcomes, kill) <= saved(directory), stories(outcomes)
    assert not [path for path in directory.iterdir() if NAME in path.name]
    return [outcome.result for outcome in outcomes]


def finished(directory: Path, outcomes: list[Outcome], kill: Kill) -> int:
    """Return the last step that a survivor has finished."""
    paths = [directory / f"{each.rank}.steps" for each in outcomes if each.rank not in kill.ranks]
    return max((int(path.read_text()) for path in paths if path.exists()), default=0)


def saved(directory: Path) -> int:
    """Return the step of the newest checkpoint; fail if a file that it names is
    missing.
    """
    newest = max(directory.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns, default=None)
    if newest is None:
        return 0
    checkpoint = torch.load(newest, weights_only=True, map_location="cpu")
    [state] = [
        state
        for name, state in checkpoint["callbacks"].items()
        if name.startswith("ModelCheckpoint")
    ]
    assert all(
        Path(path).exists() for path in (*state["best_k_models"], state["best_model_path"]) if path
    )
    return int(checkpoint["global_step"])
