"""Write metrics from rank 0, log lines from selected ranks, and a profile from each
rank.

Run it: python examples/loggers_and_profiler.py
"""

import logging
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler

import lightning_ddp_ext as ddpx

only_rank_0 = ddpx.rank_logger(__name__, ranks=0)
only_rank_1 = ddpx.rank_logger(__name__, ranks=1)


class Model(BoringModel):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.step(batch)
        self.log("loss", loss, sync_dist=True)  # the mean over all ranks, which rank 0 writes
        return loss

    def on_train_epoch_end(self) -> None:
        only_rank_0.info("epoch %d ends", self.current_epoch)
        only_rank_1.info("only rank 1 prints this")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    metrics = CSVLogger("logs", name="metrics")  # or TensorBoardLogger, WandbLogger, …
    trainer = L.Trainer(
        strategy="ddp_ext",
        accelerator="cpu",
        devices=2,
        max_epochs=2,
        logger=metrics,
        log_every_n_steps=10,
        # Writes logs/fit-profile-0.txt and logs/fit-profile-1.txt.
        profiler=SimpleProfiler("logs", "profile"),
        limit_val_batches=0,
    )
    trainer.fit(Model())
    if trainer.is_global_zero:
        rows = Path(metrics.log_dir, "metrics.csv").read_text().splitlines()
        print(f"{metrics.log_dir}/metrics.csv: {len(rows) - 1} rows, the last one is {rows[-1]}")
