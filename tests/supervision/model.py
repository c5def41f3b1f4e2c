"""Trainers whose training goes wrong at a chosen place, on chosen ranks, in a chosen way."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_ddp_ext as ddpx
from lightning_ddp_ext.rendezvous.process_context import current
from tests.harness import training
from tests.harness.ranks import announce, hold
from tests.harness.training import Net, data


class BoomError(ValueError):
    """What goes wrong in these tests; no other code raises it."""


def boom() -> None:
    raise BoomError("no such layer")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    raise KeyboardInterrupt


def hold_in_step() -> None:
    """Be killed here by the test, or go on when it says so."""
    hold("in step")


def wait_for_ever() -> None:
    """What no broken connection can wake."""
    announce("in step")
    threading.Event().wait()


def wait_for_another_ranks_end() -> None:
    context = current()
    assert context is not None
    assert context.peers.wait(60.0) is not None


def announce_step() -> None:
    """For rank processes of the harness, and what they fork."""
    announce("at work", (dist.get_rank(), os.getpid()))


@dataclass(frozen=True)
class Fault:
    """``action`` is called at ``place``, a hook of the model or of a callback, in a loop its second step.

    On ``ranks`` alone; none given: on all.
    """

    place: str
    action: Callable[[], object] = boom
    ranks: tuple[int, ...] = ()

    def on(self, *ranks: int) -> Fault:
        return replace(self, ranks=ranks)

    def strike(self, place: str, rank: int) -> None:
        if place == self.place and (not self.ranks or rank in self.ranks):
            self.action()


class Model(Net):
    """One layer, and faults that strike in its hooks."""

    def __init__(self, faults: Sequence[Fault] = (), num_workers: int = 0) -> None:
        super().__init__()
        self.layers = nn.Sequential()
        self.layer = nn.Linear(4, 1)
        self.faults = faults
        self.num_workers = num_workers

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out

    def strike(self, place: str) -> None:
        for fault in self.faults:
            fault.strike(place, self.global_rank)

    def setup(self, stage: str) -> None:
        self.strike("setup")

    def configure_optimizers(self) -> Any:
        self.strike("configure_optimizers")
        return super().configure_optimizers()

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        if index == 1:
            self.strike("training_step")
        if index == 2 and self.current_epoch == 0:
            self.strike("third_step")
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        if index == 1:
            self.strike("validation_step")
        super().validation_step(batch, index)

    def train_dataloader(self) -> DataLoader[Any]:
        # As in a script: the default of the harness's rank processes is the fork server that they come from.
        workers = {"persistent_workers": True, "multiprocessing_context": "fork"} if self.num_workers else {}
        return DataLoader(data(12 * self.trainer.world_size), batch_size=3, num_workers=self.num_workers, **workers)


class StrikeInCallback(pl.Callback):
    """Calls the model's faults in hooks of a callback."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Model, *_: Any) -> None:  # type: ignore[override]
        if trainer.global_step == 2:
            pl_module.strike("on_train_batch_end")

    def on_exception(self, trainer: pl.Trainer, pl_module: Model, exception: BaseException) -> None:  # type: ignore[override]
        pl_module.strike("on_exception")


def make_trainer(
    devices: int,
    *,
    strategy: str | ddpx.DDPExtStrategy = "ddp_ext",
    callbacks: Sequence[pl.Callback] = (),
    **options: Any,
) -> pl.Trainer:
    settings = {"max_epochs": 1, "num_sanity_val_steps": 0, **options}
    return training.make_trainer(strategy, devices=devices, callbacks=[StrikeInCallback(), *callbacks], **settings)


def by_hand(
    rank: int, world_size: int, url: str, *, grace: Mapping[str, float] | None = None, **options: Any
) -> ddpx.DDPExtStrategy:
    """The strategy of a rank that was started by hand; ``grace`` as in ``Timeouts``."""
    strategy = ddpx.DDPExtStrategy(url, rank=rank, world_size=world_size, **options)
    strategy.timeouts = replace(strategy.timeouts, grace={**strategy.timeouts.grace, **(grace or {})})
    return strategy


def fit(
    rank: int, world_size: int, url: str, *faults: Fault, endless: bool = False, num_workers: int = 0, **options: Any
) -> None:
    """One training on a rank that was started by hand; ``options`` for the strategy."""
    strategy = by_hand(rank, world_size, url, **options)
    make_trainer(world_size, strategy=strategy, max_epochs=-1 if endless else 1).fit(Model(faults, num_workers))
