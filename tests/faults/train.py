"""The run that faults strike: the script that trains, what it writes, and its processes.

1. The script is ``train.py DIRECTORY WORLD_SIZE START_METHOD IS_BACKGROUND``. The weights
   count the steps, and how often each sample was read.
2. In the directory, each rank writes its process id to the file ``output`` once it trains,
   and rank 0 the steps that it saved.
3. With the ids, a test signals the processes, and waits for their ends.
"""

import contextlib
import errno
import os
import re
import signal
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_ext import DDPExtStrategy, RankZeroCheckpoint, RankZeroCheckpointIO
from tests.harness.ranks import RankProcesses
from tests.harness.scripts import print_line
from tests.harness.training import make_trainer

STEPS = 16  # of an epoch
BATCH = 2
# Seconds; short, so that faults that only a limit ends do not take long.
LIMITS: dict[str, Any] = {"timeout": 6.0, "heartbeat_timeout": 3.0, "save_deadline": 8.0}
FAIL = signal.SIGUSR2  # has the training step raise
SECONDS_TO_TRAIN = 240.0  # until all ranks report that they train
SECONDS_TO_DUMP = 60.0  # until a late rank has written its stacks


class Counting(L.LightningModule):
    """A model that counts, with 2 MB of gradients, validations and, on request, a
    loader worker.
    """

    def __init__(self, world_size: int, has_worker: bool) -> None:
        super().__init__()
        self.world_size = world_size
        self.has_worker = has_worker
        self.fails = False  # set by the signal
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
        return DataLoader(
            range(len(self.seen)),
            BATCH,
            shuffle=True,
            num_workers=int(self.has_worker),
            persistent_workers=self.has_worker,
            multiprocessing_context="fork" if self.has_worker else None,
        )

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(range(7), batch_size=BATCH)


class TellingIO(RankZeroCheckpointIO):
    """Prints which step was saved."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        print_line(f"step {checkpoint['global_step']} is saved")


def train(
    directory: Path, devices: int, is_background: bool, max_epochs: int = -1, **options: Any
) -> Counting:
    """Train from the newest checkpoint on, and save every third step; return the model.

    In the background means that a loader worker also reads. ``options`` are those of the
    strategy.
    """
    L.seed_everything(8 if any(directory.rglob("*.ckpt")) else 7, verbose=False)
    io = L.pytorch.plugins.AsyncCheckpointIO(TellingIO()) if is_background else TellingIO()
    saver = RankZeroCheckpoint(directory, "{step}", every_n_train_steps=3, save_last=True)
    trainer = make_trainer(
        DDPExtStrategy(checkpoint_io=io, **LIMITS, **options),
        devices=devices,
        max_epochs=max_epochs,
        num_sanity_val_steps=0,
        enable_checkpointing=True,
        callbacks=[saver],
    )
    model = Counting(devices, has_worker=is_background)
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


# The processes, as the test that has started them sees them.


class Process:
    """A process, which may exit at any time; for ``connection.wait``, it is ready once it
    has exited.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def fileno(self) -> int:
        return self._descriptor

    def signal(self, signum: int) -> None:
        """Send a signal, unless the process has exited."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signum)

    def close(self) -> None:
        """Kill the process if it still runs."""
        self.signal(signal.SIGKILL)
        os.close(self._descriptor)


@dataclass(frozen=True)
class Run:
    """A run in which all ranks train.

    Attributes:
        launcher: the process that starts the ranks; by hand, the first rank.
        ranks: the process of each rank, which may be the launcher.
    """

    launcher: Process
    ranks: dict[int, Process]


@contextlib.contextmanager
def all_train(processes: RankProcesses, directory: Path, world_size: int) -> Iterator[Run]:
    """Wait until all ranks train; after the block, kill what still runs."""
    with contextlib.ExitStack() as stack:

        def watch(pid: int) -> Process:
            return stack.enter_context(contextlib.closing(Process(pid)))

        started = [watch(pid) for pid in processes.pids.values()]
        deadline = time.monotonic() + SECONDS_TO_TRAIN
        pids: dict[int, int] = {}
        while len(pids) < world_size:
            exited = connection.wait(started, 0.02)
            output = output_in(directory)
            assert not exited, f"a rank exited before all trained:\n{output}"
            assert time.monotonic() < deadline, f"not all ranks train:\n{output}"
            pids = ranks_in(output)
        yield Run(started[0], {rank: watch(pid) for rank, pid in pids.items()})


def wait_for_exits(processes: Collection[Process], seconds: float) -> list[str]:
    """Wait until processes exit; end those that are late with their stacks, and return a
    line for each of them.
    """
    late = still_running(processes, seconds)
    for process in late:
        process.signal(signal.SIGABRT)  # writes the stacks
        process.signal(signal.SIGCONT)
    still_running(late, SECONDS_TO_DUMP)
    return [f"rank process {each.pid} still runs {seconds} s after the fault" for each in late]


def still_running(processes: Collection[Process], seconds: float) -> set[Process]:
    """Wait until processes exit; return those that still run after some seconds."""
    deadline = time.monotonic() + seconds
    running = set(processes)
    while running and time.monotonic() < deadline:
        running.difference_update(connection.wait(running, deadline - time.monotonic()))
    return running


def main(directory: str, world_size: str, start_method: str, is_background: str) -> None:
    write_to_output(Path(directory))
    train(Path(directory), int(world_size), is_background == "True", start_method=start_method)


if __name__ == "__main__":
    main(*sys.argv[1:])
