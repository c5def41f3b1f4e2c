"""Measure a rank's death: the time to a survivor's checkpoint and to the next step, and
the cost of a step.

    python benchmarks/rescue.py    # about 7 minutes on 2 cores

Each step's cost is that of noting random states and buffers, switched off and on every
20 steps of one run.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from measuring import (
    Effort,
    Figures,
    Table,
    fork_ranks,
    main,
    on_rank_zero,
    ratio,
    scratch_directory,
    spread,
    statuses,
    take_turns,
)
from torch import Tensor, nn
from training import Net, make_trainer

from lightning_ddp_ext import DDPExtStrategy

NAME = "last-rescued.ckpt"
KILLED_AT = 30
EVERY = 20  # steps between checkpoints of stock


class Mixed(Net):
    """With BatchNorm, and with noise from NumPy, on request."""

    def __init__(self, width: int = 64, *, norm: bool = False, noise: bool = False) -> None:
        super().__init__(width)
        self.noise = noise
        if norm:
            self.layers = nn.Sequential(
                *(nn.Sequential(layer, nn.BatchNorm1d(width)) for layer in self.layers)
            )

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if self.noise:
            batch = batch + torch.from_numpy(np.random.randn(self.width).astype(np.float32)).to(
                batch.device
            )
        return super().training_step(batch, index)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Switch(L.Callback):
    """Switches the notes off and on, and takes the time of each step."""

    def __init__(self) -> None:
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self.is_on = True
        self.began = 0.0
        self.kept = None

    def on_train_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int
    ) -> None:
        now = time.perf_counter()  # type: ignore[attr-defined]
        recorder = trainer.strategy.recorder  # type: ignore[attr-defined]
        if index % EVERY > 1:
            self.seconds[self.is_on].append(now - self.began)
        elif index % EVERY == 0:
            self.kept, recorder.run = recorder.run, self.kept
            self.is_on = recorder.run is not None
        self.began = now


def cost(steps: int, **options: bool) -> Figures:
    """Return milliseconds of the median step, without and with notes."""

    def work(rank: int, directory: Path) -> Figures:
        switch = Switch()
        given = {
            "max_steps": steps,
            "callbacks": [switch],
            "default_root_dir": directory,
            "accelerator": "auto",
        }
        # Two ranks share the first GPU, if there is one: NCCL would refuse that.
        devices = [torch.device("cuda", 0)] * 2 if torch.cuda.is_available() else None
        strategy = DDPExtStrategy(
            rescue_checkpoint=NAME, parallel_devices=devices, process_group_backend="gloo"
        )
        make_trainer(strategy, "auto" if devices else 2, **given).fit(Mixed(**options))
        medians = {on: statistics.median(switch.seconds[on][EVERY:]) * 1000 for on in (False, True)}
        return {"off": medians[False], "on": medians[True]}

    return on_rank_zero(work)


def measure_cost(effort: Effort) -> Table:
    steps = effort.choose(1500, quick=200)
    repeats = effort.repeats(5)
    rows = []
    for norm, noise in effort.choose(
        ((False, False), (True, False), (False, True), (True, True)), quick=((True, True),)
    ):
        name = " and ".join(["BatchNorm"] * norm + ["NumPy noise"] * noise) or "neither"
        found = take_turns({name: partial(cost, steps, norm=norm, noise=noise)}, repeats)[name]
        rows.append([name, spread(found["off"]), ratio(found["on"], found["off"])])
    return Table(
        "cost", ["a step of width 64 on 2 ranks, with", "ms without notes", "× without notes"], rows
    )


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
            make_trainer(DDPExtStrategy(rescue_checkpoint=NAME), 2, **options).fit(Mixed(width))

        statuses(fork_ranks(2, work), seconds=120)
        ended = time.time()
        killed = float((directory / "killed").read_text().split()[0])
        return {"file": (directory / NAME).stat().st_mtime - killed, "exited": ended - killed}


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
        "ddp" if kind == "stock" else DDPExtStrategy(rescue_checkpoint=NAME),
        2,
        callbacks=callbacks,
        **options,
    )
    trainer.fit(Mixed(), ckpt_path="last")


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
        main(__doc__, {"cost": measure_cost, "kill": measure_kill, "restart": measure_restart})
