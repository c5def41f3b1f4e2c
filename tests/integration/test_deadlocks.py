"""Ranks that wait for each other in different calls raise an error with both calls, without any option."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

from lightning_ddp_ext import DDPExtStrategy
from tests.harness.outcomes import Outcome
from tests.harness.ranks import by_hand_env, launch_ranks
from tests.harness.training import At, Batch, Net, make_trainer

PLACE = r"\S+test_deadlocks\.py:\d+"


class Plain(Net):
    """A model without buffers, so that only gradients need all ranks in a training step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 1))

    def training_step(self, batch: Batch, index: int) -> Tensor:
        return self.loss(batch)


class Lone(L.Callback):
    """Calls a function of the Trainer on rank 0 only, in one hook."""

    def __init__(self, hook: str, do: Callable[[L.Trainer], object]) -> None:
        setattr(self, hook, lambda trainer, *_: do(trainer) if trainer.is_global_zero else None)


class WithoutTargets(Plain):
    """On rank 1, the loss of some steps does not depend on the model."""

    def __init__(self, steps: list[int], layers: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.layers = layers or self.layers
        self.steps = steps

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        if self.global_rank == 1 and index in self.steps:
            return torch.zeros((), requires_grad=True)
        return loss


class Stream(IterableDataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter([(torch.ones(4), torch.ones(1))] * self.samples)


class Validating(Plain):
    """Each rank validates on a stream of its own."""

    def __init__(self, samples: list[int], on_step: bool) -> None:
        super().__init__()
        self.samples, self.on_step = samples, on_step
        self.mean = MeanMetric()

    def validation_step(self, batch: Batch, index: int) -> None:
        loss = self.loss(batch)
        if self.on_step:
            self.log("val", loss, on_step=True, on_epoch=True, sync_dist=True)
        else:
            self.mean(loss)

    def on_validation_epoch_end(self) -> None:
        if not self.on_step and self.samples[self.global_rank]:
            self.mean.compute()

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Stream(self.samples[self.global_rank]), batch_size=1)


class LogsMore(Net):
    """One rank logs more values on step than the other, in a hook that averages each of them."""

    def training_step(self, batch: Batch, index: int) -> Tensor:
        values = torch.ones(2 + self.global_rank)
        self.all_gather(values)
        return self.loss(batch)


def log_dir_in(hook: str) -> tuple[L.LightningModule, dict[str, Any]]:
    return Plain(), {"callbacks": [Lone(hook, lambda trainer: trainer.log_dir)]}


def accumulating(rank: int) -> tuple[L.LightningModule, dict[str, Any]]:
    return Plain(), {"accumulate_grad_batches": 1 + rank}


def stopping_early(rank: int) -> tuple[L.LightningModule, dict[str, Any]]:
    return Plain(), {"callbacks": [At("on_train_batch_end", gather)] * (rank == 0)}


def gather(trainer: L.Trainer) -> None:
    trainer.lightning_module.all_gather(torch.ones(2))


CASES: dict[str, Callable[[int], tuple[L.LightningModule, dict[str, Any]]]] = {
    "log_dir at the start": lambda rank: log_dir_in("on_fit_start"),
    "log_dir in a step": lambda rank: log_dir_in("on_train_batch_end"),
    "log_dir at the end": lambda rank: log_dir_in("on_train_end"),
    "no targets in a step": lambda rank: (WithoutTargets([1], Net().layers), {}),
    "no targets in the last step": lambda rank: (WithoutTargets([3]), {}),
    "accumulation": accumulating,
    "callbacks": stopping_early,
    "no batch to validate": lambda rank: (Validating([3, 0], on_step=False), {"limit_val_batches": 5}),
    "fewer batches to validate": lambda rank: (Validating([3, 2], on_step=True), {"limit_val_batches": 5}),
}


def strategy_for(directory: Path, seconds: float = 1.0, **options: Any) -> DDPExtStrategy:
    strategy = DDPExtStrategy(f"file://{directory}/store", **options)
    if hasattr(strategy.rendezvous.timeouts, "deadlock"):
        strategy.rendezvous.timeouts = replace(strategy.rendezvous.timeouts, deadlock=seconds)
    return strategy


def train(rank: int, world_size: int, directory: Path, name: str) -> None:
    model, options = CASES[name](rank)
    trainer = make_trainer(strategy_for(directory), max_epochs=1, **{"num_sanity_val_steps": 0, **options})
    trainer.fit(model)


@pytest.mark.parametrize("name", CASES)
def test_it(name: str, tmp_path: Path) -> None:
    began = time.monotonic()
    try:
        outcomes = launch_ranks(train, 2, tmp_path, name, env=by_hand_env(2), time_limit=40)
        print("ENDED", name, time.monotonic() - began)
        for o in outcomes: print(o.rank, o.exit_code, o.error and (o.error.type_name, o.error.message))
    except AssertionError as e:
        print("HUNG", name); print("\n".join(l for l in str(e).splitlines() if "fit" in l or "File" in l)[:100])
