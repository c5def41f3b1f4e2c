"""A call that some ranks do not make, or make too late, ends with an error that names
them.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext import DDPExtStrategy
from lightning_ddp_ext.errors import RankAbsentError, RankHungError
from tests.harness.outcomes import Outcome
from tests.harness.ranks import RankProcesses, announce, free_port, hold, launch_ranks, run_ranks
from tests.harness.training import (
    Batch,
    Net,
    backend,
    limit_collectives,
    make_strategy,
    make_trainer,
)

PLACE = r"\(.*test_lone_calls.py:\d+\)"


class SavesOn(L.Callback):
    """Saves after a step, on some ranks only."""

    def __init__(self, ranks: list[int], path: Path, step: int = 1) -> None:
        self.ranks = ranks
        self.path = path
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank in self.ranks and trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fitted(world_size: int, directory: Path, *callbacks: L.Callback) -> L.Trainer:
    strategy = make_strategy("ours", directory)
    trainer = make_trainer(strategy, devices=world_size, callbacks=[*callbacks], max_epochs=1)
    trainer.fit(Net())
    return trainer


def save_on(rank: int, world_size: int, directory: Path, ranks: list[int], step: int = 1) -> None:
    fitted(world_size, directory, SavesOn(ranks, directory / "it.ckpt", step))


def endings(function: Any, world_size: int, *args: Any) -> list[Outcome]:
    return launch_ranks(function, world_size, *args)


@pytest.mark.parametrize(("ranks", "absent"), [([2], "[01]"), ([0, 1], "2")])
def test_a_save_on_some_ranks_names_one_that_did_not_make_it(
    ranks: list[int], absent: str, tmp_path: Path
) -> None:
    """`trainer.save_checkpoint` under `if rank == 0` raises on all ranks immediately,
    instead of hanging.
    """
    for outcome in endings(save_on, 3, tmp_path, ranks):
        assert "RankAbsentError" in outcome.story()
        assert re.search(
            rf"began saving {tmp_path}/it.ckpt .*rank {absent} \(host .*make this call",
            outcome.story(),
        )


def test_a_save_after_the_last_step_names_the_rank_that_finished(tmp_path: Path) -> None:
    """The error also names a rank that finished without the call."""
    saving, _ = endings(save_on, 2, tmp_path, [0], 4)
    assert "rank 1 (host" in saving.failure.message


def save_between_two_calls(rank: int, world_size: int, directory: Path) -> None:
    trainer = fitted(world_size, directory)
    if trainer.is_global_zero:
        trainer.save_checkpoint(directory / "it.ckpt")
    trainer.test(trainer.lightning_module, verbose=False)


def test_a_save_on_one_rank_between_two_calls_is_named(tmp_path: Path) -> None:
    """The same holds after `fit`, while the others continue with the next call of the
    Trainer.
    """
    for outcome in endings(save_between_two_calls, 2, tmp_path):
        assert "RankAbsentError" in outcome.story()
        assert re.search(
            rf"rank 1 \(host .*?\) began broadcast from rank 0 {PLACE}", outcome.story()
        )
        assert re.search(rf"rank 0 \(host .*?\) began saving .*it.ckpt {PLACE}", outcome.story())


def at_barriers(rank: int, world_size: int, directory: Path, names: list[str]) -> None:
    trainer = fitted(world_size, directory, SavesOn([0, 1, 2], directory / "it.ckpt"))
    trainer.strategy.barrier("all")
    trainer.strategy.barrier(names[rank])


def test_ranks_in_different_barriers_raise_with_both_places(tmp_path: Path) -> None:
    """No rank waits for the others: each names every rank's call.

    Ranks that all save continue.
    """
    for outcome in endings(at_barriers, 3, tmp_path, ["data", "model", "data"]):
        assert outcome.failure.type_name == "RankAbsentError"
        assert re.search(rf"rank 1 .*? began barrier 'model' {PLACE}", outcome.failure.message)
        assert re.search(rf"rank [02] .*? began barrier 'data' {PLACE}", outcome.failure.message)
    run_ranks(at_barriers, 3, tmp_path, ["data"] * 3)
    assert (tmp_path / "it.ckpt").exists()


def late_at_a_barrier(rank: int, world_size: int, directory: Path, late: int) -> None:
    trainer = fitted(world_size, directory)
    limit_collectives(2.0)
    if rank == late:
        hold("elsewhere")
    trainer.strategy.barrier("end")


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_is_late_for_a_barrier_is_named(late: int, tmp_path: Path) -> None:
    """The waiting rank raises an error with its name, even if it is rank 0, which keeps
    the record.
    """
    with RankProcesses(late_at_a_barrier, 2, tmp_path, late) as ranks:
        (outcome,) = ranks.wait(1 - late)
    sentence = (
        rf"rank {1 - late} began barrier 'end' .*, but rank {late} \(host .*did not do so in time"
    )
    assert re.search(sentence, outcome.story())


# Without any callback, ranks that wait in vain name the rank that they waited for.


class Late(Net):
    """In its second step all ranks wait for the test, then some stay there in their own
    code.
    """

    def __init__(self, stay: Sequence[int] = (), in_group: bool = False) -> None:
        super().__init__()
        self.stay = stay
        self.in_group = in_group

    def training_step(self, batch: Batch, index: int) -> Tensor:
        if index == 1:
            hold("in step")
            limit_collectives(2.0)
            if self.global_rank in self.stay:
                hold("stays")
            if self.in_group:
                dist.all_reduce(torch.ones(1))
        return self.loss(batch)


class StoppedAtTheEnd(Net):
    """Rank 0 is stopped when the others only need it to reach the end."""

    def on_train_epoch_end(self) -> None:
        hold("in step")
        limit_collectives(2.0)
        if self.global_rank == 0:
            announce("at the end")
            os.kill(os.getpid(), signal.SIGSTOP)


def fit_late(
    rank: int, world_size: int, url: str, model: Net, max_epochs: int, *, over: str = "gloo"
) -> None:
    strategy = DDPExtStrategy(url, timeout=30, process_group_backend=backend(over))
    strategy.rendezvous.timeouts = replace(strategy.rendezvous.timeouts, answer=3.0)
    make_trainer(strategy, devices=world_size, max_epochs=max_epochs, limit_val_batches=0).fit(
        model
    )


def training(
    world_size: int, url: str, model: Net, max_epochs: int = -1, **options: Any
) -> RankProcesses:
    return RankProcesses(fit_late, world_size, url, model, max_epochs, **options)


def let_continue(ranks: RankProcesses, *, stopped: int | None = None) -> None:
    """Let the ranks leave "in step" together, and stop one of them before that."""
    for rank in ranks.pids:
        ranks.wait_for("in step", rank)
    if stopped is not None:
        ranks.kill(stopped, signal.SIGSTOP)
    for rank in ranks.pids:
        ranks.release(rank)


def expect(outcomes: list[Outcome], culprit: int, error: type[Exception], sentence: str) -> None:
    for outcome in outcomes:
        assert outcome.exit_code == 1, outcome.story()
        assert type(outcome.failure.exception) is error, outcome.story()
        assert outcome.failure.exception.rank == culprit
        assert re.search(sentence, str(outcome.failure.exception)), outcome.story()


SILENT = (
    r"^rank \d \(host .*, pid \d+\) has not answered for 3 s; "
    r"(rank \d has waited .*2 s|the connections of rank \d were closed in a collective); every rank"
    r" stops$"
)


def elsewhere(rank: int) -> str:
    return (
        rf"in a collective.*, but rank {rank} \(host .*, pid \d+\) is in .*rank_process.py:\d+;"
        r" make sure that"
    )


def test_a_stopped_process_is_named() -> None:
    """This holds for rank 0, which relays messages, and for a store that has stopped
    with it.
    """
    with training(3, f"tcp://127.0.0.1:{free_port()}", Late()) as ranks:
        let_continue(ranks, stopped=0)
        outcomes = ranks.wait(1, 2)
    expect(outcomes, 0, RankHungError, SILENT)


@pytest.mark.nightly
def test_ranks_wait_at_the_end_but_not_for_a_stopped_process(tmp_path: Path) -> None:
    """A rank may take any time there, but its process must reply."""
    with training(2, f"file://{tmp_path}/store", StoppedAtTheEnd(), max_epochs=1) as ranks:
        let_continue(ranks)
        ranks.wait_for("at the end", 0)
        outcomes = ranks.wait(1)
    expect(outcomes, 0, RankHungError, SILENT)


@pytest.mark.parametrize(
    ("in_group", "over"), [(True, "gloo"), (False, "nccl_stand_in")], ids=["all_reduce", "NCCL"]
)
def test_a_rank_that_does_something_else_is_named(
    in_group: bool, over: str, tmp_path: Path
) -> None:
    """The others name it with file and line, and later it does so itself, before
    torch's own limit for NCCL.
    """
    with training(3, f"file://{tmp_path}/store", Late([1], in_group), over=over) as ranks:
        let_continue(ranks)
        outcomes = ranks.wait(0, 2)
        ranks.release(1)
        outcomes += ranks.wait(1)
    expect(outcomes, 1, RankAbsentError, elsewhere(1))


def test_ranks_that_another_ones_timeout_has_released_are_not_taken_for_it(tmp_path: Path) -> None:
    """A rank whose wait timed out closes its connections, also to ranks that wait for
    the same rank.
    """
    with training(4, f"file://{tmp_path}/store", Late([0, 1, 3], in_group=True)) as ranks:
        let_continue(ranks)
        for rank in (0, 1):
            ranks.wait_for("stays", rank)
            ranks.release(rank)
        outcomes = ranks.wait(0, 1, 2)
        ranks.release(3)
        outcomes += ranks.wait(3)
    expect(outcomes, 3, RankAbsentError, elsewhere(3))
