"""The run that faults strike: the script that trains, and what it writes.

Its only argument has the options of ``main`` as JSON. In the directory, each rank writes its
process id to the file ``output`` once it trains, and rank 0 the steps that it saved.
"""

import errno
import json
import os
import re
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
SAVED_EVERY = 3  # steps
REPORTED_AFTER = 5  # steps; a rank that reports has then begun to save
# Seconds; short, so that faults that only a limit ends do not take long.
LIMITS: dict[str, Any] = {"timeout": 6.0, "heartbeat_timeout": 3.0, "save_deadline": 8.0}
FAIL = signal.SIGUSR2  # has the training step raise


class Counting(L.LightningModule):
    """Has weights that count, so that a checkpoint shows each step that was lost, repeated or
    saved in part, and each sample that was.

    The gradient of a count is -1 where something is counted; a step of SGD subtracts it.

    Args:
        world_size: the number of ranks.
        has_worker: whether a worker process loads the samples.

    Attributes:
        seen: how often each sample was read, by any rank.
        steps: the number of steps, as often as makes 2 MB of gradients.
        fails: whether the next step raises; set by the signal.
    """

    def __init__(self, world_size: int, has_worker: bool) -> None:
        super().__init__()
        self.world_size = world_size
        self.has_worker = has_worker
        self.fails = False
        self.seen = nn.Parameter(torch.zeros(STEPS * BATCH * world_size))
        self.steps = nn.Parameter(torch.zeros(500_000))

    def on_train_start(self) -> None:
        signal.signal(FAIL, self.fail_in_next_step)

    def fail_in_next_step(self, *_: object) -> None:
        self.fails = True

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if self.global_step == REPORTED_AFTER:
            print_line(f"rank {self.global_rank} trains as process {os.getpid()}")
        if self.fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        # Each rank counts its own samples, and a part of the step that all ranks make.
        return -self.seen[batch].sum() - self.steps.sum() / self.world_size

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("seen", self.seen[batch].sum(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        # DDP divides the sum of the gradients by the number of ranks.
        return torch.optim.SGD(self.parameters(), lr=self.world_size)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(
            range(len(self.seen)),
            BATCH,
            shuffle=True,
            num_workers=int(self.has_worker),
            persistent_workers=self.has_worker,
            multiprocessing_context="fork" if self.has_worker else None,
        )

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(range(7), batch_size=BATCH)  # in unequal parts, on 2 or 3 ranks


class TellingIO(RankZeroCheckpointIO):
    """Prints which step was saved."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        print_line(f"step {checkpoint['global_step']} is saved")


def train(
    directory: Path, world_size: int, has_helpers: bool, max_epochs: int = -1, **options: Any
) -> Counting:
    """Train from the newest checkpoint on; return the model.

    Args:
        directory: where checkpoints are.
        world_size: the number of ranks.
        has_helpers: whether a thread saves in the background, and a worker loads.
        max_epochs: the number of epochs; by default the run only ends by a fault.
        options: of the strategy.
    """
    # A run that continues has another seed: only the checkpoint can give it its order.
    L.seed_everything(8 if any(directory.rglob("*.ckpt")) else 7, verbose=False)
    io = L.pytorch.plugins.AsyncCheckpointIO(TellingIO()) if has_helpers else TellingIO()
    saver = RankZeroCheckpoint(directory, "{step}", every_n_train_steps=SAVED_EVERY, save_last=True)
    trainer = make_trainer(
        DDPExtStrategy(checkpoint_io=io, **LIMITS, **options),
        devices=world_size,
        max_epochs=max_epochs,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        callbacks=[saver],
    )
    model = Counting(world_size, has_worker=has_helpers)
    trainer.fit(model, ckpt_path="last")
    return model


# The file ``output``, which this process and its children write, and outlives all of them.


def write_to_output(directory: Path) -> None:
    """Have this process and its children write to the file."""
    output = os.open(directory / "output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())


def output_in(directory: Path) -> str:
    """Return the text that all processes have written so far."""
    path = directory / "output"
    return path.read_text(errors="replace") if path.exists() else ""


def ranks_in(output: str) -> dict[int, int]:
    """Return the process id of each rank that trains."""
    lines = re.findall(r"^rank (\d) trains as process (\d+)$", output, re.MULTILINE)
    return {int(rank): int(pid) for rank, pid in lines}


def saved_steps_in(output: str) -> list[int]:
    """Return the steps whose save has ended."""
    return [int(step) for step in re.findall(r"^step (\d+) is saved$", output, re.MULTILINE)]


def main(directory: str, world_size: int, start_method: str, has_helpers: bool) -> None:
    """Train in a process that starts ranks, or that torchrun has started."""
    write_to_output(Path(directory))
    train(Path(directory), world_size, has_helpers, start_method=start_method)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
