"""`HangWatchdog` in training: which rank is stuck, and where, whatever has become of it."""

from __future__ import annotations

import re
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ddp_ext.errors import DurationError, OptionError, RankHungError
from tests.harness.outcomes import Outcome
from tests.harness.ranks import RankProcesses, announce, by_hand_env, free_port, hold, launch_ranks
from tests.harness.training import Batch, Kind, Net, data, make_strategy, make_trainer, stock_group

HERE = re.escape(__file__)
Hang = Callable[[], None]


def wait_for_ever() -> None:
    threading.Event().wait()


def reduce_in_another_group() -> None:
    dist.all_reduce(torch.ones(1), group=Other.group)


def hold_in_step() -> None:
    hold("stuck")


def announce_step() -> None:
    announce("in step")


class Other:
    group: Any = None


class Stuck(Net):
    """Hangs on one rank at a place, in its third step."""

    def __init__(self, place: str = "", hang: Hang = wait_for_ever, rank: int = 1, **loader: Any) -> None:
        super().__init__()
        self.loader = loader
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 1))
        self.place = place
        self.hang = hang
        self.rank = rank

    def at(self, place: str) -> None:
        if place == self.place and self.rank in (self.global_rank, -1):
            self.hang()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Samples(self), batch_size=2, **self.loader)

    def on_train_start(self) -> None:
        Other.group = dist.new_group(list(range(self.trainer.world_size))) if self.trainer.world_size > 1 else None

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if batch_idx == 2:
            self.at("callback")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            self.at("step")
        return self.loss(batch)


class Samples(torch.utils.data.Dataset[Any]):
    def __init__(self, model: Stuck) -> None:
        self.model = model
        self.rows = data(30)
        self.read = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        if self.read == 5:
            self.model.at("dataset")
        return self.rows[index]


def fit(
    rank: int,
    world_size: int,
    directory: Path,
    model: Stuck,
    *,
    kind: Kind = "ours",
    url: str = "",
    max_epochs: int = 1,
    **options: Any,
) -> None:
    from lightning_ddp_ext import DDPExtStrategy, HangWatchdog

    watchdog = HangWatchdog(timeout=1, directory=directory / "verdicts", **options)
    strategy = DDPExtStrategy(url) if url else make_strategy(kind, directory)
    if isinstance(strategy, DDPExtStrategy):
        grace = {**strategy.timeouts.grace, "hung": 0.3}
        strategy.timeouts = replace(strategy.timeouts, answer=1.0, grace=grace)
    settings: dict[str, Any] = {"devices": world_size, "max_epochs": max_epochs, "limit_val_batches": 0}
    make_trainer(strategy, callbacks=[watchdog], **settings).fit(model)


def fit_stock(rank: int, world_size: int, directory: Path, model: Stuck) -> None:
    with stock_group(rank, world_size, directory):
        fit(rank, world_size, directory, model, kind="stock")


def expect_verdict(outcomes: list[Outcome], culprit: int, sentence: str, directory: Path, verdicts: int = 1) -> str:
    """Every rank ends with an error that names the culprit, and one has printed the verdict; returns the file."""
    assert [outcome.exit_code for outcome in outcomes] == [1] * len(outcomes), [each.story() for each in outcomes]
    printed = [line for each in outcomes for line in each.output.splitlines() if "nothing has moved for 1 s:" in line]
    assert len(printed) == verdicts, [each.story() for each in outcomes]
    who = rf"rank {culprit} \(host {re.escape(socket.gethostname())}, pid {outcomes[culprit].pid}\)"
    for line in printed:
        assert re.search(sentence.replace("WHO", who), line), line
    for each in outcomes:
        if each.error is not None:
            assert isinstance(each.error.exception, RankHungError), each.story()
            assert each.error.exception.rank == culprit
    (first, *more) = (directory / "verdicts").iterdir()
    assert len(more) == verdicts - 1
    return first.read_text()


PLACES = [
    ("dataset", wait_for_ever, rf"WHO never entered all_reduce #\d+.*; it is in train_dataloader_next, {HERE}:\d+; "),
    ("callback", wait_for_ever, rf"WHO never entered all_reduce #\d+.*; it is in on_train_batch_start, {HERE}:\d+; "),
    (
        "step",
        reduce_in_another_group,
        rf"WHO never entered all_reduce #\d+.*; it is in all_reduce #1 \[\[1\]\] of group .+, training_step, {HERE}:",
    ),
]


@pytest.mark.parametrize(("place", "hang", "sentence"), PLACES, ids=[place for place, _, _ in PLACES])
def test_a_stuck_rank_is_named(place: str, hang: Hang, sentence: str, tmp_path: Path) -> None:
    """One verdict says where it is and which collective the others wait in; all end, and the file has all stacks."""
    outcomes = launch_ranks(fit, 3, tmp_path, Stuck(place, hang), env=by_hand_env(3))
    written = expect_verdict(outcomes, 1, sentence + ".*ranks 0, 2 have waited for it for", tmp_path)
    assert len(re.findall(r"^MainThread:", written, re.MULTILINE)) == 3
    assert re.search(rf'File "{HERE}", line \d+, in {hang.__name__}', written)


@pytest.mark.parametrize(("stopped", "store"), [(1, "file"), (0, "file"), (0, "tcp")])
def test_a_stopped_process_is_named(stopped: int, store: str, tmp_path: Path) -> None:
    """By the others; if it is rank 0, each of them names it alone. It is continued so that it ends, too."""
    url = f"tcp://127.0.0.1:{free_port()}" if store == "tcp" else f"file://{tmp_path}/store"
    model = Stuck("step", announce_step, -1)
    with RankProcesses(fit, 3, tmp_path, model, url=url, max_epochs=-1, env=by_hand_env(3)) as ranks:
        for rank in range(3):
            ranks.wait_for("in step", rank)
        ranks.kill(stopped, signal.SIGSTOP)
        outcomes = ranks.wait()
    sentence = r"WHO has not answered for \d+ s and its process is stopped \(SIGSTOP\); rank \d has been in "
    expect_verdict(outcomes, stopped, sentence, tmp_path, verdicts=2 if stopped == 0 else 1)


def test_a_stuck_worker_of_a_loader_ends_with_its_rank(tmp_path: Path) -> None:
    """It would never look whether the rank is still there."""
    model = Stuck("dataset", num_workers=1, multiprocessing_context="fork")
    outcomes = launch_ranks(fit, 2, tmp_path, model, env=by_hand_env(2))
    expect_verdict(outcomes, 1, r"WHO never entered all_reduce #\d+.*; it is in train_dataloader_next, ", tmp_path)


def test_going_on(tmp_path: Path) -> None:
    """With ``on_hang="continue"`` a rank that moves again trains to the end."""
    model = Stuck("dataset", hold_in_step)
    with RankProcesses(fit, 2, tmp_path, model, on_hang="continue", env=by_hand_env(2)) as ranks:
        ranks.wait_for("stuck", 1)
        ranks.wait_for_output("nothing has moved", 0)
        ranks.release(1)
        outcomes = ranks.wait()
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes
    line, *_ = [line for outcome in outcomes for line in outcome.output.splitlines() if "nothing has moved" in line]
    assert "train_dataloader_next" in line
    assert "going on, as was asked for" in line


def test_stock_strategies(tmp_path: Path) -> None:
    """Without a channel each rank reports where it is itself, and ends."""
    outcomes = launch_ranks(fit_stock, 2, tmp_path, Stuck("dataset"), env=by_hand_env(2))
    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    assert re.search(rf"rank 1 .* has not moved for 1 s; it is in train_dataloader_next, {HERE}:", outcomes[1].output)
    assert len(list((tmp_path / "verdicts").iterdir())) == 2


def test_one_rank_reports_itself(tmp_path: Path) -> None:
    """With nobody to ask it is named all the same."""
    outcomes = launch_ranks(fit, 1, tmp_path, Stuck("dataset", rank=0), env=by_hand_env(1))
    expect_verdict(outcomes, 0, rf"WHO has not moved for 1 s; it is in train_dataloader_next, {HERE}:\d+", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"timeout": 0}, DurationError, "timeout must be a positive number of seconds"),
        ({"timeout": 9, "on_hang": "stop"}, OptionError, "on_hang must be 'abort' or 'continue' (got 'stop')"),
        ({"timeout": 9, "directory": "s3://a"}, OptionError, "directory must be on a local file system (got 's3://a')"),
    ],
)
def test_arguments_that_cannot_work(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """They are refused when the callback is made."""
    from lightning_ddp_ext import HangWatchdog

    with pytest.raises(error, match=re.escape(message)):
        HangWatchdog(**arguments)
