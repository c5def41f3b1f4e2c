"""Train on two ranks, kill them at any time, and resume on three ranks from the remaining
checkpoint.

Run it: python examples/resume_elsewhere.py

The first run saves in the background after every epoch until it receives SIGKILL.
Regardless of what it was doing, its last checkpoint is undamaged. The second run needs
only this file, and verifies its checksums.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import Tensor
from torch.utils.data import DataLoader

import lightning_ddp_ext as ddpx


class Model(BoringModel):
    def train_dataloader(self) -> DataLoader[Tensor]:
        x = torch.rand(480, 32, generator=torch.Generator().manual_seed(0))
        return DataLoader(x, batch_size=8, shuffle=True)

    def on_train_start(self) -> None:
        self.trainer.print(
            f"{self.trainer.world_size} ranks begin at step {self.trainer.global_step}", flush=True
        )


def train(checkpoint: Path, *, devices: int, epochs: int) -> None:
    """Train, and resume if the checkpoint exists.

    It may have been saved on GPUs that this machine does not have: with "rank", each rank
    reads it onto its own device.
    """
    trainer = L.Trainer(
        strategy="ddp_ext_fork",
        accelerator="cpu",
        devices=devices,
        max_epochs=epochs,
        plugins=[AsyncCheckpointIO(ddpx.RankZeroCheckpointIO(map_location="rank"))],
        callbacks=[
            ModelCheckpoint(checkpoint.parent, checkpoint.stem, enable_version_counter=False)
        ],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), ckpt_path=checkpoint if checkpoint.exists() else None)


def main(checkpoint: Path) -> None:
    command = [sys.executable, __file__, str(checkpoint)]
    first = subprocess.Popen([*command, "2", "100000"], start_new_session=True)
    while not checkpoint.exists():
        if first.poll() is not None:
            sys.exit("the first run ended by itself")
        time.sleep(0.05)
    time.sleep(0.5)  # lets some steps and saves finish
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()

    print(
        "killed; what is left:",
        *sorted(path.name for path in checkpoint.parent.iterdir()),
        flush=True,
    )
    epochs = torch.load(checkpoint, weights_only=True)["epoch"] + 3
    subprocess.run([*command, "3", str(epochs)], check=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(Path(sys.argv[1]), devices=int(sys.argv[2]), epochs=int(sys.argv[3]))
    else:
        with tempfile.TemporaryDirectory() as directory:
            main(Path(directory, "run.ckpt"))
