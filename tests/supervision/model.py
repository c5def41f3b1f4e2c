"""A tiny model, and Trainers whose training goes wrong at a chosen place, on chosen ranks, in a chosen way."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp_ext as ddpx
from lightning_ddp_ext.rendezvous.process_context import current
from tests.harness.ranks import announce, hold

BATCHES = 4


class BoomError(ValueError):
    """What goes wrong in these tests; no other code raises it."""


def boom() -> None:
    raise BoomError("no such layer")


def collapse() -> None:
    raise SystemExit("the config is empty")


def leave_at_once() -> None:
    raise SystemExit(0)


def interrupt() -> None:
    raise KeyboardInterrupt


def say(text: str) -> None:
    """A line for the test of a script."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def say_who() -> None:
    """For the harness, which cannot tell apart the ranks of all launchers."""
    say(f"harness: rank {dist.get_rank()} is process {os.getpid()}")


def say_in_third_step() -> None:
    say(f"rank {dist.get_rank()} in step 3")


def announce_third_step() -> None:
    """For rank processes of the harness, and what they fork."""
    announce("in step 3", (dist.get_rank(), os.getpid()))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def vanish() -> None:
    os._exit(0)


def leave() -> None:
    sys.exit(0)


def stay() -> None:
    """Be killed here by the test."""
    hold("in step")


def stay_and_fail() -> None:
    """Fail when the test says so."""
    hold("in step")
    boom()


def wait_for_ever() -> None:
    """What no news of a broken connection can wake."""
    announce("in step")
    threading.Event().wait()


def outlast_the_others() -> None:
    """Go on until another rank has said goodbye."""
    context = current()
    assert context is not None
    assert context.peers.wait(60.0) is not None


@dataclass(frozen=True)
class Fault:
    """``action`` is called at ``place``, a hook of the model or of a callback, in a loop its second step.

    On ``ranks`` alone; none given: on all.
    """

    place: str
    action: Callable[[], None] = boom
    ranks: tuple[int, ...] = ()

    def on(self, *ranks: int) -> Fault:
        return replace(self, ranks=ranks)

    def strike(self, place: str, rank: int) -> None:
        if place == self.place and (not self.ranks or rank in self.ranks):
            self.action()


class Model(pl.LightningModule):
    """One layer that learns to add, on ``BATCHES`` batches a rank."""

    def __init__(self, faults: Sequence[Fault] = (), num_workers: int = 0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.faults = faults
        self.num_workers = num_workers

    def strike(self, place: str) -> None:
        for fault in self.faults:
            fault.strike(place, self.global_rank)

    def setup(self, stage: str) -> None:
        self.strike("setup")

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.strike("training_step")
        if batch_idx == 2 and self.current_epoch == 0:
            self.strike("third_step")
        return self._loss(batch)

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        if batch_idx == 1:
            self.strike("validation_step")
        self.log("val_loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.strike("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=0.05)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        inputs = torch.randn(2 * BATCHES * self.trainer.world_size, 4, generator=torch.Generator().manual_seed(11))
        samples = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
        # As in a script: the default of the harness's rank processes is the fork server that they come from.
        workers = {"persistent_workers": True, "multiprocessing_context": "fork"} if self.num_workers else {}
        return DataLoader(samples, batch_size=2, num_workers=self.num_workers, **workers)

    val_dataloader = train_dataloader

    def _loss(self, batch: Sequence[Tensor]) -> Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.layer(inputs), targets)


class StrikeInCallback(pl.Callback):
    """Calls the model's faults in hooks of a callback."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Model, *_: Any) -> None:  # type: ignore[override]
        if trainer.global_step == 2:
            pl_module.strike("on_train_batch_end")

    def on_fit_end(self, trainer: pl.Trainer, pl_module: Model) -> None:  # type: ignore[override]
        pl_module.strike("on_fit_end")

    def on_exception(self, trainer: pl.Trainer, pl_module: Model, exception: BaseException) -> None:  # type: ignore[override]
        pl_module.strike("on_exception")


class Witness(pl.Callback):
    """Keeps what ``on_exception`` has seen."""

    def __init__(self) -> None:
        self.seen: list[BaseException] = []

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.seen.append(exception)


def make_trainer(
    devices: int,
    *,
    strategy: str | ddpx.DDPExtStrategy = "ddp_ext",
    callbacks: Sequence[pl.Callback] = (),
    **options: Any,
) -> pl.Trainer:
    return pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        callbacks=[StrikeInCallback(), *callbacks],
        **{
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            **options,
        },
    )


def by_hand(
    rank: int, world_size: int, url: str, *, grace: Mapping[str, float] | None = None, **options: Any
) -> ddpx.DDPExtStrategy:
    """The strategy of a rank that was started by hand; ``grace`` as in ``Timeouts``."""
    strategy = ddpx.DDPExtStrategy(url, rank=rank, world_size=world_size, **options)
    strategy.timeouts = replace(strategy.timeouts, grace={**strategy.timeouts.grace, **(grace or {})})
    return strategy
