"""Callbacks that send a real signal to one rank at a chosen moment of a run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from tests.harness.training import At
from tests.integration.continuing import Net, Numbers


def signalled(hook: str, earlier: int = 0, signum: int = signal.SIGTERM) -> At:
    """Return a callback that signals its process at the n-th call of a hook."""
    return At(hook, lambda trainer: os.kill(os.getpid(), signum), earlier=earlier)


class Validated(Net):
    """Records the results of its validations."""

    samples = 4

    def val_dataloader(self) -> Any:
        return DataLoader(Numbers(self.samples), batch_size=1)

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("result", self.layers(batch).sum(), sync_dist=True)

    def on_validation_end(self) -> None:
        self.happens("result", float(self.trainer.callback_metrics["result"]))


class LongValidated(Validated):
    """Can be stopped in the middle of a validation: its ranks stay in step, or one might finish it before the stop."""

    samples = 120

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        dist.all_reduce(torch.zeros(1))
        super().validation_step(batch, index)


def shuffled(samples: int = 12, **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(Numbers(samples), **{"batch_size": 2, "shuffle": True, **options})
