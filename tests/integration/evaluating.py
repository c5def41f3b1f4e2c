"""Share data and a model among the tests of evaluation."""

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader
from torchmetrics.classification import BinaryAUROC

Batch = dict[str, Tensor]


def scores(samples: int) -> list[Batch]:
    """Return the same rows in each call: score, target, label, group and index."""
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
    """Return a loader of a number of samples."""
    chosen = options if "batch_sampler" in options else {"batch_size": batch_size, **options}
    made: DataLoader[Any] = kind(scores(samples), **chosen)
    return made


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


class Scorer(L.LightningModule):
    """Logs a metric of each loader, and values, at the end of an epoch.

    Attributes:
        samples: those of each batch that this rank evaluated, by loader.
    """

    def __init__(self, loaders: int = 1) -> None:
        super().__init__()
        self.aurocs = nn.ModuleList(BinaryAUROC() for _ in range(loaders))
        self.samples: dict[int, list[list[int]]] = {number: [] for number in range(loaders)}

    def validation_step(self, batch: Batch, index: int, dataloader_idx: int = 0) -> None:
        x = batch["x"]
        auroc: Any = self.aurocs[dataloader_idx]
        auroc.update(x, batch["label"])
        self.log(f"auroc {dataloader_idx}", auroc)
        self.log("mean", x.mean(), sync_dist=True, batch_size=len(x))
        self.log("greatest", x.max(), reduce_fx="max", sync_dist=True, batch_size=len(x))
        self.samples[dataloader_idx].append(batch["index"].tolist())
