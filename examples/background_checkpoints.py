"""Save checkpoints in the background, and resume where the last run stopped, as on
clusters that preempt jobs.

Run python examples/background_checkpoints.py, stop it with Ctrl-C or SIGTERM, and run
it again.
"""

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch.utils.data import DataLoader

import lightning_ddp_ext as ddpx


class Model(BoringModel):
    def train_dataloader(self) -> DataLoader[torch.Tensor]:
        return DataLoader(RandomDataset(32, 512), batch_size=8, shuffle=True)


class Report(L.Callback):
    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            print(f"{trainer.world_size} ranks begin at step {trainer.global_step}", flush=True)


if __name__ == "__main__":
    L.seed_everything(1)  # to resume within an epoch, a run needs the same data
    trainer = L.Trainer(
        # Seconds from a signal until exit, including the save.
        strategy=ddpx.DDPExtStrategy(save_deadline=60),
        accelerator="cpu",
        devices=2,
        max_epochs=10,
        # Steps wait only for a copy. The strategy removes an old checkpoint after the new
        # one is on disk, and raises a save error on every rank.
        plugins=[AsyncCheckpointIO(ddpx.RankZeroCheckpointIO())],
        callbacks=[
            ModelCheckpoint("checkpoints", save_last=True, every_n_train_steps=50),
            Report(),
        ],
        logger=False,
    )
    # "last" loads the newest checkpoint, including `last-preempted.ckpt`; the first run
    # has none.
    trainer.fit(Model(), ckpt_path="last")
    if trainer.is_global_zero:
        saved = trainer.checkpoint_callback.last_model_path
        print(f"ended at step {trainer.global_step}; the last checkpoint is {saved}")
