"""Train an autoencoder with stock Lightning; `git apply adopt.diff` changes two lines.

Run it before and after the change: cd examples/adopted_project; python train.py
"""

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Data(L.LightningDataModule):
    """Provides vectors of 64 numbers that are computed from 8 random numbers."""

    def setup(self, stage: str) -> None:
        generator = torch.Generator().manual_seed(0)
        vectors = torch.rand(1797, 8, generator=generator) @ torch.rand(8, 64, generator=generator) / 4
        self.train, self.val = random_split(TensorDataset(vectors), [1536, 261], generator=generator)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=32, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=32)


class Autoencoder(L.LightningModule):
    def __init__(self, latent: int = 8, lr: float = 3e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, 64))

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = nn.functional.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        loss = nn.functional.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])
        self.log("val_loss", loss, sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    L.seed_everything(1)
    callbacks = [ModelCheckpoint(monitor="val_loss", save_last=True), EarlyStopping("val_loss"), LearningRateMonitor()]
    options = {"accelerator": "cpu", "devices": 2, "max_epochs": parser.parse_args().epochs, "log_every_n_steps": 10}
    trainer = L.Trainer(strategy="ddp", logger=CSVLogger("."), callbacks=callbacks, **options)
    trainer.fit(Autoencoder(), Data())
    metrics = trainer.callback_metrics
    trainer.print(f"train_loss {metrics['train_loss']:.6f}, val_loss {metrics['val_loss']:.6f}")
