"""`HangWatchdog` names the stuck rank and its place in training, whatever happened to
that rank.
"""

from __future__ import annotations

import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_ddp_ext import DDPExtStrategy, HangWatchdog
from lightning_ddp_ext.errors import RankHungError
from tests.harness.outcomes import Outcome
from tests.harness.ranks import RankProcesses, announce, hold, launch_ranks, run_ranks
from tests.harness.training import Batch, Kind, Net, data, make_strategy, make_trainer, stock_group
from tests.supervision import model as waiting
from tests.supervision.model import wait_for_ever

HERE = re.escape(__file__)
MODEL = re.escape(waiting.__file__)


def reduce_in_another_group() -> None:
    dist.all_reduce(torch.ones(1), group=Other.group)


def call_what_differs() -> None:
    """Rank 0 waits for rank 1's word that it is in its barrier, and rank 1 in a
    broadcast for rank 0's data.
    """
    if dist.get_rank() == 0:
        dist.barrier()
    else:
        dist.broadcast(torch.ones(2), src=0)


def hold_in_step() -> None:
    hold("stuck")


def announce_step() -> None:
    announce("in step")


def pause() -> None:
    threading.Event().wait(0.4)


class Other:
    group: Any = None


class Stuck(Net):
    """Hangs on one rank, or all (-1), at a place in its third step."""

    timeout = 3.0  # of the watchdog

    def __init__(
        self,
        place: str = "",
        hang: Callable[[], None] = wait_for_ever,
        rank: int = 1,
        **loader: Any,
    ) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 1))
        self.place = place
        self.hang = hang
        self.rank = rank
        self.loader = loader

    def at(self, place: str, index: int) -> None:
        if index == 2 and place == self.place and self.rank in (self.global_rank, -1):
            self.hang()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Samples(self), batch_size=2, **self.loader)

    def on_train_start(self) -> None:
        Other.group = (
            dist.new_group(list(range(self.trainer.world_size)))
            if self.trainer.world_size > 1
            else None
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        self.at("step", batch_idx)
        return self.loss(batch)


class Slow(Stuck):
    """Makes progress, but takes longer than the timeout for an epoch and for a
    validation.
    """

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        pause()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, index: int) -> None:
        pause()

    val_dataloader = Stuck.train_dataloader


class Samples(torch.utils.data.Dataset[Any]):
    def __init__(self, model: Stuck) -> None:
        self.model = model
        self.rows = data(30)
        self.read = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        if self.read % 2:  # of two in a batch
            self.model.at("dataset", self.read // 2)
        return self.rows[index]


def fit(
    rank: int,
    world_size: int,
    directory: Path,
    model: Stuck,
    *,
    kind: Kind = "ours",
    **options: Any,
) -> None:
    watchdog = HangWatchdog(model.timeout, options.pop("on_hang", "abort"), directory / "reports")
    strategy = make_strategy(kind, directory)
    if isinstance(strategy, DDPExtStrategy):
        timeouts = strategy.rendezvous.timeouts
        grace = {**timeouts.grace, "hung": 0.3}
        strategy.rendezvous.timeouts = replace(timeouts, answer=3.0, grace=grace)
    settings: dict[str, Any] = {
        "devices": world_size,
        "max_epochs": 1,
        "limit_val_batches": 0,
        **options,
    }
    with stock_group(rank, world_size, directory) if kind == "stock" else nullcontext():
        make_trainer(strategy, callbacks=[watchdog], **settings).fit(model)


def lines_of(outcomes: list[Outcome]) -> list[str]:
    return [
        line
        for each in outcomes
        for line in each.output.splitlines()
        if "no progress for 3 s:" in line
    ]


def expect_report(
    outcomes: list[Outcome], culprit: int, sentence: str, directory: Path, reports: int = 1
) -> str:
    """Every rank ends with an error that names the culprit, and one or each has printed
    it; returns the file.
    """
    assert [outcome.exit_code for outcome in outcomes] == [1] * len(outcomes), [
        each.story() for each in outcomes
    ]
    printed = lines_of(outcomes)
    assert len(printed) == reports, [each.story() for each in outcomes]
    who = rf"rank {culprit} \(host {re.escape(socket.gethostname())}, pid {outcomes[culprit].pid}\)"
    for line in printed:
        assert re.search(sentence.replace("WHO", who), line), line
    for each in outcomes:
        if each.error is not None:
            assert isinstance(each.error.exception, RankHungError), each.story()
            assert each.error.exception.rank == culprit
    written = [path.read_text() for path in (directory / "reports").iterdir()]
    assert len(written) == reports
    return written[0]


NEVER = r"WHO never entered all_reduce #\d+.*; it is in "


def test_a_stuck_rank_is_named(tmp_path: Path) -> None:
    """One line names its place and the collective in which the others wait; all end,
    and the file has all stacks.
    """
    model = Stuck("step", reduce_in_another_group)
    outcomes = launch_ranks(fit, 3, tmp_path, model)
    sentence = (
        rf"{NEVER}all_reduce #1 \[\[1\]\] of group .+, training_step, {HERE}:.*ranks 0, 2 waited"
        r" for it for"
    )
    written = expect_report(outcomes, 1, sentence, tmp_path)
    assert len(re.findall(r"^MainThread:", written, re.MULTILINE)) == 3
    assert re.search(rf'File "{HERE}", line \d+, in reduce_in_another_group', written)


def test_calls_that_differ_are_named(tmp_path: Path) -> None:
    """One line has both collectives, and the place of each in the user's code."""
    outcomes = launch_ranks(fit, 2, tmp_path, Stuck("step", call_what_differs, -1))
    sentence = (
        r"ranks are waiting for each other in different calls: WHO is in barrier #\d+,"
        rf" {HERE}:\d+; "
        rf"rank 1 .* is in broadcast #\d+ \[\[2\]\], {HERE}:\d+; make sure that every rank makes"
        r" the same calls"
    )
    expect_report(outcomes, 0, sentence, tmp_path)


def test_ranks_that_move_are_left_alone(tmp_path: Path) -> None:
    """An epoch or a validation may take any time."""
    outcomes = launch_ranks(fit, 2, tmp_path, Slow(), limit_val_batches=1.0)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes


class Streamed(Stuck):
    """Reads a stream, slowly in a resumed run."""

    is_slow = False

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(StreamedRows(self.is_slow), batch_size=2)


class StreamedRows(IterableDataset[Any]):
    def __init__(self, is_slow: bool) -> None:
        self.is_slow = is_slow

    def __iter__(self) -> Iterator[Any]:
        for number, row in enumerate(data(30)):
            if self.is_slow and number % 2:
                pause()
            yield row


def resume_slowly(rank: int, world_size: int, directory: Path) -> list[int]:
    """Return the number of steps before and after a resume that reads nine batches
    again.
    """
    steps = []
    path = str(directory / "nine.ckpt")
    for is_slow in (False, True):
        model = Streamed()
        model.is_slow = is_slow
        callbacks = [HangWatchdog(model.timeout, directory=directory / "reports")]
        options = {
            "callbacks": callbacks,
            "max_steps": 10 if is_slow else 9,
            "limit_val_batches": 0,
        }
        trainer = make_trainer(make_strategy("ours", directory), **options)
        trainer.fit(model, ckpt_path=path if is_slow else None)
        trainer.save_checkpoint(path)
        steps.append(trainer.global_step)
    return steps


def test_reading_a_stream_again_is_progress(tmp_path: Path) -> None:
    """A resumed run may take longer than the timeout until it is where the other run
    was.
    """
    assert run_ranks(resume_slowly, 2, tmp_path) == [[9, 10]] * 2
    assert not (tmp_path / "reports").exists()


def test_a_stuck_worker_of_a_loader_ends_with_its_rank(tmp_path: Path) -> None:
    """The worker itself would never check whether its rank still exists."""
    model = Stuck("dataset", num_workers=1, multiprocessing_context="fork")
    outcomes = launch_ranks(fit, 2, tmp_path, model)
    expect_report(outcomes, 1, f"{NEVER}train_dataloader_next, ", tmp_path)


@pytest.mark.nightly
def test_a_stopped_process_is_named(tmp_path: Path) -> None:
    """If it is rank 0, which collects reports, each of the others names it alone."""
    model = Stuck("step", announce_step, -1)
    with RankProcesses(fit, 3, tmp_path, model, max_epochs=-1) as ranks:
        for rank in range(3):
            ranks.wait_for("in step", rank)
        ranks.kill(0, signal.SIGSTOP)
        others = ranks.wait(1, 2)
    assert [outcome.exit_code for outcome in others] == [1, 1], [each.story() for each in others]
    who = rf"rank 0 \(host {re.escape(socket.gethostname())}, pid {ranks.pids[0]}\)"
    for outcome in others:
        (line,) = lines_of([outcome])
        assert re.search(rf"{who} has not answered for \d+ s; every rank stops\.", line), line


def test_a_rank_continues(tmp_path: Path) -> None:
    """With ``on_hang="continue"`` a rank that moves again trains to the end."""
    model = Stuck("dataset", hold_in_step)
    with RankProcesses(fit, 2, tmp_path, model, on_hang="continue") as ranks:
        ranks.wait_for("stuck", 1)
        ranks.wait_for_output("no progress for", 0)
        ranks.release(1)
        outcomes = ranks.wait()
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes
    assert re.search(
        r"train_dataloader_next.*the ranks continue \(on_hang='continue'\)", lines_of(outcomes)[0]
    )


def test_ranks_without_a_channel_report_on_themselves(tmp_path: Path) -> None:
    """Each rank reports on itself with a stock strategy, which has no channel, and with
    one rank.
    """
    (tmp_path / "one").mkdir()
    alone = launch_ranks(fit, 1, tmp_path / "one", Stuck("dataset", rank=0))
    place = rf"has made no progress for \d+ s; it is in train_dataloader_next, {MODEL}:\d+"
    expect_report(alone, 0, f"WHO {place}", tmp_path / "one")
    outcomes = launch_ranks(fit, 2, tmp_path, Stuck("dataset"), kind="stock")
    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    assert re.search(f"rank 1 .* {place}", outcomes[1].output)
    assert len(list((tmp_path / "reports").iterdir())) == 2
