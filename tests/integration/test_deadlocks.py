"""Ranks that wait for each other in different calls raise an error with both calls; no
other wait does.
"""

from __future__ import annotations

import io
import pdb
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchmetrics import MeanMetric

from lightning_ddp_ext import DDPExtStrategy
from lightning_ddp_ext.errors import RankAbsentError
from tests.harness import ranks, training
from tests.harness.training import Net

PLACE = r"\S+/test_deadlocks\.py:\d+"


class Plain(Net):
    """A model without buffers, so that only gradients need all ranks in a training
    step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 1))

    def training_step(self, batch: training.Batch, index: int) -> Tensor:
        return self.loss(batch)


class WithoutTargets(Plain):
    """On rank 1, the loss of some steps does not depend on the model."""

    def __init__(self, steps: list[int], layers: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.layers = layers or self.layers
        self.steps = steps

    def training_step(self, batch: training.Batch, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        if self.global_rank == 1 and index in self.steps:
            return torch.zeros((), requires_grad=True)
        return loss


class Stream(IterableDataset[Any]):
    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        return iter([(torch.ones(4), torch.ones(1))] * self.samples)


class Validating(Plain):
    """Each rank validates on its own stream."""

    def __init__(self, samples: list[int], on_step: bool) -> None:
        super().__init__()
        self.samples = samples
        self.on_step = on_step
        self.mean = MeanMetric()

    def validation_step(self, batch: training.Batch, index: int) -> None:
        loss = self.loss(batch)
        if self.on_step:
            self.log("val", loss, on_step=True, on_epoch=True, sync_dist=True)
        else:
            self.mean(loss)

    def on_validation_epoch_end(self) -> None:
        if not self.on_step and self.samples[self.global_rank]:
            self.mean.compute()

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Stream(self.samples[self.global_rank]), batch_size=1)


Setting = tuple[L.LightningModule, dict[str, Any]]


def alone(
    hook: str, do: Callable[[L.Trainer], object], *, earlier: int = 0, rank: int = 0
) -> Callable[[int], Setting]:
    """Return the setting of ranks of which one makes a call in a hook."""
    return lambda _: (
        Plain(),
        {"callbacks": [training.At(hook, do, earlier=earlier, ranks=[rank])]},
    )


def read_log_dir(trainer: L.Trainer) -> object:
    return trainer.log_dir


def gather(trainer: L.Trainer) -> object:
    return trainer.lightning_module.all_gather(torch.ones(2))


def reduce_in_own_group(trainer: L.Trainer) -> None:
    dist.all_reduce(torch.ones(1), group=trainer.own_group)


def form_own_group(trainer: L.Trainer) -> None:
    trainer.own_group = dist.new_group([0, 1])


def in_own_group(rank: int) -> Setting:
    callbacks = [
        training.At("on_fit_start", form_own_group),
        training.At("on_train_batch_end", reduce_in_own_group, earlier=1, ranks=[0]),
    ]
    return Plain(), {"callbacks": callbacks}


def validating(samples: list[int], *, on_step: bool) -> Setting:
    return Validating(samples, on_step), {"limit_val_batches": 5}


BACKWARD = "return a loss that depends on the model.*same callbacks and accumulate_grad_batches"


class Deadlock(NamedTuple):
    """The settings of each rank, the calls in which ranks 0 and 1 wait, and the remedy."""

    setting: Callable[[int], Setting]
    first: str
    second: str
    remedy: str


CASES = {
    "log_dir at the start": Deadlock(
        alone("on_fit_start", read_log_dir),
        r"broadcast #\d+ \[\[1\]\]",
        "barrier '.*'",
        r"such as trainer\.log_dir, on every rank",
    ),
    "log_dir in a step": Deadlock(
        alone("on_train_batch_end", read_log_dir, earlier=1),
        r"broadcast #\d+ \[\[1\]\]",
        r"all_reduce #\d+ \[\[5\]\]",
        r"such as trainer\.log_dir, on every rank",
    ),
    "log_dir at the end": Deadlock(
        alone("on_train_end", read_log_dir),
        r"broadcast #\d+ \[\[1\]\]",
        "the final stop check",
        r"such as trainer\.log_dir, on every rank",
    ),
    "no targets in a step": Deadlock(
        lambda rank: (WithoutTargets([1], Net().layers), {}),
        r"all_reduce #\d+ \[\[65\]\]",
        r"broadcast #\d+ \[\[16\]\]",
        BACKWARD,
    ),
    "no targets in the last step": Deadlock(
        lambda rank: (WithoutTargets([3]), {}),
        r"all_reduce #\d+ \[\[5\]\]",
        r"the reduction of validation_step\.val_loss \(mean\)",
        BACKWARD,
    ),
    "accumulate_grad_batches": Deadlock(
        lambda rank: (Plain(), {"accumulate_grad_batches": 1 + rank}),
        r"all_reduce #\d+ \[\[5\]\]",
        r"the reduction of validation_step\.val_loss \(mean\)",
        BACKWARD,
    ),
    "callbacks": Deadlock(
        alone("on_train_batch_end", gather, earlier=1),
        r"all_gather #\d+ \[\[2\]\]",
        r"all_reduce #\d+ \[\[5\]\]",
        BACKWARD,
    ),
    "two groups": Deadlock(
        in_own_group,
        r"all_reduce #1 \[\[1\]\] of group \d+",
        r"all_reduce #\d+ \[\[5\]\]",
        BACKWARD,
    ),
    "no batch for a metric": Deadlock(
        lambda rank: validating([3, 0], on_step=False),
        r"barrier #\d+",
        "the final stop check",
        "the same number of evaluation steps",
    ),
}


def make_strategy(directory: Path, seconds: float = 0.5, **options: Any) -> DDPExtStrategy:
    strategy = DDPExtStrategy(f"file://{directory}/store", **options)
    strategy.rendezvous.timeouts = replace(strategy.rendezvous.timeouts, deadlock=seconds)
    return strategy


def fit(rank: int, world_size: int, directory: Path, name: str) -> None:
    """Train in a setting; ranks are compared soon, or very soon if one of them is busy."""
    is_busy = name in BUSY
    if rank == 0 and is_busy:
        threading.Thread(target=announce_surveys, daemon=True).start()
    model, options = SETTINGS[name](rank)
    chosen = {"max_epochs": 1, "num_sanity_val_steps": 0, "default_root_dir": directory, **options}
    training.make_trainer(make_strategy(directory, 0.2 if is_busy else 0.5), **chosen).fit(model)


@pytest.mark.parametrize("name", CASES)
def test_ranks_in_different_calls_are_named(name: str, tmp_path: Path) -> None:
    """Both ranks raise an error with both calls, their lines and a remedy, long before
    the timeout.
    """
    deadlock = CASES[name]
    outcomes = ranks.launch_ranks(fit, 2, tmp_path, name)
    rank_0, rank_1 = (rf"rank {each.rank} \(host \S+, pid {each.pid}\) is in" for each in outcomes)
    sentence = (
        "ranks are waiting for each other in different calls:"
        rf" {rank_0} {deadlock.first}, {PLACE}; {rank_1} {deadlock.second}, {PLACE};"
        rf" .*{deadlock.remedy}"
    )
    for outcome in outcomes:
        assert outcome.failure.type_name == "RankAbsentError", outcome.story()
        assert re.search(sentence, outcome.failure.message), outcome.story()


def test_values_logged_in_other_numbers_of_steps_are_named(tmp_path: Path) -> None:
    """Both ranks raise an error with the values, without waiting."""
    for outcome in ranks.launch_ranks(fit, 2, tmp_path, "uneven validation"):
        assert outcome.failure.type_name == "DivergenceError", outcome.story()
        assert "ranks logged different values with sync_dist=True" in outcome.failure.message


def leave_early(rank: int, world_size: int, directory: Path) -> None:
    """Rank 0 waits in a hook after the last barrier of ``fit``, which rank 1 leaves."""
    hook = training.At("on_fit_end", lambda trainer: dist.all_reduce(torch.ones(1)), ranks=[0])
    trainer = training.make_trainer(make_strategy(directory), max_epochs=1, callbacks=[hook])
    trainer.fit(Plain())
    ranks.hold("after fit")


def test_a_rank_that_has_left_fit_is_named(tmp_path: Path) -> None:
    """The message has its line after `fit`, and the call in which the other rank waits
    for it.
    """
    with ranks.RankProcesses(leave_early, 2, tmp_path) as processes:
        processes.wait_for("after fit", 1)
        (waiting,) = processes.wait(0)
        processes.release(1)
        processes.wait(1)
    assert type(waiting.failure.exception) is RankAbsentError, waiting.story()
    left = (
        r"rank 1 \(host \S+, pid \d+\) is in code after the Trainer's run, \S+/rank_process\.py:\d+"
    )
    assert re.search(
        rf"rank 0 .* is in all_reduce #\d+ \[\[1\]\], {PLACE}; {left}", waiting.failure.message
    )


# Waits that are not deadlocks: rank 0 is busy until the test releases it.


def stay(*_: Any) -> None:
    ranks.hold("busy")


class Slow(Dataset[Any]):
    """One of its samples takes long to read on rank 0."""

    reads = 0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        if self.reads == 5 and dist.get_rank() == 0:
            stay()
        return torch.ones(4), torch.ones(1)


class ReadsSlowly(Plain):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Slow(), batch_size=2)


class SavesSlowly(TorchCheckpointIO):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        stay()
        super().save_checkpoint(*args, **kwargs)


def save(trainer: L.Trainer) -> None:
    trainer.save_checkpoint(f"{trainer.default_root_dir}/it.ckpt")


class Terminal(io.StringIO):
    """A user at a debugger, who continues once the test releases the rank."""

    def readline(self, *_: Any) -> str:
        stay()
        return "continue\n"


def debug(trainer: L.Trainer) -> None:
    pdb.Pdb(stdin=Terminal(), stdout=sys.stdout).set_trace()


BUSY: dict[str, Callable[[int], Setting]] = {
    "its own validation": alone("on_train_batch_end", stay, earlier=1),
    "a slow loader": lambda rank: (ReadsSlowly(), {}),
    "a debugger": alone("on_train_batch_end", debug, earlier=1),
    "a long save": lambda rank: (
        Plain(),
        {
            "callbacks": [training.At("on_train_batch_end", save, earlier=1)],
            "plugins": [SavesSlowly()],
        },
    ),
    "work before a barrier": alone("on_train_end", stay),
    "work at the start": alone("setup", stay),
    "stopped": alone("on_train_batch_end", stay, rank=1, earlier=1),
}
SETTINGS: dict[str, Callable[[int], Setting]] = {
    **{name: deadlock.setting for name, deadlock in CASES.items()},
    **BUSY,
    "uneven validation": lambda rank: validating([3, 2], on_step=True),
}


def announce_surveys() -> None:
    """On rank 0: report each comparison of the ranks to the test."""
    while True:
        for thread in threading.enumerate():
            if thread.name == "ddpx-survey":
                with suppress(RuntimeError):  # not started yet
                    thread.join()
                    ranks.announce("survey")
        time.sleep(0.001)


@pytest.mark.parametrize("name", [name for name in BUSY if name != "stopped"])
def test_a_rank_that_works_can_continue(name: str, tmp_path: Path) -> None:
    """The others wait for it, however often rank 0 compares the ranks."""
    with ranks.RankProcesses(fit, 2, tmp_path, name) as processes:
        processes.wait_for("busy", 0)
        for _ in range(4):
            processes.wait_for("survey", 0)
        processes.release(0)
        outcomes = processes.wait()
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes[0].story()


def test_a_stopped_process_can_continue(tmp_path: Path) -> None:
    """A process that SIGSTOP stopped and SIGCONT continued finishes, and so do the
    ranks that waited for it.
    """
    with ranks.RankProcesses(fit, 2, tmp_path, "stopped") as processes:
        processes.wait_for("busy", 1)
        processes.kill(1, signal.SIGSTOP)
        processes.release(1)
        for _ in range(2):
            processes.wait_for("survey", 0)
        processes.kill(1, signal.SIGCONT)
        outcomes = processes.wait()
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes[0].story()
