"""Ranks that wait for each other in different calls raise an error with both calls; no
other wait does.
"""

import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_ddp_ext.supervision import status_table
from lightning_ddp_ext.supervision.status import Status
from tests.harness import ranks, training
from tests.harness.training import Linear, Net, Rows

PLACE = r"\S+/test_deadlocks\.py:\d+"


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


class EndsEarly(Linear):
    """Rank 1 ends the epoch before its second batch."""

    def on_train_batch_start(self, batch: training.Batch, index: int) -> int:
        return -1 if self.global_rank == 1 and index == 1 else 0


class LoggedOnRankZero(Linear):
    def training_step(self, batch: training.Batch, index: int) -> Tensor:
        if self.global_rank == 0:
            self.log("on_rank_0", 1.0, rank_zero_only=True)
        return super().training_step(batch, index)


class Run(NamedTuple):
    """What a rank trains."""

    model: L.LightningModule
    options: dict[str, Any]  # of the Trainer


def call_on_one_rank(
    hook: str, call: Callable[[L.Trainer], object], *, earlier: int = 0, caller: int = 0
) -> Run:
    """Let one rank make a call in a hook."""
    return Run(Linear(), {"callbacks": [training.At(hook, call, earlier=earlier, ranks=[caller])]})


def monitored_on_rank_0(callback: L.Callback) -> Run:
    return Run(LoggedOnRankZero(), {"callbacks": [callback], "enable_checkpointing": True})


def read_log_dir(trainer: L.Trainer) -> object:
    return trainer.log_dir


def stop(trainer: L.Trainer) -> None:
    trainer.should_stop = True


def gather(trainer: L.Trainer) -> object:
    return trainer.lightning_module.all_gather(torch.ones(2))


def different(call_of_rank_0: str, call_of_rank_1: str, remedy: str) -> str:
    """Return the sentence about ranks that wait in these calls."""
    rank_0, rank_1 = (
        rf"rank {rank} \(host \S+, pid \d+\) is in {call}, {PLACE}"
        for rank, call in enumerate((call_of_rank_0, call_of_rank_1))
    )
    return rf"ranks are waiting for each other in different calls: {rank_0}; {rank_1}; .*{remedy}"


# The calls in which ranks wait, as messages name them.
GRADIENTS = r"all_reduce #\d+ \[\[5\]\]"
FINAL_BARRIER = "the final barrier of the Trainer's run"
# What ranks train, and the sentence with the calls and the remedy.
DIFFERENT_CALLS = [
    pytest.param(
        call_on_one_rank("on_before_backward", read_log_dir, earlier=1),
        different("a broadcast from rank 0", GRADIENTS, r"such as trainer\.log_dir, on every rank"),
        id="log_dir in a step",
    ),
    *[
        pytest.param(
            call_on_one_rank(hook, read_log_dir),
            rf"rank 0 .*began a broadcast from rank 0 \({PLACE}\)",
            id=f"log_dir {hook}",
        )
        for hook in ("on_fit_start", "on_train_end")
    ],
    pytest.param(
        Run(
            Net(),
            {"max_epochs": 2, "callbacks": [training.At("on_train_epoch_end", stop, ranks=[1])]},
        ),
        different(
            r"all_gather #\d+ \[\[256\]\] of group \d+",  # of values that a step logs
            FINAL_BARRIER,
            r"if only some ranks set trainer\.should_stop",
        ),
        id="should_stop",
    ),
    pytest.param(
        Run(EndsEarly(), {"limit_val_batches": 0}),
        "or return -1 from on_train_batch_start, let every rank",
        id="an epoch that ends early",
    ),
    pytest.param(
        call_on_one_rank("on_train_batch_end", gather, earlier=1),
        different(
            r"all_gather #\d+ \[\[2\]\]",
            GRADIENTS,
            "make sure that every rank makes the same calls in the same order",
        ),
        id="callbacks",
    ),
    pytest.param(
        Run(Validating(), {"limit_val_batches": 5}),
        different(
            r"barrier #\d+", FINAL_BARRIER, r"if the ranks have different numbers of batches"
        ),
        id="no batch for a metric",
    ),
    *[
        pytest.param(
            monitored_on_rank_0(callback),
            rf"rank 0 .*began a decision of {type(callback).__name__} \({PLACE}\).*; log 'on_rank_0'"
            " on every rank",
            id=type(callback).__name__,
        )
        for callback in (
            ModelCheckpoint(monitor="on_rank_0", every_n_train_steps=1, save_top_k=2),
            EarlyStopping("on_rank_0", strict=False, check_on_train_epoch_end=True),
        )
    ],
]


def fit(rank: int, world_size: int, directory: Path, run: Run, *, seconds: float = 0.5) -> None:
    """Train; the ranks are compared after some seconds in a call."""
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


@pytest.mark.parametrize(("run", "sentence"), DIFFERENT_CALLS)
def test_ranks_in_different_calls_are_named(run: Run, sentence: str, tmp_path: Path) -> None:
    """Both ranks raise an error with the calls, their lines and a remedy, long before the
    timeout.
    """
    for outcome in ranks.launch_ranks(fit, 2, tmp_path, run):
        assert outcome.failure.type_name == "RankAbsentError", outcome.story()
        assert re.search(sentence, outcome.failure.message), outcome.story()


# A rank is busy until the test releases it.


def stay(*_: Any) -> None:
    ranks.hold("busy")


def enter_barrier(trainer: L.Trainer) -> None:
    trainer.strategy.barrier("apart")


# Rank 0 waits in a collective, rank 1 in a barrier, and rank 2 works.
APART = Run(
    Linear(),
    {
        "callbacks": [
            training.At("on_train_batch_end", do, ranks=[rank])
            for rank, do in enumerate((gather, enter_barrier, stay))
        ]
    },
)


def test_a_deadlock_is_named_while_a_rank_that_is_not_in_it_works(tmp_path: Path) -> None:
    """Two ranks that wait for each other do not wait until the third one needs them."""
    with ranks.RankProcesses(fit, 3, tmp_path, APART) as processes:
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


class SavesSlowly(TorchCheckpointIO):
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        stay()
        super().save_checkpoint(*args, **kwargs)


def save(trainer: L.Trainer) -> None:
    trainer.save_checkpoint(f"{trainer.default_root_dir}/it.ckpt")


def fit_and_announce(rank: int, world_size: int, directory: Path, run: Run) -> None:
    """Train; rank 0 announces each time that it compares statuses of waiting ranks."""
    find = status_table.deadlock_in

    def find_and_announce(statuses: Sequence[Status]) -> object:
        if statuses:
            ranks.announce("compared")
        return find(statuses)

    status_table.deadlock_in = find_and_announce
    fit(rank, world_size, directory, run, seconds=0.2)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(call_on_one_rank("on_train_batch_end", stay, earlier=1), id="a callback"),
        pytest.param(
            Run(
                Linear(),
                {
                    "callbacks": [training.At("on_train_batch_end", save, earlier=1)],
                    "plugins": [SavesSlowly()],
                },
            ),
            id="a long save",
        ),
        pytest.param(call_on_one_rank("setup", stay), id="work at the start"),
    ],
)
def test_a_rank_that_works_can_continue(run: Run, tmp_path: Path) -> None:
    """The other rank waits for it, however often it has the ranks compared."""
    with ranks.RankProcesses(fit_and_announce, 2, tmp_path, run) as processes:
        processes.wait_for("busy", 0)
        for _ in range(4):
            processes.wait_for("compared", 0)
        processes.release(0)
        outcomes = processes.wait()
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes[0].story()


def fit_and_look(rank: int, world_size: int, directory: Path) -> None:
    """Train; rank 1 is late at the end of training, and then at a barrier. Rank 0 announces
    when it looks for the late rank, and when it has looked; only the first wait is overdue.
    """
    table = status_table.StatusTable
    ask, answer, handle_look = table._ask, table._answer, table._handle_look

    def ask_once(self: Any, *args: Any, **kwargs: Any) -> None:
        ask(self, *args, **kwargs)
        training.limit_collectives(600)

    def answer_and_announce(self: Any, *args: Any) -> None:
        ranks.announce("looks")
        answer(self, *args)

    def handle_and_announce(self: Any, body: Any) -> None:
        handle_look(self, body)
        if not body["is_watched"]:
            ranks.announce("has looked")

    table._ask = ask_once
    table._answer = answer_and_announce
    table._handle_look = handle_and_announce
    callbacks = [
        training.At("on_train_end", lambda _: training.limit_collectives(0.2), ranks=[0]),
        training.At("on_train_end", stay, ranks=[1]),
        training.At("on_fit_end", stay, ranks=[1]),
        training.At("on_fit_end", enter_barrier),
    ]
    fit(rank, world_size, directory, Run(Linear(), {"callbacks": callbacks}), seconds=0.2)


def test_a_rank_that_arrives_while_it_is_looked_for_can_continue(tmp_path: Path) -> None:
    """It may be late again in the next call, whose wait has only begun."""
    with ranks.RankProcesses(fit_and_look, 2, tmp_path) as processes:
        processes.wait_for("busy", 1)
        processes.wait_for("looks", 0)
        processes.release(1)
        processes.wait_for("busy", 1)
        processes.wait_for("has looked", 0)
        processes.release(1)
        outcomes = processes.wait()
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes[0].story()


def test_a_stopped_process_can_continue(tmp_path: Path) -> None:
    """A process that SIGSTOP stopped and SIGCONT continued finishes, and so do the
    ranks that waited for it.
    """
    run = call_on_one_rank("on_train_batch_end", stay, earlier=1, caller=1)
    with ranks.RankProcesses(fit_and_announce, 2, tmp_path, run) as processes:
        processes.wait_for("busy", 1)
        processes.kill(1, signal.SIGSTOP)
        processes.release(1)
        for _ in range(2):
            processes.wait_for("compared", 0)
        processes.kill(1, signal.SIGCONT)
        outcomes = processes.wait()
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes[0].story()
