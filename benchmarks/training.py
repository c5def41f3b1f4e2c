"""The Trainer and the model that the benchmarks train."""

from __future__ import annotations

import time
import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

WARMING_UP = 20  # steps


def make_trainer(strategy: Any, devices: int, **options: Any) -> L.Trainer:
    """Return a Trainer on the CPU that prints and writes nothing by itself."""
    warnings.simplefilter("ignore")
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    return L.Trainer(
        **{**quiet, "strategy": strategy, "accelerator": "cpu", "devices": devices, **options}
    )


class Net(L.LightningModule):
    """Four linear layers, and a number of values logged over all ranks in each step."""

    def __init__(self, width: int = 64, logged: int = 0) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        self.width = width
        self.names = [f"metric {number}" for number in range(logged)]
        # The clock and the processor time at which each step began.
        self.moments: dict[int, tuple[float, float]] = {}

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.moments[index] = time.perf_counter(), time.process_time()
        loss: Tensor = self.layers(batch).square().mean()
        for name in self.names:
            self.log(name, loss, sync_dist=True)
        return loss

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.ones(100_000, self.width), batch_size=16)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    def milliseconds_a_step(self) -> dict[str, float]:
        """Return the time of a step after the first ones: by the clock, and processor
        time of all threads.
        """
        steps = max(self.moments) - WARMING_UP
        moments = zip(self.moments[WARMING_UP], self.moments[max(self.moments)], strict=True)
        clock, cpu = (1000 * (end - begin) / steps for begin, end in moments)
        return {"clock": clock, "processor": cpu}
