"""Measure a model's accuracy in one process, on four ranks with stock Lightning, and on
four ranks with `ddp_ext`.

Run it: python examples/exact_metrics.py

Four ranks cannot share 41 test images evenly. With stock Lightning each rank evaluates
11, so three images count twice. With a sampler that does not repeat images, its sums
are correct, but the mean of `self.log(sync_dist=True)` is divided by 40, because 41 / 4
is rounded down. With `ddp_ext` each image counts once, and results equal those of one
process.
"""

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

# importing it registers the strategies whose names begin with ddp_ext
import lightning_ddp_ext as ddpx


class Classifier(L.LightningModule):
    """A small network that measures accuracy with `self.log` and with torchmetrics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def test_step(self, batch: list[Tensor], _: int) -> None:
        images, labels = batch
        guesses = self.net(images)
        self.accuracy.update(guesses, labels)
        self.log("torchmetrics", self.accuracy)
        self.log("self.log", (guesses.argmax(1) == labels).float().mean(), sync_dist=True)
        self.log("images", float(len(labels)), reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def trainer(strategy: str = "auto", devices: int = 1, **options: Any) -> L.Trainer:
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    return L.Trainer(strategy=strategy, accelerator="cpu", devices=devices, **quiet, **options)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # Lightning recommends testing on one device
    torch.set_num_threads(1)  # forked processes do not inherit this process's threads
    L.seed_everything(1)
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        pixels = torch.tensor(file["images"]).flatten(1) / 16
        digits = torch.tensor(file["labels"]).long()
    model = Classifier()
    trainer(max_epochs=20).fit(
        model, DataLoader(TensorDataset(pixels[:100], digits[:100]), 20, shuffle=True)
    )

    test = TensorDataset(pixels[100:141], digits[100:141])
    loader = DataLoader(test, 8)
    unrepeated = DataLoader(test, 8, sampler=ddpx.ExactDistributedSampler(test))
    rows = {
        "one process": trainer().test(model, loader, verbose=False),
        "ddp": trainer("ddp_fork", 4).test(model, loader, verbose=False),
        "ddp, unrepeated": trainer("ddp_fork", 4).test(model, unrepeated, verbose=False),
        "ddp_ext": trainer("ddp_ext_fork", 4).test(model, loader, verbose=False),
    }
    print("41 test images    counted  self.log  torchmetrics")
    for name, [found] in rows.items():
        print(
            f"{name:16}  {found['images']:7.0f}  {found['self.log']:8.2%} "
            f" {found['torchmetrics']:12.2%}"
        )
