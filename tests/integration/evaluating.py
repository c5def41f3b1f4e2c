"""Share data and a model among the tests of evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader
from torchmetrics.classification import BinaryAUROC

Batch = dict[str, Tensor]


def scores(samples: int) -> list[Batch]:
    """Return rows of a score, a target, its label, a group and an index; always the same."""
    drawn = torch.rand(samples, 2, generator=torch.Generator().manual_seed(samples))
    return [
        {
            "x": x,
            "y": y,
            "label": (y < 0.5).long(),
            "group": torch.tensor(index % 3),
            "index": torch.tensor(index),
        }
        for index, (x, y) in enumerate(drawn)
    ]


def loader(
    samples: int, batch_size: int | None = 1, kind: Any = DataLoader, **options: Any
) -> DataLoader[Any]:
    chosen = options if "batch_sampler" in options else {"batch_size": batch_size, **options}
    loader: DataLoader[Any] = kind(scores(samples), **chosen)
    return loader


class Ragged(BatchSampler):
    """A user's batch sampler: each batch is one larger than the one before."""

    def __iter__(self) -> Iterator[list[int]]:
        samples = list(self.sampler)
        size = 1
        while samples:
            yield samples[:size]
            samples = samples[size:]
            size += 1

    def __len__(self) -> int:
        return sum(1 for _ in self)


class AtTheEnd(L.LightningModule):
    """Logs at the end of the epoch only, and remembers what its own hooks saw."""

    def __init__(self, loaders: int = 1) -> None:
        super().__init__()
        self.aurocs = nn.ModuleList(BinaryAUROC() for _ in range(loaders))
        self.seen: list[list[int]] = []

    def validation_step(self, batch: Batch, index: int, dataloader_idx: int = 0) -> None:
        x = batch["x"]
        auroc: Any = self.aurocs[dataloader_idx]
        auroc.update(x, batch["label"])
        self.log(f"auroc {dataloader_idx}", auroc)
        self.log("mean", x.mean(), sync_dist=True, batch_size=len(x))
        self.log("greatest", x.max(), reduce_fx="max", sync_dist=True, batch_size=len(x))
        self.seen.append(batch["index"].tolist())
