"""`HangWatchdog` names the stuck rank and its place in training, whatever happened to
that rank.
"""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_ddp_ext import DDPExtStrategy, HangWatchdog
from lightning_ddp_ext.errors import RankHungError
from tests.harness import ranks, training
from tests.harness.outcomes import Outcome, output_of_all
from tests.harness.training import Linear, Rows
from tests.supervision import model as supervision

HERE = re.escape(__file__)
HOST = re.escape(socket.gethostname())
WAITS_FOR_EVER = re.escape(supervision.__file__)
TIMEOUT = 3.0  # seconds, of the watchdog
# Two ranks share 32 samples in batches of two, so that an epoch or a validation has
# eight steps. With a pause in each it takes 3.2 s, which is longer than the timeout.
SAMPLES = 32
PAUSE = 0.4
STUCK_IN = 2  # the step or batch, counted from 0


def pause() -> None:
    threading.Event().wait(PAUSE)


class Quick(Linear):
    """Trains on few samples."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(training.data(SAMPLES), batch_size=2)


class StuckInStep(Quick):
    """In a step, rank 1 waits in another group than the other ranks."""

    def on_train_start(self) -> None:
        self.own_group = dist.new_group(list(range(self.trainer.world_size)))

    def training_step(self, batch: Any, index: int) -> Tensor:
        if self.global_rank == 1 and index == STUCK_IN:
            self.wait_in_own_group()
        return self.loss(batch)

    def wait_in_own_group(self) -> None:
        dist.all_reduce(torch.ones(1), group=self.own_group)


class StuckDataset(Dataset[Any]):
    """Blocks on one rank while it reads a batch."""

    def __init__(self, block: Callable[[], None], is_stuck: bool) -> None:
        self.block = block
        self.is_stuck = is_stuck
        self.rows = training.data(SAMPLES)
        self.batches = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if self.is_stuck and self.batches == STUCK_IN:
            self.block()
        self.batches += 1
        return [self.rows[index] for index in indices]


class StuckInLoader(Quick):
    """Blocks on one rank in its loader."""

    def __init__(
        self,
        rank: int = 1,
        block: Callable[[], None] = supervision.wait_for_ever,
        **loader: Any,
    ) -> None:
        super().__init__()
        self.rank = rank
        self.block = block
        self.loader = loader

    def train_dataloader(self) -> DataLoader[Any]:
        dataset = StuckDataset(self.block, self.global_rank == self.rank)
        return DataLoader(dataset, batch_size=2, **self.loader)


def hold_until_released() -> None:
    ranks.hold("stuck")


class Slow(Quick):
    """Makes progress, but takes longer than the timeout for an epoch and for a
    validation.
    """

    def training_step(self, batch: Any, index: int) -> Tensor:
        pause()
        return super().training_step(batch, index)

    def validation_step(self, batch: Any, index: int) -> None:
        pause()

    val_dataloader = Quick.train_dataloader


def fit(
    rank: int,
    world_size: int,
    directory: Path,
    model: Quick,
    *,
    on_hang: str = "abort",
    **options: Any,
) -> None:
    """Train with our strategy and a watchdog; a rank that is stuck exits soon."""
    watchdog = HangWatchdog(TIMEOUT, on_hang, directory / "reports")
    strategy = DDPExtStrategy(f"file://{directory}/store")
    timeouts = strategy.rendezvous.timeouts
    grace = {**timeouts.grace, "hung": 0.3}
    strategy.rendezvous.timeouts = replace(timeouts, answer=3.0, grace=grace)
    options = {"devices": world_size, "max_epochs": 1, "limit_val_batches": 0, **options}
    training.make_trainer(strategy, callbacks=[watchdog], **options).fit(model)


def fit_with_stock(rank: int, world_size: int, directory: Path, model: Quick) -> None:
    watchdog = HangWatchdog(TIMEOUT, directory=directory / "reports")
    with training.stock_group(rank, world_size, directory):
        training.fit(
            "stock",
            directory,
            model,
            watchdog,
            devices=world_size,
            max_epochs=1,
            limit_val_batches=0,
        )


def hang_reports(outcomes: list[Outcome]) -> list[str]:
    """Return the lines that the ranks have printed about a hang."""
    lines = [line for outcome in outcomes for line in outcome.output.splitlines()]
    return [line for line in lines if "no progress for 3 s:" in line]


def read_report(directory: Path) -> str:
    (path,) = (directory / "reports").iterdir()
    return path.read_text()


def assert_reported(outcomes: list[Outcome], culprit: int, sentence: str) -> None:
    """Assert that one rank printed a sentence that begins with the culprit, and that
    every rank failed with an error that names the culprit.
    """
    output_of_all(outcomes, exit_code=1)
    who = rf"rank {culprit} \(host {HOST}, pid {outcomes[culprit].pid}\)"
    (line,) = hang_reports(outcomes)
    assert re.search(f"{who}{sentence}", line)
    for outcome in outcomes:
        if outcome.error is not None:  # otherwise the rank could not be interrupted
            error = outcome.error.exception
            assert isinstance(error, RankHungError), outcome.story()
            assert error.rank == culprit


NEVER_ENTERED = r" never entered all_reduce #\d+.*; it is in "


def test_a_stuck_rank_is_named(tmp_path: Path) -> None:
    """One line names its place and the collective in which the others wait; all end,
    and the file has all stacks.
    """
    outcomes = ranks.launch_ranks(fit, 3, tmp_path, StuckInStep())
    call = r"all_reduce #1 \[\[1\]\] of group .+"
    place = rf"{call}, training_step, {HERE}:.*ranks 0, 2 waited for it for"
    assert_reported(outcomes, 1, f"{NEVER_ENTERED}{place}")
    report = read_report(tmp_path)
    assert len(re.findall(r"^MainThread:", report, re.MULTILINE)) == 3
    assert re.search(rf'File "{HERE}", line \d+, in wait_in_own_group', report)


def test_ranks_that_move_are_left_alone(tmp_path: Path) -> None:
    """An epoch or a validation may take any time."""
    outcomes = ranks.launch_ranks(fit, 2, tmp_path, Slow(), limit_val_batches=1.0)
    assert hang_reports(outcomes) == []
    output_of_all(outcomes, exit_code=0)


class SlowRows(Rows):
    """Makes a pause before each batch of two rows."""

    def __iter__(self) -> Iterator[Any]:
        for number, row in enumerate(super().__iter__()):
            if number % 2 == 0:
                pause()
            yield row


def train_on_stream(directory: Path, max_steps: int, path: Path | None, rows: Rows) -> None:
    watchdog = HangWatchdog(TIMEOUT, directory=directory / "reports")
    trainer = training.make_trainer(
        training.make_strategy("ours", directory),
        callbacks=[watchdog],
        max_steps=max_steps,
        limit_val_batches=0,
    )
    trainer.fit(Quick(), DataLoader(rows, batch_size=2), ckpt_path=path)
    trainer.save_checkpoint(directory / f"{trainer.global_step}.ckpt")


def resume_slowly(rank: int, world_size: int, directory: Path) -> None:
    """Resume after nine steps, whose batches are read again in 9 * 0.4 = 3.6 s."""
    train_on_stream(directory, 9, None, Rows(SAMPLES))
    train_on_stream(directory, 10, directory / "9.ckpt", SlowRows(SAMPLES))


def test_reading_a_stream_again_is_progress(tmp_path: Path) -> None:
    """A resumed run may take longer than the timeout until it is where the other run
    was.
    """
    ranks.run_ranks(resume_slowly, 2, tmp_path)
    assert (tmp_path / "10.ckpt").exists()
    assert not (tmp_path / "reports").exists()


def test_a_stuck_worker_of_a_loader_ends_with_its_rank(tmp_path: Path) -> None:
    """The worker itself would never check whether its rank still exists."""
    model = StuckInLoader(num_workers=1, multiprocessing_context="fork")
    outcomes = ranks.launch_ranks(fit, 2, tmp_path, model)
    assert_reported(outcomes, 1, f"{NEVER_ENTERED}train_dataloader_next, ")


def test_a_rank_continues(tmp_path: Path) -> None:
    """With ``on_hang="continue"`` a rank that moves again trains to the end."""
    model = StuckInLoader(block=hold_until_released)
    with ranks.RankProcesses(fit, 2, tmp_path, model, on_hang="continue") as processes:
        processes.wait_for("stuck", 1)
        processes.wait_for_output("no progress for", 0)
        processes.release(1)
        outcomes = processes.wait()
    output_of_all(outcomes, exit_code=0)
    sentence = r"train_dataloader_next.*the ranks continue \(on_hang='continue'\)"
    assert re.search(sentence, hang_reports(outcomes)[0])


STUCK_IN_LOADER = (
    rf" has made no progress for \d+ s; it is in train_dataloader_next, {WAITS_FOR_EVER}:\d+"
)


def test_a_single_rank_reports_on_itself(tmp_path: Path) -> None:
    """A rank without others, and so without a channel, prints and writes a report."""
    outcomes = ranks.launch_ranks(fit, 1, tmp_path, StuckInLoader(rank=0))
    assert_reported(outcomes, 0, STUCK_IN_LOADER)
    assert "MainThread:" in read_report(tmp_path)


def test_ranks_of_a_stock_strategy_report_on_themselves(tmp_path: Path) -> None:
    """Without a channel, each rank of stock ``ddp`` writes its own file."""
    outcomes = ranks.launch_ranks(fit_with_stock, 2, tmp_path, StuckInLoader())
    output_of_all(outcomes, exit_code=1)
    assert re.search(f"rank 1 .*{STUCK_IN_LOADER}", outcomes[1].output)
    assert len(list((tmp_path / "reports").iterdir())) == 2


class BarrierBehindStuckRank(Quick):
    """In a step, rank 1 blocks, and the other ranks wait for it in a barrier."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        if index == STUCK_IN:
            if self.global_rank == 1:
                supervision.wait_for_ever()
            self.trainer.strategy.barrier()
        return self.loss(batch)


def test_a_rank_that_waits_in_a_barrier_is_reported_there(tmp_path: Path) -> None:
    """The report names the strategy's call, not the hook around it."""
    outcomes = ranks.launch_ranks(fit, 2, tmp_path, BarrierBehindStuckRank())
    assert_reported(outcomes, 1, r" has made no progress for \d+ s; it is in training_step, ")
    assert re.search(rf"rank 0 .* last progress .*, in barrier, {HERE}:", read_report(tmp_path))


class StuckBeforeFinalBarrier(Quick):
    """After the last step, rank 1 blocks, and the others wait in the final barrier.

    There, they ask every second whether all ranks still reply.
    """

    def on_train_end(self) -> None:
        training.limit_collectives(1.0)
        if self.global_rank == 1:
            supervision.wait_for_ever()


def test_a_rank_that_others_ask_for_replies_is_still_stuck(tmp_path: Path) -> None:
    """Replies to a rank that waits in the final barrier are not progress."""
    outcomes = ranks.launch_ranks(fit, 2, tmp_path, StuckBeforeFinalBarrier())
    assert_reported(outcomes, 1, r" has made no progress for \d+ s; it is in on_train_end, ")
