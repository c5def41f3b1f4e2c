"""A small network with BatchNorm, whose batches on all ranks together are those of one process; how to train it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from tests.harness.training import Kind, make_strategy, make_trainer

BATCH = 16  # of all ranks together


def images(samples: int = 48) -> TensorDataset:
    """Pictures of 8 × 8 in ten classes; always the same."""
    pixels = torch.arange(samples * 64.0).square().sin().view(samples, 1, 8, 8)
    return TensorDataset(pixels, torch.arange(samples) % 10)


def layers(channels: int = 8) -> nn.Sequential:
    """BatchNorm behind convolutions and in the head."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, channels, 3), nn.BatchNorm2d(channels), nn.ReLU()),
        nn.Sequential(nn.Conv2d(channels, channels, 3, stride=2), nn.BatchNorm2d(channels), nn.ReLU(), nn.Flatten()),
        nn.Sequential(nn.Linear(4 * channels, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10)),
    )


class Classifier(L.LightningModule):
    """Learns ``images``; ``BATCH`` of them a step, whatever the number of ranks."""

    def __init__(self, dataset: TensorDataset | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.dataset = dataset or images()
        self.layers = layers()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        x, labels = batch
        return cross_entropy(self(x), labels)

    def training_step(self, batch: Sequence[Tensor], index: int) -> Tensor | None:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        world_size = self.trainer.world_size
        sampler = DistributedSampler(self.dataset, world_size, self.trainer.global_rank, seed=3)
        return DataLoader(self.dataset, BATCH // world_size, sampler=sampler, drop_last=True)


def trainer_with(
    kind: Kind,
    directory: Path,
    *,
    by: str = "callback",
    callbacks: Sequence[L.Callback] = (),
    strategy: dict[str, Any] | None = None,
    **options: Any,
) -> L.Trainer:
    """A Trainer that converts BatchNorm by the ``"callback"``, by the Trainer's ``"flag"``, or not (``"nothing"``)."""
    from lightning_ddp_ext import SyncBatchNormConversion

    warnings.simplefilter("ignore", UserWarning)  # of Lightning, on few batches and workers
    callbacks = [*callbacks, SyncBatchNormConversion()] if by == "callback" else list(callbacks)
    options = {"num_sanity_val_steps": 0, "sync_batchnorm": by == "flag", **options}
    return make_trainer(make_strategy(kind, directory, **strategy or {}), callbacks=callbacks, **options)


def trainer_alone(**options: Any) -> L.Trainer:
    """A Trainer in one process."""
    warnings.simplefilter("ignore", UserWarning)
    return make_trainer("auto", **{"devices": 1, "num_sanity_val_steps": 0, **options})


def types_and_modes(module: nn.Module) -> list[tuple[str, str, bool]]:
    """Every place in a model, the class of what stands there, and whether it is in training."""
    modules = module.named_modules(remove_duplicate=False)
    return [(name, f"{type(each).__module__}.{type(each).__qualname__}", each.training) for name, each in modules]
