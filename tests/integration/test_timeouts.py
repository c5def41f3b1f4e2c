"""Ranks that wait in vain: without any callback, the one that they have waited for is named."""

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
from tests.harness.training import Batch, Net, make_trainer


class Late(Net):
    """In its second step one rank stays in code of its own, and all say that they are there."""

    def __init__(self, stays: int | None = None, in_group: bool = False, late: Sequence[int] = ()) -> None:
        super().__init__()
        self.stays = stays
        self.in_group = in_group
        self.late = late

    def training_step(self, batch: Batch, index: int) -> Tensor:
        if index == 1:
            announce("in step")
            if self.stays == self.global_rank:
                hold("stays")
            if self.global_rank in self.late:
                hold("late")
            if self.in_group:
                dist.all_reduce(torch.ones(1))
        return self.loss(batch)


def fit(rank: int, world_size: int, url: str, model: Net, max_epochs: int = -1) -> None:
    strategy = DDPExtStrategy(url, timeout=2)
    strategy.timeouts = replace(strategy.timeouts, answer=1.0)
    settings: dict[str, Any] = {"devices": world_size, "max_epochs": max_epochs, "limit_val_batches": 0}
    make_trainer(strategy, **settings).fit(model)


def expect(outcomes: list[Outcome], culprit: int, error: type[Exception], sentence: str) -> None:
    for outcome in outcomes:
        assert outcome.exit_code == 1, outcome.story()
        assert outcome.error is not None, outcome.story()
        assert type(outcome.error.exception) is error, outcome.story()
        assert outcome.error.exception.rank == culprit
        assert re.search(sentence, str(outcome.error.exception)), outcome.story()


SILENT = (
    r"^rank \d \(host .*, pid \d+\) has not answered for 1 s and its process is stopped \(SIGSTOP\); "
    r"(rank \d has waited .*2 s|the connections of rank \d were closed in a collective); every rank stops$"
)


@pytest.mark.parametrize(("stopped", "store"), [(1, "file"), (0, "file"), (0, "tcp")])
def test_a_stopped_process_is_named(stopped: int, store: str, tmp_path: Path) -> None:
    """Also if it is rank 0, through which the others talk, and if their store has stopped with it."""
    url = f"tcp://127.0.0.1:{free_port()}" if store == "tcp" else f"file://{tmp_path}/store"
    with RankProcesses(fit, 3, url, Late(), env=by_hand_env(3)) as ranks:
        for rank in range(3):
            ranks.wait_for("in step", rank)
        ranks.kill(stopped, signal.SIGSTOP)
        outcomes = ranks.wait(*({0, 1, 2} - {stopped}))
        ranks.kill(stopped)
        ranks.wait()
    expect(outcomes, stopped, RankHungError, SILENT)


class Last(Net):
    """One rank is stopped when all others need no more of it than that it comes to the end."""

    def on_train_epoch_end(self) -> None:
        if self.global_rank == 0:
            announce("at the end")
            os.kill(os.getpid(), signal.SIGSTOP)


def test_ranks_wait_at_the_end_but_not_for_a_stopped_process(tmp_path: Path) -> None:
    """However long a rank takes there: it must answer."""
    with RankProcesses(fit, 2, f"file://{tmp_path}/store", Last(), 1, env=by_hand_env(2)) as ranks:
        ranks.wait_for("at the end", 0)
        outcomes = ranks.wait(1)
        ranks.kill(0)
        ranks.wait()
    expect(outcomes, 0, RankHungError, SILENT)


@pytest.mark.parametrize("in_group", [True, False], ids=["all_reduce", "backward"])
def test_a_rank_that_does_something_else_is_named(in_group: bool, tmp_path: Path) -> None:
    """With file and line, on itself as well, once it is done with that."""
    with RankProcesses(fit, 3, f"file://{tmp_path}/store", Late(1, in_group), env=by_hand_env(3)) as ranks:
        outcomes = ranks.wait(0, 2)
        ranks.release(1)
        outcomes += ranks.wait(1)
    where = r"rank 1 \(host .*, pid \d+\) is in .*rank_process.py:\d+"
    sentence = rf"in a collective.*, and {where}; let every rank"
    expect(outcomes, 1, RankAbsentError, sentence)


def test_ranks_that_another_ones_timeout_has_released_are_not_taken_for_it(tmp_path: Path) -> None:
    """A rank that has waited long enough closes its connections, also to those that wait for the same one."""
    model = Late(3, in_group=True, late=(0, 1))
    with RankProcesses(fit, 4, f"file://{tmp_path}/store", model, env=by_hand_env(4)) as ranks:
        ranks.wait_for("in step", 2)
        for rank in (0, 1):
            ranks.wait_for("late", rank)
            ranks.release(rank)
        outcomes = ranks.wait(0, 1, 2)
        ranks.release(3)
        outcomes += ranks.wait(3)
    where = r"rank 3 \(host .*, pid \d+\) is in .*rank_process.py:\d+"
    expect(outcomes, 3, RankAbsentError, rf"in a collective.*, and {where}; let every rank")
