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
    """Only rank 0 logs a value."""

    def training_step(self, batch: training.Batch, index: int) -> torch.Tensor:
        if self.global_rank == 0:
            self.log("on_rank_0", 1.0, rank_zero_only=True)
        return super().training_step(batch, index)


def monitored_run(callback: L.Callback) -> Run:
    """Return a run in which only rank 0 has the value that a callback monitors."""
    return Run(LogsOnRank0(), {"callbacks": [callback], "enable_checkpointing": True})


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


class Deadlock(NamedTuple):
    """A run of two ranks that wait for each other.

    Attributes:
        run: the run.
        says: parts of the error of both ranks, in this order, as ``simplified`` returns it.
    """

    run: Run
    says: Sequence[str]


def simplified(message: str) -> str:
    """Replace what differs from run to run: a rank's host and process, the lines of calls in
    this module, and the numbers of collectives.
    """
    without_processes = re.sub(r"\(host \S+, pid \d+\)", "(PROCESS)", message)
    without_lines = re.sub(r"[^\s(]+/test_deadlocks\.py:\d+", "HERE", without_processes)
    return re.sub(r"#\d+", "#N", without_lines)


# Gradients are reduced in one piece of 49 numbers. Where a part ends with "rank 0 ", it
# depends on the time whether the rank's process or its call comes next.
DEADLOCKS = {
    "log_dir in a step": Deadlock(
        plain_run(training.At("on_before_backward", read_log_dir, earlier=1, ranks=[0])),
        [
            "ranks are waiting for each other in different calls:"
            " rank 0 (PROCESS) is in a broadcast from rank 0, HERE;"
            " rank 1 (PROCESS) is in all_reduce #N [[49]], HERE; ",
            "such as trainer.log_dir, on every rank",
        ],
    ),
    "log_dir on_fit_start": Deadlock(
        plain_run(training.At("on_fit_start", read_log_dir, ranks=[0])),
        ["rank 0 ", "began a broadcast from rank 0 (HERE)"],
    ),
    "log_dir on_train_end": Deadlock(
        plain_run(training.At("on_train_end", read_log_dir, ranks=[0])),
        ["rank 0 ", "began a broadcast from rank 0 (HERE)"],
    ),
    "should_stop": Deadlock(
        Run(
            training.Net(),
            {"max_epochs": 2, "callbacks": [training.At("on_train_epoch_end", stop, ranks=[1])]},
        ),
        [
            "rank 1 began the final barrier of the Trainer's run,"
            " but rank 0 (PROCESS) continued without it;"
            " if only some ranks set trainer.should_stop"
        ],
    ),
    "an epoch that ends early": Deadlock(
        Run(EndsEpochOnRank1(), {"limit_val_batches": 0}),
        ["or return -1 from on_train_batch_start, let every rank"],
    ),
    "callbacks": Deadlock(
        plain_run(training.At("on_train_batch_end", gather, earlier=1, ranks=[0])),
        [
            "ranks are waiting for each other in different calls:"
            " rank 0 (PROCESS) is in all_gather #N [[2]], HERE;"
            " rank 1 (PROCESS) is in all_reduce #N [[49]], HERE; ",
            "make sure that every rank makes the same calls in the same order",
        ],
    ),
    "no batch for a metric": Deadlock(
        Run(ComputesMetricOnRank0(), {"limit_val_batches": 5}),
        [
            "ranks are waiting for each other in different calls:"
            " rank 0 (PROCESS) is in barrier #N, HERE;"
            " rank 1 (PROCESS) is in the final barrier of the Trainer's run, HERE; ",
            "if the ranks have different numbers of batches",
        ],
    ),
    "ModelCheckpoint": Deadlock(
        monitored_run(ModelCheckpoint(monitor="on_rank_0", every_n_train_steps=1, save_top_k=2)),
        [
            "rank 0 ",
            "began a decision of ModelCheckpoint (HERE)",
            "; log 'on_rank_0' on every rank",
        ],
    ),
    "EarlyStopping": Deadlock(
        monitored_run(EarlyStopping("on_rank_0", strict=False, check_on_train_epoch_end=True)),
        ["rank 0 ", "began a decision of EarlyStopping (HERE)", "; log 'on_rank_0' on every rank"],
    ),
}


@pytest.mark.parametrize(("run", "says"), DEADLOCKS.values(), ids=DEADLOCKS)
def test_ranks_in_different_calls_are_named(run: Run, says: Sequence[str], tmp_path: Path) -> None:
    """Both ranks raise an error with the calls, their lines and a remedy, long before the
    timeout.
    """
    in_this_order = ".*".join(map(re.escape, says))
    for outcome in ranks.launch_ranks(fit, 2, tmp_path, run):
        message = simplified(ranks.message_of(outcome, RankAbsentError))
        assert re.search(in_this_order, message), f"{message}\n\n{outcome.story()}"


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
    """Train; rank 0 announces each time that it compares the calls of waiting ranks.

    Users see nothing of a comparison without a deadlock, so its function is replaced.
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


def compute_until(released: list[bool]) -> None:
    """Compute in this frame, without a call, until there is something in the list."""
    while not released:
        pass


# HACK: a rank computes if its innermost frame is in torch's backward pass. No test can end a
# real pass when it wants to, so this function claims to be of torch's module.
compute_in_backward_pass = types.FunctionType(
    compute_until.__code__, {"__name__": "torch.autograd.graph"}
)


def reduce_in_other_orders(trainer: L.Trainer) -> None:
    """Reduce in two groups, in another order on each rank, beside a backward pass that lasts
    until the test releases the rank.
    """
    released: list[bool] = []

    def wait_for_release() -> None:
        hold()
        released.append(True)

    groups = [dist.new_group() for _ in range(2)]
    group, other = groups if trainer.global_rank == 0 else reversed(groups)
    reducing = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    threading.Thread(target=wait_for_release).start()
    compute_in_backward_pass(released)
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

    The first wait for it is overdue on rank 0, which looks for it; the second wait is not.
    Users see nothing of a search that finds the rank, so the delivery of rank 0's messages
    is replaced: it announces the begin and the end.
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
        ranks.output_of_all(processes.wait())
