"""Train for an epoch of small steps, as a script that the field tests start; something
may happen in the fourth step.

The script's arguments are those of ``main``, as ``name=value``. Each rank prints its
first and its last step, and a fingerprint of the weights at the end, which
``starts_in``, ``stops_in`` and ``weights_in`` read.
"""

import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from typing import Any, NamedTuple

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_ddp_ext import DDPExtStrategy
from tests.harness.scripts import print_line
from tests.harness.training import At, Net, data, fingerprint, make_trainer

ONE_STEP_DONE = "the first step is over"
STEPS = 200  # a signal of SLURM takes some tenths of a second to arrive


def main(
    devices: str = "2",
    nodes: str = "1",
    seed: str = "5",
    resume: str = "last",
    command: str = "",
    death: str = "",
    error: str = "",
    root: str = "run",
    step: str = "0",
    **strategy: str,
) -> None:
    """Train; in the fourth step of the first start, a command or a fault happens, if any.

    Args:
        devices: the Trainer's.
        nodes: the Trainer's ``num_nodes``, unless torchrun says how many there are.
        seed: the seed of the model.
        resume: ``ckpt_path``.
        command: a shell command, which rank 0 runs.
        death: the rank that is killed.
        error: the rank that raises an error.
        root: ``default_root_dir``.
        step: seconds that a step takes, so that signals arrive before the end; a
            resumed run with all ranks takes no such time.
        strategy: arguments of the strategy, numbers or ``None`` among them.
    """
    L.seed_everything(int(seed))
    strategy_options: dict[str, Any] = {name: parse(value) for name, value in strategy.items()}
    ranks = int(devices) * int(nodes)
    callbacks: list[L.Callback] = [Steps(float(step), ranks)]
    if is_first_start():
        happen = partial(run_or_fail, command, death, error)
        callbacks.append(At("on_train_batch_end", happen, earlier=3))
    trainer = make_trainer(
        DDPExtStrategy(**strategy_options),
        devices=int(devices),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", nodes)),
        max_epochs=1,
        default_root_dir=root,
        callbacks=callbacks,
    )
    model = Net()
    loader = DataLoader(data(STEPS * 3 * ranks), batch_size=3, shuffle=True)
    trainer.fit(model, loader, ckpt_path=resume or None)
    print_line(
        f"rank {trainer.global_rank} of {trainer.world_size} trained to step {trainer.global_step}"
    )
    print_line(f"weights {fingerprint(model)}")


def weights_in(output: str) -> set[str]:
    """Return the fingerprints of the weights that ranks have printed."""
    return set(re.findall(r"^weights (\w+)$", output, re.MULTILINE))


class Start(NamedTuple):
    """The step from which ranks trained, and their number."""

    step: int
    ranks: int


def starts_in(output: str) -> list[Start]:
    """Return the starts that rank 0 has printed, sorted by step."""
    starts = re.findall(r"^rank 0 of (\d) trains from step (\d+)$", output, re.MULTILINE)
    return sorted(Start(int(step), int(ranks)) for ranks, step in starts)


def stops_in(output: str) -> list[int]:
    """Return the steps that all ranks or the survivors saved, sorted."""
    # "all ranks stop after step 3; saved to …" and, from survivors, "saved step 3 to …"
    steps = re.findall(r"(?:all ranks stop after|saved) step (\d+)(?:; saved)? to", output)
    return sorted(map(int, steps))


def parse(value: str) -> str | float | None:
    """Return the value of an argument of the strategy."""
    if value.isdigit():
        return float(value)
    return None if value == "None" else value


def is_first_start() -> bool:
    """Whether no launcher has restarted this job."""
    counts = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
    return all(os.environ.get(name, "0") == "0" for name in counts)


class Steps(L.Callback):
    """Prints each run's first step, and when that of the job is over, and makes steps take
    time; see ``main``.
    """

    def __init__(self, seconds: float, ranks: int) -> None:
        self._seconds = seconds
        self._ranks = ranks

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        rank = f"rank {trainer.global_rank} of {trainer.world_size}"
        print_line(f"{rank} trains from step {trainer.global_step}")
        if trainer.global_step > 0 and trainer.world_size == self._ranks:
            self._seconds = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 1:
            print_line(ONE_STEP_DONE)
        time.sleep(self._seconds)


def run_or_fail(command: str, death: str, error: str, trainer: L.Trainer) -> None:
    """Do on this rank what these arguments of ``main`` say."""
    if death == str(trainer.global_rank):
        os.kill(os.getpid(), signal.SIGKILL)
    if error == str(trainer.global_rank):
        raise ValueError("a broken sample")
    if command and trainer.is_global_zero:
        subprocess.run(command, shell=True, check=False)  # a signal that it sends may end it


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(**dict(word.split("=", 1) for word in sys.argv[1:]))
