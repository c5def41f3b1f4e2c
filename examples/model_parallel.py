"""Split one network across two devices per rank, and run its parts at the same time on
micro-batches.

Run it: python examples/model_parallel.py (2 ranks with 2 devices each: four GPUs if
available, otherwise the CPU)

While the second part computes one micro-batch, the first part computes the next one. On
two GPUs, this can shorten a step with 4 micro-batches by up to three eighths. On the CPU,
both parts share the same cores, so steps do not get faster, as the table shows.
"""

import time

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_ddp_ext import DDPExtStrategy

WIDTH = 512
BATCHES = 20
BATCH_SIZE = 64
HAS_GPUS = torch.cuda.device_count() >= 4


class TwoParts(L.LightningModule):
    """With ``micro_batches=1``, the parts run one after the other."""

    def __init__(self, micro_batches: int) -> None:
        super().__init__()
        self.micro_batches = micro_batches

    def configure_model(self) -> None:
        first, self.second_device = self.trainer.strategy.rank_devices
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)).to(
            first
        )
        self.second = nn.Sequential(
            nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)
        )
        self.second.to(self.second_device)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        x, y = batch
        halves = (
            self.first(part).to(self.second_device, non_blocking=True)
            for part in x.chunk(self.micro_batches)
        )
        waiting = next(halves)
        results = []
        # The first device computes `following` while the second one computes `waiting`.
        for following in halves:
            results.append(self.second(waiting))
            waiting = following
        results.append(self.second(waiting))
        return nn.functional.mse_loss(torch.cat(results), y.to(self.second_device))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def seconds_per_step(micro_batches: int) -> float:
    quiet = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    accelerator = "gpu" if HAS_GPUS else "cpu"
    strategy = DDPExtStrategy(devices_per_rank=2)
    trainer = L.Trainer(
        strategy=strategy, accelerator=accelerator, devices=4, max_epochs=1, **quiet
    )
    x = torch.randn(2 * BATCHES * BATCH_SIZE, WIDTH)
    began = time.perf_counter()
    trainer.fit(
        TwoParts(micro_batches), DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), BATCH_SIZE)
    )
    return (time.perf_counter() - began) / trainer.global_step


if __name__ == "__main__":
    seconds_per_step(1)  # warm-up
    times = {number: seconds_per_step(number) for number in (1, 2, 4)}
    if torch.distributed.get_rank() == 0:
        print(
            f"micro-batches  a step  on {'two GPUs' if HAS_GPUS else 'the CPU, without four GPUs'}"
        )
        for number, seconds in times.items():
            print(f"{number:13}  {seconds * 1000:4.0f} ms  {seconds / times[1]:.2f} ×")
