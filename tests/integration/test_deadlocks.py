"""Ranks that wait for each other in different calls raise an error with both calls. Ranks
that wait for one that works, or that can still arrive, wait on.
"""

import re
import signal
import threading
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_ddp_ext import RankAbsentError
from lightning_ddp_ext.rendezvous.channel import Channel
from lightning_ddp_ext.supervision import status_table
from lightning_ddp_ext.supervision.status import Status
from tests.harness import ranks, training

# What ranks train, and what some of them call.


class Run(NamedTuple):
    """A model, and options of the Trainer; the same on each rank."""

    model: L.LightningModule
    options: dict[str, Any]


def plain_run(*callbacks: L.Callback, **options: Any) -> Run:
    """Return a run in which ranks wait for each other only for gradients and in callbacks."""
    return Run(training.Plain(), {"callbacks": [*callbacks], **options})


def fit(rank: int, world_size: int, directory: Path, run: Run, *, seconds: float = 0.5) -> None:
    """Train; rank 0 compares the calls of ranks that have waited for some seconds."""
    strategy = training.make_strategy("ours", directory)
    training.change_timeouts(strategy, deadlock=seconds)
    options = {
        "devices": world_size,
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        "default_root_dir": directory,
        **run.options,
    }
    training.make_trainer(strategy, **options).fit(run.model)


class ComputesMetricOnRank0(training.Plain):
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
        return DataLoader(training.Streamed(training.data(3 if self.global_rank == 0 else 0)))


class EndsEpochOnRank1(training.Plain):
    """Rank 1 ends the epoch before its second batch."""

    def on_train_batch_start(self, batch: training.Batch, index: int) -> int:
        return -1 if self.global_rank == 1 and index == 1 else 0


class LogsOnRank0(training.Plain):
    """Only rank 0 logs a value, which a callback monitors."""

    def training_step(self, batch: training.Batch, index: int) -> torch.Tensor:
        if self.global_rank == 0:
            self.log("on_rank_0", 1.0, rank_zero_only=True)
        return super().training_step(batch, index)


def read_log_dir(trainer: L.Trainer) -> object:
    return trainer.log_dir


def stop(trainer: L.Trainer) -> None:
    trainer.should_stop = True


def gather(trainer: L.Trainer) -> object:
    return trainer.lightning_module.all_gather(torch.ones(2))


def enter_barrier(trainer: L.Trainer) -> None:
    trainer.strategy.barrier("apart")


def hold(*_: Any) -> None:
    """Work until the test releases this rank."""
    ranks.hold("busy")


# Deadlocks.

PLACE = r"\S+/test_deadlocks\.py:\d+"  # the file and line of a call
# The calls in which ranks wait, as messages name them.
GRADIENTS = r"all_reduce #\d+ \[\[49\]\]"
FINAL_BARRIER = "the final barrier of the Trainer's run"


def different(call_of_rank_0: str, call_of_rank_1: str, remedy: str) -> str:
    """Return the sentence about ranks that wait in these calls."""
    rank_0, rank_1 = (
        rf"rank {rank} \(host \S+, pid \d+\) is in {call}, {PLACE}"
        for rank, call in enumerate((call_of_rank_0, call_of_rank_1))
    )
    return rf"ranks are waiting for each other in different calls: {rank_0}; {rank_1}; .*{remedy}"


def log_dir_on_rank_0(hook: str) -> tuple[Run, str]:
    return (
        plain_run(training.At(hook, read_log_dir, ranks=[0])),
        rf"rank 0 .*began a broadcast from rank 0 \({PLACE}\)",
    )


def monitored_on_rank_0(callback: L.Callback) -> tuple[Run, str]:
    return (
        Run(LogsOnRank0(), {"callbacks": [callback], "enable_checkpointing": True}),
        rf"rank 0 .*began a decision of {type(callback).__name__} \({PLACE}\).*; log"
        " 'on_rank_0' on every rank",
    )


# Runs of two ranks that wait for each other, and a part of the error of both.
DEADLOCKS: dict[str, tuple[Run, str]] = {
    "log_dir in a step": (
        plain_run(training.At("on_before_backward", read_log_dir, earlier=1, ranks=[0])),
        different("a broadcast from rank 0", GRADIENTS, r"such as trainer\.log_dir, on every rank"),
    ),
    "log_dir on_fit_start": log_dir_on_rank_0("on_fit_start"),
    "log_dir on_train_end": log_dir_on_rank_0("on_train_end"),
    "should_stop": (
        Run(
            training.Net(),
            {"max_epochs": 2, "callbacks": [training.At("on_train_epoch_end", stop, ranks=[1])]},
        ),
        rf"rank 1 began {FINAL_BARRIER}, but rank 0 \(host \S+, pid \d+\) continued without it; if"
        r" only some ranks set trainer\.should_stop",
    ),
    "an epoch that ends early": (
        Run(EndsEpochOnRank1(), {"limit_val_batches": 0}),
        "or return -1 from on_train_batch_start, let every rank",
    ),
    "callbacks": (
        plain_run(training.At("on_train_batch_end", gather, earlier=1, ranks=[0])),
        different(
            r"all_gather #\d+ \[\[2\]\]",
            GRADIENTS,
            "make sure that every rank makes the same calls in the same order",
        ),
    ),
    "no batch for a metric": (
        Run(ComputesMetricOnRank0(), {"limit_val_batches": 5}),
        different(
            r"barrier #\d+", FINAL_BARRIER, r"if the ranks have different numbers of batches"
        ),
    ),
    "ModelCheckpoint": monitored_on_rank_0(
        ModelCheckpoint(monitor="on_rank_0", every_n_train_steps=1, save_top_k=2)
    ),
    "EarlyStopping": monitored_on_rank_0(
        EarlyStopping("on_rank_0", strict=False, check_on_train_epoch_end=True)
    ),
}


@pytest.mark.parametrize(("run", "sentence"), DEADLOCKS.values(), ids=DEADLOCKS)
def test_ranks_in_different_calls_are_named(run: Run, sentence: str, tmp_path: Path) -> None:
    """Both ranks raise an error with the calls, their lines and a remedy, long before the
    timeout.
    """
    for outcome in ranks.launch_ranks(fit, 2, tmp_path, run):
        assert re.search(sentence, ranks.message_of(outcome, RankAbsentError)), outcome.story()


def test_a_deadlock_is_named_while_a_rank_that_is_not_in_it_works(tmp_path: Path) -> None:
    """Two ranks that wait for each other do not wait until the third one needs them."""
    run = plain_run(
        training.At("on_train_batch_end", gather, ranks=[0]),
        training.At("on_train_batch_end", enter_barrier, ranks=[1]),
        training.At("on_train_batch_end", hold, ranks=[2]),
    )
    with ranks.RankProcesses(fit, 3, tmp_path, run) as processes:
        processes.wait_for("busy", 2)
        outcomes = processes.wait(0, 1)
        processes.release(2)
        processes.wait(2)
    for outcome in outcomes:
        message = outcome.failure.message
        assert message.startswith("ranks are waiting for each other in different calls: rank 0 (")
        assert "; rank 1 (" in message
        assert "rank 2 (" not in message


# Waits that are not deadlocks.


def fit_and_announce_comparisons(rank: int, world_size: int, directory: Path, run: Run) -> None:
    """Train; rank 0 announces each time that it has compared the calls of waiting ranks, of
    which users see nothing unless it finds a deadlock.
    """
    find = status_table.deadlock_in

    def find_and_announce(statuses: Sequence[Status]) -> object:
        if statuses:
            ranks.announce("compared")
        return find(statuses)

    status_table.deadlock_in = find_and_announce
    fit(rank, world_size, directory, run, seconds=0.2)


class SavesSlowly(TorchCheckpointIO):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        hold()
        super().save_checkpoint(*args, **kwargs)


def save(trainer: L.Trainer) -> None:
    trainer.save_checkpoint(f"{trainer.default_root_dir}/it.ckpt")


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(
            plain_run(training.At("on_train_batch_end", hold, earlier=1, ranks=[0])),
            id="a callback",
        ),
        pytest.param(
            plain_run(training.At("on_train_batch_end", save, earlier=1), plugins=[SavesSlowly()]),
            id="a long save",
        ),
        pytest.param(plain_run(training.At("setup", hold, ranks=[0])), id="work at the start"),
    ],
)
def test_a_rank_that_works_can_continue(run: Run, tmp_path: Path) -> None:
    """Rank 1 waits for rank 0, however often their calls are compared."""
    with ranks.RankProcesses(fit_and_announce_comparisons, 2, tmp_path, run) as processes:
        processes.wait_for("busy", 0)
        for _ in range(4):
            processes.wait_for("compared", 0)
        processes.release(0)
        ranks.output_of_all(processes.wait())


def run_backward(released: list[bool]) -> None:
    while not released:
        pass


def reduce_in_other_orders(trainer: L.Trainer) -> None:
    """Reduce in two groups, in another order on each rank, beside a long backward pass.

    A thread ends the pass when the test releases the rank.
    """
    released: list[bool] = []
    groups = [dist.new_group() for _ in range(2)]
    group, other = groups if trainer.global_rank == 0 else reversed(groups)
    reducing = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    threading.Thread(target=lambda: released.append(hold() is None)).start()
    # Computes in a frame of torch's, as a backward pass does.
    types.FunctionType(run_backward.__code__, {"__name__": "torch.autograd.graph"})(released)
    dist.all_reduce(torch.ones(1), group=other)
    reducing.wait()


def test_ranks_that_compute_beside_collectives_can_continue(tmp_path: Path) -> None:
    """They may enter the collectives of several groups in different orders."""
    run = plain_run(training.At("on_train_batch_end", reduce_in_other_orders))
    with ranks.RankProcesses(fit_and_announce_comparisons, 2, tmp_path, run) as processes:
        processes.wait_for_all("busy")
        for _ in range(4):
            processes.wait_for("compared", 0)
        processes.release(0, 1)
        ranks.output_of_all(processes.wait())


def test_a_stopped_process_can_continue(tmp_path: Path) -> None:
    """A process that SIGSTOP stopped and SIGCONT continued finishes, and so do the
    ranks that waited for it.
    """
    run = plain_run(training.At("on_train_batch_end", hold, earlier=1, ranks=[1]))
    with ranks.RankProcesses(fit_and_announce_comparisons, 2, tmp_path, run) as processes:
        processes.wait_for("busy", 1)
        processes.kill(1, signal.SIGSTOP)
        processes.release(1)
        for _ in range(2):
            processes.wait_for("compared", 0)
        processes.kill(1, signal.SIGCONT)
        ranks.output_of_all(processes.wait())


# A rank that arrives while it is looked for.


def fit_and_announce_search(rank: int, world_size: int, directory: Path) -> None:
    """Train; rank 1 is late at the end of training, and then at a barrier.

    The first wait for it is overdue on rank 0, which looks for it, and announces the
    begin and the end of this search; the second wait is not.
    """
    deliver = Channel.deliver

    def deliver_and_announce(self: Channel, topic: str, body: Any) -> None:
        deliver(self, topic, body)
        if topic == "look":  # rank 0 sends it to all ranks, including itself
            ranks.announce("looks" if body["is_watched"] else "has looked")

    Channel.deliver = deliver_and_announce
    run = plain_run(
        training.At("on_train_end", lambda _: training.limit_collectives(0.2), ranks=[0]),
        training.At("on_train_end", hold, ranks=[1]),
        training.At("on_fit_end", lambda _: training.limit_collectives(600), ranks=[0]),
        training.At("on_fit_end", hold, ranks=[1]),
        training.At("on_fit_end", enter_barrier),
    )
    fit(rank, world_size, directory, run, seconds=0.2)


def test_a_rank_that_arrives_while_it_is_looked_for_can_continue(tmp_path: Path) -> None:
    """It may be late again in the next call, whose wait has only begun."""
    with ranks.RankProcesses(fit_and_announce_search, 2, tmp_path) as processes:
        processes.wait_for("busy", 1)
        processes.wait_for("looks", 0)
        processes.release(1)
        processes.wait_for("busy", 1)
        processes.wait_for("has looked", 0)
        processes.release(1)
        outcomes = processes.wait()
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes[0].story()
