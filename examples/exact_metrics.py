"""Measure the accuracy of one model in one process, and on four ranks with stock Lightning and with this package.

    python examples/exact_metrics.py

A small network learns from 100 of the UCI digits, in one process, and is tested on 41 others. Four ranks cannot share
41 images evenly. Stock Lightning has each rank evaluate 11, and so counts three images twice. With a sampler that
repeats nothing, its sums are right, but a mean by `self.log(sync_dist=True)` divides by 40, because it rounds 41 / 4
down. With `DDPExtStrategy` each image counts once and every accuracy is that of one process. Real test sets are larger,
and then the error is smaller; it is there with every one that the ranks do not divide.
The images come with scikit-learn, so nothing is downloaded.
"""

import argparse
import logging
import math
import warnings
from typing import Any

import lightning as L
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

import lightning_ddp_ext as ddpx  # registers the strategies whose names begin with ddp_ext

Batch = tuple[Tensor, Tensor]


class Classifier(L.LightningModule):
    """A small network that measures its accuracy in both of Lightning's ways."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")

    def training_step(self, batch: Batch, _: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def test_step(self, batch: Batch, _: int) -> None:
        images, labels = batch
        guesses = self.net(images)
        self.accuracy.update(guesses, labels)
        self.log("torchmetrics", self.accuracy)
        self.log("self.log", (guesses.argmax(1) == labels).float().mean(), sync_dist=True)
        self.log("images", float(len(labels)), reduce_fx="sum", sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def digits() -> tuple[Dataset[Batch], Dataset[Batch]]:
    """100 images to learn from and 41 to test on, drawn from 1797."""
    images, labels = load_digits(return_X_y=True)
    everything = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    learn, test, _ = random_split(everything, [100, 41, 1797 - 141], generator=torch.Generator().manual_seed(0))
    return learn, test


def trainer(strategy: Any = "auto", *, devices: int = 1, **options: Any) -> L.Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return L.Trainer(strategy=strategy, accelerator="cpu", devices=devices, **quiet, **options)


def measure(model: Classifier, loader: DataLoader[Batch], **options: Any) -> dict[str, float]:
    return dict(trainer(**options).test(model, loader, verbose=False)[0])


def main() -> None:
    """Learn once, measure four times, print one table."""
    parser = argparse.ArgumentParser(description="Accuracies on several ranks, beside that of one process.")
    parser.add_argument("--devices", type=int, default=4, help="ranks on this machine (default: 4)")
    ranks = parser.parse_args().devices
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # stock's own recommendation is to test on one device
    torch.set_num_threads(1)  # forked processes do not have the threads of this one
    L.seed_everything(1, verbose=False)
    learn, test = digits()
    model = Classifier()
    trainer(max_epochs=20).fit(model, DataLoader(learn, 20, shuffle=True))

    loader, unrepeated = DataLoader(test, 8), DataLoader(test, 8, sampler=ddpx.ExactDistributedSampler(test))
    rows = {
        "one process": measure(model, loader),
        f"ddp, {ranks} ranks": measure(model, loader, strategy="ddp_fork", devices=ranks),
        f"ddp, {ranks} ranks, a sampler that repeats nothing": measure(
            model, unrepeated, strategy="ddp_fork", devices=ranks
        ),
        f"ddp_ext, {ranks} ranks": measure(model, loader, strategy="ddp_ext_fork", devices=ranks),
    }
    table = Table("", "images counted", "accuracy by self.log", "accuracy by torchmetrics", title="41 test images")
    for name, found in rows.items():
        right = all(math.isclose(found[metric], true, rel_tol=1e-6) for metric, true in rows["one process"].items())
        values = (f"{found['images']:.0f}", f"{found['self.log']:.2%}", f"{found['torchmetrics']:.2%}")
        table.add_row(name, *values, style="green" if right else "red")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
