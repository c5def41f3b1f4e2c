"""Ranks that wait for each other in different calls raise an error with both calls; no
other wait does.
"""

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_ddp_ext import DDPExtStrategy
from lightning_ddp_ext.supervision import status_table
from lightning_ddp_ext.supervision.status import Status
from tests.harness import ranks, training
from tests.harness.training import Linear, Net, Rows

PLACE = r"\S+/test_deadlocks\.py:\d+"


class WithoutTargets(Linear):
    """On rank 1, the loss of a step does not depend on the model."""

    def __init__(self, step: int, has_buffers: bool) -> None:
        super().__init__()
        if has_buffers:
            self.layers = Net().layers
        self.step = step

    def training_step(self, batch: training.Batch, index: int) -> Tensor:
        if self.global_rank == 1 and index == self.step:
            self.loss(batch)
            return torch.zeros((), requires_grad=True)
        return super().training_step(batch, index)


class Validating(Linear):
    """Only rank 0 has samples to validate on, and computes a metric from them."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def validation_step(self, batch: training.Batch, index: int) -> None:
        self.mean(self.loss(batch))

    def on_validation_epoch_end(self) -> None:
        if self.global_rank == 0:
            self.mean.compute()

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Rows(3 if self.global_rank == 0 else 0), batch_size=1)


class Run(NamedTuple):
    """What a rank trains."""

    model: L.LightningModule
    options: dict[str, Any]  # of the Trainer


Setting = Callable[[int], Run]  # called with the rank


def call_on_one_rank(
    rank: int, *, hook: str, call: Callable[[L.Trainer], object], earlier: int = 0, caller: int = 0
) -> Run:
    """Let one rank make a call in a hook."""
    return Run(Linear(), {"callbacks": [training.At(hook, call, earlier=earlier, ranks=[caller])]})


def read_log_dir(trainer: L.Trainer) -> object:
    return trainer.log_dir


def stop(trainer: L.Trainer) -> None:
    trainer.should_stop = True


def stop_on_rank_1(rank: int) -> Run:
    stop_early = training.At("on_train_epoch_end", stop, ranks=[1])
    return Run(Net(), {"max_epochs": 2, "callbacks": [stop_early]})


def gather(trainer: L.Trainer) -> object:
    return trainer.lightning_module.all_gather(torch.ones(2))


def form_own_group(trainer: L.Trainer) -> None:
    trainer.own_group = dist.new_group([0, 1])


def reduce_in_own_group(trainer: L.Trainer) -> None:
    dist.all_reduce(torch.ones(1), group=trainer.own_group)


def call_in_own_group_on_rank_0(rank: int) -> Run:
    callbacks = [
        training.At("on_fit_start", form_own_group),
        training.At("on_train_batch_end", reduce_in_own_group, earlier=1, ranks=[0]),
    ]
    return Run(Linear(), {"callbacks": callbacks})


def leave_out_targets(rank: int, *, step: int, has_buffers: bool = False) -> Run:
    return Run(WithoutTargets(step, has_buffers), {})


def validate_on_rank_0(rank: int) -> Run:
    return Run(Validating(), {"limit_val_batches": 5})


# The calls in which ranks wait, as messages name them.
READING_LOG_DIR = "a broadcast from rank 0"
GRADIENTS_OF_LINEAR = r"all_reduce #\d+ \[\[5\]\]"
GRADIENTS_OF_NET = r"all_reduce #\d+ \[\[65\]\]"
BUFFERS_OF_NET = r"broadcast #\d+ \[\[16\]\]"
GATHER = r"all_gather #\d+ \[\[2\]\]"  # of ``gather``
OWN_REDUCTION = r"all_reduce #1 \[\[1\]\] of group \d+"  # of ``reduce_in_own_group``
LOGGED_VALUES_OF_STEP = r"all_gather #\d+ \[\[256\]\] of group \d+"
LOGGED_VALIDATION_LOSS = r"the reduction of validation_step\.val_loss \(mean\)"
METRIC = r"barrier #\d+"
FINAL_BARRIER = "the final barrier of the Trainer's run"
# The remedies in these messages.
LOG_DIR = r"such as trainer\.log_dir, on every rank"
SAME_CALLS = "make sure that every rank makes the same calls in the same order"
# A setting, the calls in which ranks 0 and 1 then wait, and the remedy.
DEADLOCKS = [
    pytest.param(
        partial(call_on_one_rank, hook="on_before_backward", call=read_log_dir, earlier=1),
        [READING_LOG_DIR, GRADIENTS_OF_LINEAR],
        LOG_DIR,
        id="log_dir in a step",
    ),
    pytest.param(
        stop_on_rank_1,
        [LOGGED_VALUES_OF_STEP, FINAL_BARRIER],
        r"if only some ranks set trainer\.should_stop",
        id="should_stop",
    ),
    pytest.param(
        partial(leave_out_targets, step=1, has_buffers=True),
        [GRADIENTS_OF_NET, BUFFERS_OF_NET],
        SAME_CALLS,
        id="no targets in a step",
    ),
    pytest.param(
        partial(leave_out_targets, step=3),
        [GRADIENTS_OF_LINEAR, LOGGED_VALIDATION_LOSS],
        SAME_CALLS,
        id="no targets in the last step",
    ),
    pytest.param(
        partial(call_on_one_rank, hook="on_train_batch_end", call=gather, earlier=1),
        [GATHER, GRADIENTS_OF_LINEAR],
        SAME_CALLS,
        id="callbacks",
    ),
    pytest.param(
        call_in_own_group_on_rank_0,
        [OWN_REDUCTION, GRADIENTS_OF_LINEAR],
        SAME_CALLS,
        id="two groups",
    ),
    pytest.param(
        validate_on_rank_0,
        [METRIC, FINAL_BARRIER],
        r"if the ranks have different numbers of batches",
        id="no batch for a metric",
    ),
]


def make_strategy(directory: Path, seconds: float) -> DDPExtStrategy:
    """Return a strategy that compares the ranks after some seconds in a call."""
    strategy = DDPExtStrategy(f"file://{directory}/store")
    strategy._rendezvous.timeouts = replace(strategy._rendezvous.timeouts, deadlock=seconds)
    return strategy


def fit(
    rank: int,
    world_size: int,
    directory: Path,
    setting: Setting,
    *,
    seconds: float = 0.5,
) -> None:
    model, options = setting(rank)
    options = {
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        "default_root_dir": directory,
        **options,
    }
    training.make_trainer(make_strategy(directory, seconds), **options).fit(model)


@pytest.mark.parametrize(("setting", "calls", "remedy"), DEADLOCKS)
def test_ranks_in_different_calls_are_named(
    setting: Setting, calls: list[str], remedy: str, tmp_path: Path
) -> None:
    """Both ranks raise an error with both calls, their lines and a remedy, long before
    the timeout.
    """
    outcomes = ranks.launch_ranks(fit, 2, tmp_path, setting)
    rank_0, rank_1 = (
        rf"rank {each.rank} \(host \S+, pid {each.pid}\) is in {call}, {PLACE}"
        for each, call in zip(outcomes, calls, strict=True)
    )
    sentence = (
        rf"ranks are waiting for each other in different calls: {rank_0}; {rank_1}; .*{remedy}"
    )
    for outcome in outcomes:
        assert outcome.failure.type_name == "RankAbsentError", outcome.story()
        assert re.search(sentence, outcome.failure.message), outcome.story()


# Waits that are not deadlocks: a rank is busy until the test releases it.


def stay(*_: Any) -> None:
    ranks.hold("busy")


class SavesSlowly(TorchCheckpointIO):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        stay()
        super().save_checkpoint(*args, **kwargs)


def save(trainer: L.Trainer) -> None:
    trainer.save_checkpoint(f"{trainer.default_root_dir}/it.ckpt")


def save_slowly(rank: int) -> Run:
    saving = training.At("on_train_batch_end", save, earlier=1)
    return Run(Linear(), {"callbacks": [saving], "plugins": [SavesSlowly()]})


def fit_and_announce(rank: int, world_size: int, directory: Path, setting: Setting) -> None:
    """Train; rank 0 announces each time that it compares statuses of waiting ranks."""
    find = status_table.deadlock_in

    def find_and_announce(statuses: Sequence[Status]) -> object:
        if statuses:
            ranks.announce("compared")
        return find(statuses)

    status_table.deadlock_in = find_and_announce
    fit(rank, world_size, directory, setting, seconds=0.2)


@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(
            partial(call_on_one_rank, hook="on_train_batch_end", call=stay, earlier=1),
            id="a callback",
        ),
        pytest.param(save_slowly, id="a long save"),
        pytest.param(
            partial(call_on_one_rank, hook="on_train_end", call=stay), id="work before a barrier"
        ),
        pytest.param(partial(call_on_one_rank, hook="setup", call=stay), id="work at the start"),
    ],
)
def test_a_rank_that_works_can_continue(setting: Setting, tmp_path: Path) -> None:
    """The other rank waits for it, however often it has the ranks compared."""
    with ranks.RankProcesses(fit_and_announce, 2, tmp_path, setting) as processes:
        processes.wait_for("busy", 0)
        for _ in range(4):
            processes.wait_for("compared", 0)
        processes.release(0)
        outcomes = processes.wait()
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes[0].story()


def test_a_stopped_process_can_continue(tmp_path: Path) -> None:
    """A process that SIGSTOP stopped and SIGCONT continued finishes, and so do the
    ranks that waited for it.
    """
    setting = partial(call_on_one_rank, hook="on_train_batch_end", call=stay, earlier=1, caller=1)
    with ranks.RankProcesses(fit_and_announce, 2, tmp_path, setting) as processes:
        processes.wait_for("busy", 1)
        processes.kill(1, signal.SIGSTOP)
        processes.release(1)
        for _ in range(2):
            processes.wait_for("compared", 0)
        processes.kill(1, signal.SIGCONT)
        outcomes = processes.wait()
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes[0].story()
