"""Simulate a stuck rank: the watchdog names rank 1 and its line of code, and stops both
ranks.

Run it: python examples/hang_watchdog.py
"""

import threading

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

import lightning_ddp_ext as ddpx


class Stuck(BoringModel):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> dict[str, torch.Tensor]:
        if batch_idx == 5 and self.global_rank == 1:
            read_from_a_dead_disk()  # simulates the hang
        return super().training_step(batch, batch_idx)


def read_from_a_dead_disk() -> None:
    threading.Event().wait()


if __name__ == "__main__":
    trainer = L.Trainer(
        strategy="ddp_ext",
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        # In real runs, choose a timeout above the longest step plus a save, such as 600
        # s. The report has all stacks.
        callbacks=[ddpx.HangWatchdog(timeout=5, directory="hang_reports")],
        logger=False,
    )
    try:
        trainer.fit(Stuck())
    except ddpx.RankHungError as error:
        print(f"rank {trainer.global_rank} stopped: {error}", flush=True)
        raise SystemExit(1) from None
