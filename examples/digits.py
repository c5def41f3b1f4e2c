"""Train a small convolutional network, with BatchNorm over both ranks, on the UCI digits.

    python examples/digits.py                                    # starts its own ranks, which meet over file://
    python examples/digits.py --init-method tcp://127.0.0.1:29500
    torchrun --nproc-per-node 2 examples/digits.py               # uses the ranks that torchrun started
    python examples/digits.py --strategy ddp                     # the same file with stock Lightning's strategy

It trains for a few epochs, tests, saves a checkpoint, and resumes from it for one epoch more. With two GPUs or more it
uses them, else two processes on the CPU. The images come with scikit-learn, so nothing is downloaded.
"""

import argparse
import os
import tempfile

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import Strategy
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_ddp_ext import DDPExtStrategy, SyncBatchNormConversion

Batch = tuple[Tensor, Tensor]


class Digits(L.LightningDataModule):
    """1797 grey images of 8 x 8 pixels: 1397 to train on, 200 to validate, 200 to test, the same ones on every rank."""

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.batch_size = batch_size
        images, labels = load_digits(return_X_y=True)
        pixels = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        every_rank_the_same = torch.Generator().manual_seed(0)
        self.train, self.val, self.held_out = random_split(
            TensorDataset(pixels, torch.tensor(labels)), [1397, 200, 200], generator=every_rank_the_same
        )

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.val, self.batch_size)

    def test_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(self.held_out, self.batch_size)


class ConvNet(L.LightningModule):
    """Two convolutions, each with BatchNorm, and a linear layer. Nothing in it knows how many ranks there are."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
        )  # fmt: skip
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")  # counts over all ranks

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: Batch, _: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, _: int) -> None:
        self.count(batch, "val_accuracy")

    def test_step(self, batch: Batch, _: int) -> None:
        self.count(batch, "test_accuracy")

    def count(self, batch: Batch, name: str) -> None:
        images, labels = batch
        self.accuracy(self(images), labels)
        self.log(name, self.accuracy, prog_bar=True, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


STRATEGIES = ("ddp_ext", "ddp_ext_spawn", "ddp_ext_fork", "ddp_ext_forkserver", "ddp")


def make_strategy(name: str, init_method: str) -> str | Strategy:
    """Make ours for a name that starts with `ddp_ext` (`ddp_ext_spawn` spawns its ranks); any other is Lightning's."""
    if not name.startswith("ddp_ext"):
        return name
    start_method = name.removeprefix("ddp_ext").lstrip("_") or "popen"
    return DDPExtStrategy(init_method=init_method, start_method=start_method)


def make_trainer(args: argparse.Namespace, *, epochs: int) -> L.Trainer:
    return L.Trainer(
        strategy=make_strategy(args.strategy, args.init_method),
        accelerator="gpu" if torch.cuda.device_count() >= 2 else "cpu",
        devices=args.devices,
        max_epochs=epochs,
        callbacks=[
            ModelCheckpoint(args.checkpoints, filename="digits", enable_version_counter=False),
            SyncBatchNormConversion(),
        ],
        logger=False,
        log_every_n_steps=10,
    )


def report(trainer: L.Trainer, metric: str, when: str) -> None:
    """Print one measured accuracy, once: on rank 0."""
    if trainer.is_global_zero:
        print(f"{metric} {float(trainer.callback_metrics[metric]):.1%} {when}", flush=True)


def main() -> None:
    """Fit, test, and then resume from the checkpoint with a new model and a new Trainer."""
    meeting_place = os.environ.get("DDPX_INIT_METHOD") or f"file://{tempfile.gettempdir()}/"
    parser = argparse.ArgumentParser(
        description="Train on the UCI digits, on several ranks.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--strategy", default="ddp_ext", choices=STRATEGIES, help="ours, or Lightning's ddp")
    parser.add_argument("--init-method", default=meeting_place, help="where the ranks meet (stock ddp ignores it)")
    parser.add_argument("--devices", type=int, default=2, help="ranks on this machine")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--checkpoints", default="checkpoints", help="directory to write them to")
    args = parser.parse_args()

    L.seed_everything(1)
    data = Digits()

    trainer, model = make_trainer(args, epochs=args.epochs), ConvNet()
    trainer.fit(model, data)
    report(trainer, "val_accuracy", f"after {args.epochs} epochs")
    trainer.test(model, data, verbose=False)
    report(trainer, "test_accuracy", f"after {args.epochs} epochs")
    saved = trainer.checkpoint_callback.best_model_path

    resumed, model = make_trainer(args, epochs=args.epochs + 1), ConvNet()
    resumed.fit(model, data, ckpt_path=saved)
    report(resumed, "val_accuracy", f"after one epoch more, resumed from {saved}")
    resumed.test(model, data, verbose=False)
    report(resumed, "test_accuracy", "after one epoch more")


if __name__ == "__main__":
    main()
