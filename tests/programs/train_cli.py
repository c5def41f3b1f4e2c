"""LightningCLI with a model of Lightning's."""

from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, DemoModel

import lightning_ddp_ext

if __name__ == "__main__":
    LightningCLI(DemoModel, BoringDataModule)
