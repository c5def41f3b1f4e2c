"""Measure a rank's death: the time to a survivor's checkpoint and to the next step.

python benchmarks/early_end.py    # about 4 minutes on 2 cores
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from measuring import (
    Effort,
    Figures,
    Table,
    fork_ranks,
    main,
    scratch_directory,
    spread,
    statuses,
    take_turns,
)
from training import Net, make_trainer

from lightning_ddp_ext import DDPExtStrategy

NAME = "last-preempted.ckpt"  # the default
KILLED_AT = 30
EVERY = 20  # steps between checkpoints of stock


class Trained(Net):
    """Has an optimiser with a state."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Killer(L.Callback):
    """Kills rank 0 in a backward pass, and notes when."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_after_backward(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        is_first = not (self.directory / "killed").exists()
        if trainer.global_step >= KILLED_AT and trainer.global_rank == 0 and is_first:
            (self.directory / "killed").write_text(f"{time.time()} {trainer.global_step}")
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        again = self.directory / "again"
        is_restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "1"
        if is_restarted and trainer.global_rank == 1 and not again.exists():
            again.write_text(f"{time.time()} {trainer.global_step}")


def kill(width: int) -> Figures:
    """Measure the seconds from the kill of rank 0 of 2."""
    with scratch_directory() as directory:

        def work(rank: int) -> None:
            options = {
                "default_root_dir": directory,
                "callbacks": [Killer(directory)],
                "max_steps": -1,
            }
            make_trainer(DDPExtStrategy(), 2, **options).fit(Trained(width))

        statuses(fork_ranks(2, work), seconds=120)
        ended = time.time()
        killed = float((directory / "killed").read_text().split()[0])
        [file] = directory.rglob(NAME)
        return {"file": file.stat().st_mtime - killed, "exited": ended - killed}


def measure_kill(effort: Effort) -> Table:
    rows = []
    # Four layers with two moments of Adam: 504 MiB at width 3318.
    for width, name in effort.choose(
        ((64, "0.2 MiB"), (3318, "504 MiB")), quick=((64, "0.2 MiB"),)
    ):
        found = take_turns({name: partial(kill, width)}, effort.repeats(5))[name]
        rows.append([name, spread(found["file"]), spread(found["exited"])])
    return Table(
        "kill",
        ["seconds from the kill of rank 0 of 2, a checkpoint of", "to the file", "to the end"],
        rows,
    )


def restart(kind: str) -> Figures:
    """Return seconds from the kill to the next trained step under torchrun, and the
    steps that are trained again.
    """
    with scratch_directory() as directory:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--max-restarts=1",
        ]
        quiet = dict.fromkeys(("stdout", "stderr"), subprocess.DEVNULL)
        with subprocess.Popen([*command, __file__, "--as", kind, str(directory)], **quiet) as run:
            try:
                run.wait(120)
            except subprocess.TimeoutExpired:
                run.terminate()  # torchrun kills ranks that are still alive 30 seconds later
        if not (directory / "again").exists():
            # For example, stock ranks may connect to an address of the first attempt.
            return {"continued": 0}
        killed, last = (float(each) for each in (directory / "killed").read_text().split())
        again, step = (float(each) for each in (directory / "again").read_text().split())
        return {"continued": 1, "seconds": again - killed, "lost": max(last + 1 - step, 0)}


def train_once(kind: str, directory: Path) -> None:
    torch.set_num_threads(1)
    callback = L.pytorch.callbacks.ModelCheckpoint(
        directory, every_n_train_steps=EVERY, save_last=True
    )
    callbacks = [Killer(directory), *([callback] if kind == "stock" else [])]
    options = {
        "max_steps": KILLED_AT + 10,
        "default_root_dir": directory,
        "enable_checkpointing": kind == "stock",
    }
    trainer = make_trainer(
        "ddp" if kind == "stock" else DDPExtStrategy(),
        2,
        callbacks=callbacks,
        **options,
    )
    trainer.fit(Trained(), ckpt_path="last")


def measure_restart(effort: Effort) -> Table:
    kinds = {
        "ddp_ext": partial(restart, "ours"),
        f"stock, a checkpoint every {EVERY} steps": partial(restart, "stock"),
    }
    rows: list[list[Any]] = []
    for name, found in take_turns(kinds, effort.repeats(3)).items():
        continued = f"{sum(found['continued'])} of {len(found['continued'])}"
        seconds = spread(found["seconds"]) if found["seconds"] else "–"
        rows.append(
            [name, continued, seconds, ", ".join(f"{steps:.0f}" for steps in found["lost"]) or "–"]
        )
    columns = [
        "under torchrun",
        "runs that continued",
        "seconds from the kill to the next step",
        "steps trained again",
    ]
    return Table("restart", columns, rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as"]:
        train_once(sys.argv[2], Path(sys.argv[3]))
    else:
        main(__doc__, {"kill": measure_kill, "restart": measure_restart})
