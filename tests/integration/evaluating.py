"""A model that measures in every way that Lightning and torchmetrics offer, and evaluations of it on ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryRecall

from tests.harness.training import make_strategy, make_trainer

Case = tuple[int, int]  # samples, batch size
Values = dict[str, Any]


class Scores(Dataset[dict[str, Tensor]]):
    """Scores and labels of some samples; always the same for the same number."""

    def __init__(self, samples: int) -> None:
        generator = torch.Generator().manual_seed(samples)
        self.x = torch.rand(samples, generator=generator)
        self.label = (torch.rand(samples, generator=generator) < 0.5).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "label": self.label[index], "index": torch.tensor(index)}


class Measures(nn.Module):
    """The metrics of one loader."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.auroc, self.seen = MeanMetric(), BinaryAUROC(), CatMetric()
        self.collection = MetricCollection([BinaryAccuracy(), BinaryRecall()])  # these two share their states

    def update(self, x: Tensor, label: Tensor) -> None:
        self.auroc.update(x, label)
        self.collection.update(x, label)
        self.mean.update(x)


class Measured(L.LightningModule):
    """Logs values for each of its loaders, of all kinds for the first ones, and trains on something or other."""

    def __init__(self, loaders: int = 1, *, all_kinds: int = 1) -> None:
        super().__init__()
        self.all_kinds = all_kinds
        self.layer = nn.Linear(1, 1)
        self.measures = nn.ModuleList(Measures() for _ in range(loaders))
        self.seen: list[list[float]] = []
        self.sizes: list[int] = []

    def measure(self, batch: dict[str, Tensor], loader: int) -> None:
        x, label, index = batch["x"], batch["label"], batch["index"]
        measures: Any = self.measures[loader]
        measures.seen.update(index)
        self.sizes.append(len(x))
        self.log("mean", x.mean(), on_step=True, on_epoch=True, sync_dist=True)
        if loader < self.all_kinds:
            measures.update(x, label)
            self.log_metrics(measures)
            self.log_values(x, label)
            everywhere: Any = self.all_gather(torch.tensor(1.0))
            assert everywhere.sum() == self.trainer.world_size

    def log_metrics(self, measures: Any) -> None:
        self.log("mean_metric", measures.mean, on_step=True, on_epoch=True)
        self.log("auroc", measures.auroc)
        self.log_dict(measures.collection)

    def log_values(self, x: Tensor, label: Tensor) -> None:
        self.log("sum", x.sum(), reduce_fx="sum", sync_dist=True)
        self.log("min", x.min(), reduce_fx="min", sync_dist=True)
        self.log("max", x.max(), reduce_fx="max", sync_dist=True, on_step=True, on_epoch=True)
        self.log("count", len(x), reduce_fx="sum", sync_dist=True)
        self.log("three", 3, sync_dist=True)
        self.log("least", label.min(), reduce_fx="min", sync_dist=True)

    def validation_step(self, batch: dict[str, Tensor], index: int, dataloader_idx: int = 0) -> None:
        self.measure(batch, dataloader_idx)

    test_step = validation_step

    def on_validation_epoch_end(self) -> None:
        self.seen = [sorted(measures.seen.compute().reshape(-1).tolist()) for measures in self.measures]  # type: ignore[operator,union-attr]
        for measures in self.measures:
            measures.seen.reset()  # type: ignore[operator,union-attr]

    on_test_epoch_end = on_validation_epoch_end

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        out: Tensor = self.layer(batch["x"].unsqueeze(1))
        return out.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def cases(world_size: int, number: int = 10) -> list[Case]:
    """Four in which not every rank can have a batch each time, or only with one in two, and then random ones."""
    chosen = random.Random(world_size)
    hard = [(world_size - 1, 2), (2 * world_size + 1, 1), (3 * world_size + 1, 3), (1, 1)]
    return hard + [(chosen.randint(1, 40), chosen.randint(1, 7)) for _ in range(number - len(hard))]


def loaders_of(numbers: Sequence[Case], **options: Any) -> list[DataLoader[Any]]:
    return [DataLoader(Scores(samples), batch_size, **options) for samples, batch_size in numbers]


def trainer_on(rank: int, world_size: int, directory: Path, **options: Any) -> L.Trainer:
    """A Trainer with our strategy on ranks that were started by hand; with Lightning's own choice on one."""
    exact = options.pop("exact_evaluation", True)
    strategy = make_strategy("ours", directory, exact_evaluation=exact) if world_size > 1 else "auto"
    return make_trainer(strategy, devices=world_size, **{"logger": False, **options})


def measured(trainer: L.Trainer, model: Measured) -> Values:
    """Each epoch's value by its name, and which samples the metrics of each loader have seen."""
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {**{name: value for name, value in values.items() if "_step" not in name}, "seen": model.seen}
