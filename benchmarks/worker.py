"""The script that the benchmarks start: a few training steps of a small model with any strategy.

python benchmarks/worker.py STRATEGY WORLD_SIZE [endless]
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader


class Small(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == 0:
            note_first_step(self.global_rank)
        return self.net(batch).square().mean()

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.ones(100_000, 64), batch_size=16)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def note_first_step(rank: int) -> None:
    directory = os.environ.get("FIRST_STEP_DIRECTORY")
    if directory and len(sys.argv) > 3:
        Path(directory, f"{rank}.pid").write_text(str(os.getpid()))
    elif directory:
        Path(directory, str(rank)).write_text(str(time.monotonic()))


def fit(strategy: str, devices: int = 2, max_steps: int = 4) -> None:
    L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(Small())


if __name__ == "__main__":
    if sys.argv[1].startswith("ddp_ext"):
        import lightning_ddp_ext  # noqa: F401
    fit(sys.argv[1], int(sys.argv[2]), max_steps=-1 if "endless" in sys.argv else 4)
