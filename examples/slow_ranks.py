"""Find the rank that all others wait for: rank 1 reads its samples slowly.

python examples/slow_ranks.py
"""

import time

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, Dataset

import lightning_ddp_ext as ddpx


class SlowOnRank1(Dataset[torch.Tensor]):
    """Samples that rank 1 reads from a slow disk."""

    def __init__(self, rank: int) -> None:
        self.seconds = 0.005 if rank == 1 else 0.0

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.ones(32) * index / len(self)


class Model(BoringModel):
    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(SlowOnRank1(self.global_rank), batch_size=4)


if __name__ == "__main__":
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp_ext",
        max_epochs=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[slow_ranks := ddpx.SlowRanks(every_n_steps=10)],
    )
    trainer.fit(Model())
    if trainer.is_global_zero:
        for row in slow_ranks.report:
            times = (
                f"{part} {row[part]:.1f}" for part in ("data", "forward", "backward", "waiting")
            )
            print(f"rank {row['rank']}, ms a step: {', '.join(times)}")
