"""A run whose ranks die at a moment, and what it ends with."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_ddp_ext import RankZeroCheckpointIO
from tests.harness.outcomes import Outcome, stories
from tests.harness.ranks import launch_ranks
from tests.harness.training import At, Batch, backend, data, make_strategy, make_trainer

NAME = "last-rescued.ckpt"
SLOW = 6.0  # seconds; longer than ranks have after a failure that do not save
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
    """Which ranks end when they reach a moment for the ``earlier + 1``-th time: by "kill", "sigterm" or "error"."""

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
        rescue: what happens to a survivor that saves: "killed", "full", "slow" or "stuck"; or "only" its save
            succeeds, and others fail in the background.
        strategy: options of the strategy; with a ``start_method`` one process starts two ranks.
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
    """With all that a checkpoint of another rank could have wrong: dropout, noise from each library, statistics."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.layers = nn.Sequential(*layers)

    def on_fit_start(self) -> None:
        torch.manual_seed(torch.initial_seed() + 10 * self.global_rank)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        drawn = torch.from_numpy(np.random.randn(len(batch[0]), 4) + np.random.randn()).float() + random.gauss(0, 1)
        noise = drawn.to(batch[0].device)
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

    def __init__(self, plan: Plan, directory: Path) -> None:
        super().__init__(background=plan.rescue == "only")
        self.plan, self.directory = plan, directory
        self.left = plan.kill.earlier if plan.kill and plan.kill.moment == "writing" else -1

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
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
    """Train from the newest checkpoint on, with another seed, and return what the model holds at the end.

    Buffers only of rank 0, as in a checkpoint: another rank resumes with these, and keeps them if no batch is left.
    """
    L.seed_everything(8 + rank if any(directory.glob("*.ckpt")) else 7, verbose=False)
    net = (plan.kind or Net)()
    kill = plan.kill
    callbacks: list[L.Callback] = [Steps(directory)]
    if kill is not None and hasattr(L.Callback, kill.moment):
        callbacks.append(At(kill.moment, kill.strike, earlier=kill.earlier))
    by_hand = {} if "start_method" in plan.strategy else {"rank": rank, "world_size": world_size}
    chosen = {"rescue_checkpoint": directory / NAME, "timeout": 60, **by_hand, **plan.strategy}
    backend(chosen.get("process_group_backend", "gloo"))
    strategy = make_strategy("ours", directory, checkpoint_io=StruckIO(plan, directory), **chosen)
    saver = ModelCheckpoint(directory, "{epoch}-{step}", monitor="result", save_top_k=1)
    options: dict[str, Any] = {
        "devices": world_size if by_hand else 2,
        "max_epochs": EPOCHS,
        "num_sanity_val_steps": 0,
        "enable_checkpointing": True,
        **plan.trainer,
        "callbacks": [*callbacks, *plan.trainer.get("callbacks", ())],
    }
    if options["enable_checkpointing"]:
        options["callbacks"].append(saver)
    trainer = make_trainer(strategy, **options)
    trainer.fit(net, ckpt_path=plan.resumed)
    held = net.state_dict() if rank == 0 else dict(net.named_parameters())
    return {name: value.detach().cpu().clone() for name, value in held.items()}


def survive(world_size: int, plan: Plan, kills: Iterable[Kill], directory: Path, **options: Any) -> list[Any]:
    """Run the plan again after each kill, until it ends; fail if a step that a survivor finished is lost."""
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
    """Return the step of the newest checkpoint; fail if a file that it names is missing."""
    newest = max(directory.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns, default=None)
    if newest is None:
        return 0
    checkpoint = torch.load(newest, weights_only=True, map_location="cpu")
    [state] = [state for name, state in checkpoint["callbacks"].items() if name.startswith("ModelCheckpoint")]
    assert all(Path(path).exists() for path in (*state["best_k_models"], state["best_model_path"]) if path)
    return int(checkpoint["global_step"])


# Code that changes the model outside of the optimiser.


class Momentum(Net):
    """Has an encoder whose weights follow those that are trained, before each forward pass.

    Args:
        change: how the weights are changed.
        since: the first step that does so.
    """

    def __init__(self, change: Callable[[Tensor, Tensor], object], since: int = 0) -> None:
        super().__init__()
        self.change = change
        self.since = since
        self.target = nn.Linear(4, 8).requires_grad_(False)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        if self.global_step >= self.since:
            with torch.no_grad():
                for each, trained in zip(self.target.parameters(), self.layers[0].parameters(), strict=True):
                    self.change(each, 0.8 * each + 0.2 * trained)
        return super().training_step(batch, index) + (self.target(batch[0]) - self.layers[0](batch[0])).square().mean()


def assign(parameter: Tensor, value: Tensor) -> None:
    """Give a parameter other memory; its version stays."""
    parameter.data = value


def assign_inside(parameter: Tensor, value: Tensor) -> None:
    """Change a parameter without a trace in its version."""
    parameter.data.copy_(value)


class Normalising(Net):
    """Scales trained weights before each forward pass."""

    def training_step(self, batch: Batch, index: int) -> Tensor:
        with torch.no_grad():
            self.layers[0].weight.mul_(0.9)
        return super().training_step(batch, index)


class Clipping(Net):
    """Limits trained weights after each step."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            self.layers[0].weight.clamp_(-0.3, 0.3)


class OtherGenerator(Net):
    """Has NumPy draw from a generator that is not a Mersenne Twister."""

    def setup(self, stage: str) -> None:
        np.random.set_bit_generator(np.random.PCG64(7))


class Slow(Net):
    """Takes long for the backward pass of the sixth step on a rank that survives."""

    def on_before_backward(self, loss: Tensor) -> None:
        is_resumed = self.trainer.ckpt_path is not None
        if self.global_step == 5 and self.global_rank == 0 and not is_resumed:
            threading.Event().wait(SLOW)


# What is not saved.


class Counting(Net):
    """Saves the state of a metric, which differs between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = MeanMetric()
        self.seen.persistent(True)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        self.seen.update(batch[0])
        return super().training_step(batch, index)


class Shaking(Net):
    """Changes a trained weight before the sixth step's forward pass."""

    def on_train_batch_start(self, batch: Batch, index: int) -> None:
        if self.global_step == 5:
            self.layers[4].bias.data = self.layers[4].bias.data + 1


class Twice(Net):
    """Whose optimiser calls the closure three times a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=3)


class Manual(Net):
    """Makes two steps itself in each batch."""

    automatic_optimization = False

    def training_step(self, batch: Batch, index: int) -> None:
        optimizer = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, index))
            optimizer.step()


class Sharded(Net):
    """Whose ranks each have a part of the optimiser's state."""

    def configure_optimizers(self) -> Any:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=0.05)


class Averaging(L.Callback):
    """Has other weights validated than are trained; as Lightning's own, it does not change their version counters."""

    def _swap(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for each in module.parameters():
            each.data.copy_(-each)

    on_validation_epoch_start = on_validation_epoch_end = _swap


class Skipping(Net):
    """Ends the first epoch in its fifth batch, which is not trained on."""

    def on_train_batch_start(self, batch: Batch, index: int) -> int | None:
        return -1 if self.current_epoch == 0 and index == 4 else None


THIRD = Kill("on_after_backward", 2)
SIXTH = Kill("on_before_backward", 5)
NO_STEP = "no step has finished since the start"
SANITY = (NO_STEP, Plan(Kill("on_sanity_check_end"), trainer={"num_sanity_val_steps": 2}))
REFUSED = [
    ("several times per step", Plan(Kill("on_after_backward", 7), kind=Twice)),
    ("manual optimisation", Plan(Kill("on_after_backward", 5), kind=Manual)),
    ("shard of the optimiser's state", Plan(THIRD, kind=Sharded)),
    ("weight averaging", Plan(Kill("on_validation_batch_start", 1), trainer={"callbacks": [Averaging()]})),
    ("seen.mean_value has changed", Plan(SIXTH, kind=Counting)),
    ("target.weight may have changed", Plan(SIXTH, kind=partial(Momentum, assign_inside, since=5))),
    ("layers.4.bias may have changed", Plan(SIXTH, kind=Shaking)),
    (NO_STEP, Plan(Kill("on_before_backward"))),
    pytest.param(*SANITY, marks=pytest.mark.nightly),
    ("model_averaging_period", Plan(THIRD, strategy={"model_averaging_period": 2})),
    ('resume_data="stock"', Plan(THIRD, strategy={"resume_data": "stock"})),
    ("a file system that supports locks", Plan(THIRD, strategy={"rescue_checkpoint": "memory://run/it.ckpt"})),
]
