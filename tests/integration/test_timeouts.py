"""Without any callback, ranks that wait in vain name the rank that they waited for."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext import DDPExtStrategy
from lightning_ddp_ext.errors import RankAbsentError, RankHungError
from tests.harness.outcomes import Outcome
from tests.harness.ranks import RankProcesses, announce, by_hand_env, free_port, hold
from tests.harness.training import Batch, Net, backend, limit_collectives, make_trainer


class Late(Net):
    """In its second step all ranks wait for the test, then some stay there in their own code."""

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


def fit(rank: int, world_size: int, url: str, model: Net, max_epochs: int, *, over: str = "gloo") -> None:
    strategy = DDPExtStrategy(url, timeout=30, process_group_backend=backend(over))
    strategy.rendezvous.timeouts = replace(strategy.rendezvous.timeouts, answer=3.0)
    make_trainer(strategy, devices=world_size, max_epochs=max_epochs, limit_val_batches=0).fit(model)


def training(world_size: int, url: str, model: Net, max_epochs: int = -1, **options: Any) -> RankProcesses:
    return RankProcesses(fit, world_size, url, model, max_epochs, env=by_hand_env(world_size), **options)


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
        assert outcome.error is not None, outcome.story()
        assert type(outcome.error.exception) is error, outcome.story()
        assert outcome.error.exception.rank == culprit
        assert re.search(sentence, str(outcome.error.exception)), outcome.story()


SILENT = (
    r"^rank \d \(host .*, pid \d+\) has not answered for 3 s, and its process is stopped \(SIGSTOP\); "
    r"(rank \d has waited .*2 s|the connections of rank \d were closed in a collective); every rank stops$"
)


def elsewhere(rank: int) -> str:
    return rf"in a collective.*, but rank {rank} \(host .*, pid \d+\) is in .*rank_process.py:\d+; make sure that"


def test_a_stopped_process_is_named() -> None:
    """This holds for rank 0, which relays messages, and for a store that has stopped with it."""
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


@pytest.mark.parametrize(("in_group", "over"), [(True, "gloo"), (False, "nccl_stand_in")], ids=["all_reduce", "NCCL"])
def test_a_rank_that_does_something_else_is_named(in_group: bool, over: str, tmp_path: Path) -> None:
    """The others name it with file and line, and later it does so itself, before torch's own limit for NCCL."""
    with training(3, f"file://{tmp_path}/store", Late([1], in_group), over=over) as ranks:
        let_continue(ranks)
        outcomes = ranks.wait(0, 2)
        ranks.release(1)
        outcomes += ranks.wait(1)
    expect(outcomes, 1, RankAbsentError, elsewhere(1))


def test_ranks_that_another_ones_timeout_has_released_are_not_taken_for_it(tmp_path: Path) -> None:
    """A rank whose wait timed out closes its connections, also to ranks that wait for the same rank."""
    with training(4, f"file://{tmp_path}/store", Late([0, 1, 3], in_group=True)) as ranks:
        let_continue(ranks)
        for rank in (0, 1):
            ranks.wait_for("stays", rank)
            ranks.release(rank)
        outcomes = ranks.wait(0, 1, 2)
        ranks.release(3)
        outcomes += ranks.wait(3)
    expect(outcomes, 3, RankAbsentError, elsewhere(3))
