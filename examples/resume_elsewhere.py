"""Train on two ranks, kill the run in the midst of it, check what it has left, and resume on three ranks.

    python examples/resume_elsewhere.py

The first run saves after every epoch, in the background, and never ends by itself: it gets SIGKILL, as from a scheduler
that needs the machine. Whatever it was doing, its last checkpoint is whole, as `checkpoint verify` finds.
The second run has another number of ranks and other devices. It needs that one file and nothing else: all three ranks
resume from it, with `map_location` naming where the tensors are to go, and training continues at the step of the save.
"""

import argparse
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
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_ddp_ext as ddpx

Batch = tuple[Tensor, Tensor]


class Regression(L.LightningModule):
    """Learns the sine of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: Batch, _: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> DataLoader[Batch]:
        x = torch.rand(480, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=8, shuffle=True)


class Report(L.Callback):
    """Says where training begins and ends, once: on rank 0."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            print(f"{trainer.world_size} ranks begin at step {trainer.global_step}", flush=True)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            loss = float(trainer.callback_metrics["loss"])
            print(f"epoch {trainer.current_epoch} ends at step {trainer.global_step}, loss {loss:.4f}", flush=True)


def train(directory: Path, *, devices: int, epochs: int, resume: bool) -> None:
    """One run. What it is resumed from may have been saved on GPUs that this machine does not have."""
    io = ddpx.RankZeroCheckpointIO(
        background=True, map_location={f"cuda:{number}": "cpu" for number in range(8)} if resume else None
    )
    trainer = L.Trainer(
        strategy="ddp_ext_fork",
        accelerator="cpu",
        devices=devices,
        max_epochs=epochs,
        plugins=[io],
        callbacks=[ModelCheckpoint(directory, filename="run", enable_version_counter=False), Report()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(), ckpt_path=directory / "run.ckpt" if resume else None)


def kill_once_it_has_saved(run: "subprocess.Popen[bytes]", checkpoint: Path) -> None:
    """SIGKILL, in the midst of whatever the run is doing a moment after its first save."""
    while not checkpoint.exists():
        if run.poll() is not None:
            sys.exit("the first run ended by itself")
        time.sleep(0.05)
    time.sleep(0.5)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()


def main() -> None:
    """Start the two runs one after another, each as a script of its own."""
    parser = argparse.ArgumentParser(description="Kill a run on two ranks, resume it on three.")
    parser.add_argument("--directory", type=Path, help="where to save (default: a temporary one)")
    parser.add_argument("--run", choices=["first", "second"], help=argparse.SUPPRESS)
    parser.add_argument("--epochs", type=int, default=100_000, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run is not None:
        train(args.directory, devices=2 if args.run == "first" else 3, epochs=args.epochs, resume=args.run == "second")
        return

    with tempfile.TemporaryDirectory() as temporary:
        directory = args.directory or Path(temporary)
        command = [sys.executable, __file__, "--directory", str(directory)]
        checkpoint = directory / "run.ckpt"
        kill_once_it_has_saved(subprocess.Popen([*command, "--run", "first"], start_new_session=True), checkpoint)
        print(f"killed; what is left: {', '.join(sorted(path.name for path in directory.iterdir()))}", flush=True)
        subprocess.run([sys.executable, "-m", "lightning_ddp_ext", "checkpoint", "verify", checkpoint], check=True)
        epoch = torch.load(checkpoint, weights_only=True)["epoch"]
        subprocess.run([*command, "--run", "second", "--epochs", str(epoch + 3)], check=True)


if __name__ == "__main__":
    main()
