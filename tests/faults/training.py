"""Train under faults; as a script: ``training.py DIRECTORY WORLD_SIZE START_METHOD
DURING``.

The weights count the steps, and how often each sample was read. In the directory of the
run, each rank writes its process id to ``output`` once it trains, and rank 0 the steps
that it saved.
"""

import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_ext import DDPExtStrategy, RankZeroCheckpoint, RankZeroCheckpointIO
from tests.harness.scripts import print_line
from tests.harness.training import make_trainer

STEPS = 16  # of an epoch
BATCH = 2
# Seconds; short, so that faults that only a limit ends do not take long.
LIMITS: dict[str, Any] = {"timeout": 6.0, "heartbeat_timeout": 3.0, "save_deadline": 8.0}
FAIL = signal.SIGUSR2  # has the training step raise


class Counting(L.LightningModule):
    """A model that counts, with 2 MB of gradients, validations and, on request, a
    loader worker.
    """

    def __init__(self, world_size: int, has_worker: bool) -> None:
        super().__init__()
        self.world_size = world_size
        self.has_worker = has_worker
        self.fails = False
        self.seen = nn.Parameter(torch.zeros(STEPS * BATCH * world_size))
        self.steps = nn.Parameter(torch.zeros(500_000))

    def on_train_start(self) -> None:
        signal.signal(FAIL, lambda *_: setattr(self, "fails", True))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if self.global_step == 5:
            print_line(f"rank {self.global_rank} trains as process {os.getpid()}")
        if self.fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        loss: Tensor = -self.seen[batch].sum() - self.steps.sum() / self.world_size
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("seen", self.seen[batch].sum(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.world_size)  # DDP divides gradients by it

    def train_dataloader(self) -> DataLoader[Any]:
        worker: dict[str, Any] = {
            "num_workers": 1,
            "persistent_workers": True,
            "multiprocessing_context": "fork",
        }
        options = worker if self.has_worker else {}
        return DataLoader(range(len(self.seen)), BATCH, shuffle=True, **options)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(range(7), batch_size=BATCH)


class TellingIO(RankZeroCheckpointIO):
    """Prints which step was saved, or copied for a save in the background."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        print_line(f"step {checkpoint['global_step']} is saved")


def train(
    directory: Path, devices: int, during: str, max_epochs: int = -1, **options: Any
) -> Counting:
    """Train from the newest checkpoint on, and save every third step; return the model."""
    L.seed_everything(8 if any(directory.glob("*.ckpt")) else 7, verbose=False)
    io = TellingIO(background=during == "background saves")
    rescue = "last-rescued.ckpt" if during == "rescue" else None
    saver = RankZeroCheckpoint(directory, "{step}", every_n_train_steps=3, save_last=True)
    trainer = make_trainer(
        DDPExtStrategy(checkpoint_io=io, rescue_checkpoint=rescue, **LIMITS, **options),
        devices=devices,
        max_epochs=max_epochs,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        callbacks=[saver],
    )
    model = Counting(devices, has_worker=during == "background saves")
    trainer.fit(model, ckpt_path="last")
    return model


def write_to(directory: Path) -> None:
    """Have this process and its children write to a file, which outlives all of them."""
    output = os.open(directory / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())


def train_by_hand(rank: int, world_size: int, directory: Path, url: str, during: str) -> None:
    """Train on one of the ranks that a user starts by hand."""
    write_to(directory)
    train(directory, world_size, during, init_method=url)


def run_again(
    rank: int, world_size: int, directory: Path, during: str, max_epochs: int
) -> tuple[Tensor, Tensor]:
    """Run the same command again until ``max_epochs``; return how often each sample was
    read, and the steps.
    """
    model = train(
        directory, world_size, during, max_epochs, init_method=f"file://{directory}/again"
    )
    return model.seen.detach(), model.steps.detach()[::500].clone()


def main(directory: str, world_size: str, start_method: str, during: str) -> None:
    write_to(Path(directory))
    train(Path(directory), int(world_size), during, start_method=start_method)


if __name__ == "__main__":
    main(*sys.argv[1:])
