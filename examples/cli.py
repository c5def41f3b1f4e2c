"""Configure a whole run from a file with LightningCLI.

    python examples/cli.py fit --config examples/config.yaml python examples/cli.py fit
    --config examples/config.yaml --trainer.strategy.init_args.find_unused_parameters
    true python examples/cli.py fit --config examples/config.yaml --print_config >
    all_options.yaml

Requires `pip install 'jsonargparse[signatures]'`.
"""

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Sums(L.LightningDataModule):
    """Provides rows of numbers and their sums, which are the same on every rank."""

    def __init__(self, samples: int = 512, batch_size: int = 32) -> None:
        super().__init__()
        x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(0))
        self.dataset = TensorDataset(x, x.sum(1, keepdim=True))
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.dataset, self.batch_size)


class Regression(L.LightningModule):
    def __init__(self, width: int = 32, lr: float = 0.01) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(8, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 1)
        )
        self.lr = lr

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


if __name__ == "__main__":
    LightningCLI(Regression, Sums, save_config_kwargs={"overwrite": True})
