"""Train a small convolutional network on the UCI digits with two ranks, test and save
it, and train another epoch.

python examples/digits.py                                    # starts its ranks, which connect by env://
python examples/digits.py --init-method tcp://127.0.0.1:29500
torchrun --nproc-per-node 2 examples/digits.py               # uses the ranks that torchrun started
python examples/digits.py --strategy ddp                     # uses stock Lightning's strategy
"""

import argparse
import os
from pathlib import Path

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_ddp_ext import SyncBatchNormConversion  # also registers the strategy "ddp_ext"

# 1797 grey images of 8 x 8 pixels with values from 0 to 16, and labels.
DIGITS = Path(__file__).with_name("digits.npz")

Batch = tuple[Tensor, Tensor]


class ConvNet(L.LightningModule):
    """Two convolutions with BatchNorm and a linear layer.

    The code does not depend on the number of ranks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 4 * 4, 10),
        )  # fmt: skip
        self.accuracy = MulticlassAccuracy(num_classes=10, average="micro")  # counts over all ranks

    def training_step(self, batch: Batch, _: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def test_step(self, batch: Batch, _: int) -> None:
        images, labels = batch
        self.accuracy(self.net(images), labels)
        self.log("test_accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def loaders() -> tuple[DataLoader[Batch], DataLoader[Batch]]:
    """Provides 1597 training images and 200 test images, which are the same on every
    rank.
    """
    with np.load(DIGITS) as file:
        pixels = torch.tensor(file["images"]).unsqueeze(1) / 16
        labels = torch.tensor(file["labels"]).long()
    dataset = TensorDataset(pixels, labels)
    generator = torch.Generator().manual_seed(0)
    train, test = random_split(dataset, [1597, 200], generator=generator)
    return DataLoader(train, batch_size=32, shuffle=True), DataLoader(test, batch_size=32)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on the UCI digits, on several ranks.")
    parser.add_argument(
        "--strategy", default="ddp_ext", help="ddp_ext, ddp_ext_spawn, …, or Lightning's ddp"
    )
    parser.add_argument(
        "--init-method", help="where the ranks connect, as in DDPExtStrategy(init_method=...)"
    )
    parser.add_argument("--devices", type=int, default=2, help="ranks on this machine")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--checkpoints", default="checkpoints", help="directory to write them to")
    args = parser.parse_args()
    if args.init_method:
        os.environ["DDPX_INIT_METHOD"] = args.init_method

    L.seed_everything(1)
    train, test = loaders()
    saved = None
    for epochs in (args.epochs, args.epochs + 1):
        model = ConvNet()
        trainer = L.Trainer(
            strategy=args.strategy,
            accelerator="gpu" if torch.cuda.device_count() >= args.devices else "cpu",
            devices=args.devices,
            max_epochs=epochs,
            callbacks=[
                ModelCheckpoint(args.checkpoints, "digits", enable_version_counter=False),
                SyncBatchNormConversion(),
            ],
            logger=False,
        )
        trainer.fit(model, train, ckpt_path=saved)
        trainer.test(model, test, verbose=False)
        if trainer.is_global_zero:
            accuracy = float(trainer.callback_metrics["test_accuracy"])
            start = f"resumed from {saved}" if saved else "from scratch"
            print(f"test_accuracy {accuracy:.1%} after {epochs} epochs, {start}", flush=True)
        saved = trainer.checkpoint_callback.best_model_path


if __name__ == "__main__":
    main()
