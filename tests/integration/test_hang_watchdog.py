"""`HangWatchdog` names the stuck rank and its place in training, whatever happened to
that rank.
"""

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_ddp_ext import HangWatchdog
from lightning_ddp_ext.errors import RankHungError
from tests.harness import rank_process, ranks, training
from tests.harness.ranks import Outcome, output_of_all
from tests.harness.training import Linear, Rows
from tests.supervision import model as supervision

TIMEOUT = 3.0  # seconds, of the watchdog
# Two ranks share 32 samples in batches of two, so that an epoch or a validation has
# eight steps. With a pause in each it takes 3.2 s, which is longer than the timeout.
SAMPLES = 32
PAUSE = 0.4
STUCK_IN = 2  # the step or batch, counted from 0


def pause() -> None:
    threading.Event().wait(PAUSE)


class Quick(Linear):
    """Trains on few samples; in subclasses, one rank gets stuck."""

    stuck_rank = 1

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(training.data(SAMPLES), batch_size=2)


class StuckInStep(Quick):
    """In a step, ``stuck_rank`` waits in another group than the other ranks."""

    def on_train_start(self) -> None:
        self.own_group = dist.new_group(list(range(self.trainer.world_size)))

    def training_step(self, batch: Any, index: int) -> Tensor:
        if self.global_rank == self.stuck_rank and index == STUCK_IN:
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
    """``stuck_rank`` blocks in its loader."""

    def __init__(
        self,
        stuck_rank: int = 1,
        block: Callable[[], None] = supervision.wait_for_ever,
        **loader: Any,
    ) -> None:
        super().__init__()
        self.stuck_rank = stuck_rank
        self.block = block
        self.loader = loader

    def train_dataloader(self) -> DataLoader[Any]:
        dataset = StuckDataset(self.block, self.global_rank == self.stuck_rank)
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


def watchdog(directory: Path, on_hang: Literal["abort", "continue"] = "abort") -> HangWatchdog:
    return HangWatchdog(TIMEOUT, on_hang, directory / "reports")


def fit(
    rank: int,
    world_size: int,
    directory: Path,
    model: Quick,
    on_hang: Literal["abort", "continue"] = "abort",
) -> None:
    """Train for an epoch; a rank that nothing unblocks exits soon after the report."""
    grace = {"hung": 0.3} if rank == model.stuck_rank else {}
    supervision.fit(
        rank, world_size, directory, watchdog(directory, on_hang), net=model, grace=grace
    )


def hang_reports(outcomes: list[Outcome]) -> list[str]:
    """Return the lines that the ranks have printed about a hang."""
    lines = [line for outcome in outcomes for line in outcome.output.splitlines()]
    return [line for line in lines if f"no progress for {TIMEOUT:g} s: " in line]


def read_report(directory: Path) -> str:
    (path,) = (directory / "reports").iterdir()
    return path.read_text()


def pattern(text: str) -> str:
    """Return a regular expression for a text in which ``<n>`` stands for any number."""
    return re.escape(text).replace("<n>", r"\d+")


def assert_printed(
    outcomes: list[Outcome], culprit: Outcome, finding: str, ending: str = "every rank stops"
) -> None:
    """Assert that one rank printed one line about the hang, with this finding about the
    culprit.
    """
    who = ranks.rank_name(culprit.rank, culprit.pid)
    expected = f"[rank <n>] no progress for {TIMEOUT:g} s: {who} {finding}; {ending}. Stacks: "
    (line,) = hang_reports(outcomes)
    assert re.match(pattern(expected), line), line


def assert_stopped(outcomes: list[Outcome], culprit: int, finding: str) -> None:
    """Assert that a line with this finding about the culprit was printed, and that all
    ranks exited: the others with an error that names the culprit.
    """
    output_of_all(outcomes, exit_code=1)
    assert_printed(outcomes, outcomes[culprit], finding)
    for outcome in outcomes:
        if outcome.rank != culprit or outcome.error is not None:
            error = outcome.failure.exception
            assert isinstance(error, RankHungError), outcome.story()
            assert error.rank == culprit


def test_a_stuck_rank_is_named(tmp_path: Path) -> None:
    """One line names its place and the collective in which the others wait; all end,
    and the file has all stacks.
    """
    outcomes = ranks.launch_ranks(fit, 3, tmp_path, StuckInStep())
    assert_stopped(
        outcomes,
        1,
        "never entered all_reduce #<n> [[5]]; it is in all_reduce #1 [[1]] of group <n>,"
        f" training_step, {__file__}:<n>; ranks 0, 2 waited for it for <n> s",
    )
    report = read_report(tmp_path)
    assert len(re.findall(r"^MainThread:", report, re.MULTILINE)) == 3
    assert re.search(pattern(f'File "{__file__}", line <n>, in wait_in_own_group'), report)


def test_ranks_that_move_are_left_alone(tmp_path: Path) -> None:
    """Ranks that finish steps are not reported, however long an epoch or a validation
    takes.
    """
    outcomes = ranks.launch_ranks(fit, 2, tmp_path, Slow())
    assert hang_reports(outcomes) == []
    output_of_all(outcomes, exit_code=0)


class SlowRows(Rows):
    """Makes a pause before each batch of two rows."""

    def __iter__(self) -> Iterator[Any]:
        for number, row in enumerate(super().__iter__()):
            if number % 2 == 0:
                pause()
            yield row


class OnStream(Quick):
    """Trains on a slow stream."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(SlowRows(SAMPLES), batch_size=2)


def resume_slowly(rank: int, world_size: int, directory: Path) -> int:
    """Resume after nine steps, whose batches are read again in 9 * 0.4 = 3.6 s; return
    the number of steps.
    """
    path = directory / "9.ckpt"
    first = training.fit("ours", directory, OnStream(), max_steps=9)
    first.save_checkpoint(path)
    resumed = training.fit(
        "ours", directory, OnStream(), watchdog(directory), ckpt_path=path, max_steps=10
    )
    return resumed.global_step


def test_reading_a_stream_again_is_progress(tmp_path: Path) -> None:
    """A resumed run may take longer than the timeout until it is where the other run
    was.
    """
    assert ranks.run_ranks(resume_slowly, 2, tmp_path) == [10, 10]
    assert not (tmp_path / "reports").exists()


def test_a_stuck_worker_of_a_loader_ends_with_its_rank(tmp_path: Path) -> None:
    """The rank that waits for the worker is named, and leaves no process behind."""
    model = StuckInLoader(num_workers=1, multiprocessing_context="fork")
    outcomes = ranks.launch_ranks(fit, 2, tmp_path, model)
    assert_stopped(
        outcomes,
        1,
        "never entered all_reduce #<n> [[5]]; it is in train_dataloader_next,"
        f" {supervision.__file__}:<n>; rank 0 waited for it for <n> s",
    )


def test_a_rank_continues(tmp_path: Path) -> None:
    """With ``on_hang="continue"`` a rank that moves again trains to the end."""
    model = StuckInLoader(block=hold_until_released)
    with ranks.RankProcesses(fit, 2, tmp_path, model, on_hang="continue") as processes:
        processes.wait_for("stuck", 1)
        processes.wait_for_output("no progress for", 0)
        processes.release(1)
        outcomes = processes.wait()
    output_of_all(outcomes, exit_code=0)
    assert_printed(
        outcomes,
        outcomes[1],
        "never entered all_reduce #<n> [[5]]; it is in train_dataloader_next,"
        f" {rank_process.__file__}:<n>; rank 0 waited for it for <n> s",
        "the ranks continue (on_hang='continue')",
    )


def test_a_single_rank_reports_on_itself(tmp_path: Path) -> None:
    """A run of one rank prints and writes a report, and exits."""
    outcomes = ranks.launch_ranks(fit, 1, tmp_path, StuckInLoader(stuck_rank=0))
    assert_stopped(
        outcomes,
        0,
        "has made no progress for <n> s; it is in train_dataloader_next,"
        f" {supervision.__file__}:<n>",
    )
    assert "MainThread:" in read_report(tmp_path)


def fit_with_stock(rank: int, world_size: int, directory: Path, model: Quick) -> None:
    with training.stock_group(rank, world_size, directory):
        training.fit("stock", directory, model, watchdog(directory))


def test_ranks_of_a_stock_strategy_report_on_themselves(tmp_path: Path) -> None:
    """Without a channel, each rank of stock ``ddp`` writes its own file."""
    outcomes = ranks.launch_ranks(fit_with_stock, 2, tmp_path, StuckInLoader())
    output_of_all(outcomes, exit_code=1)
    assert_printed(
        [outcomes[1]],
        outcomes[1],
        "has made no progress for <n> s; it is in train_dataloader_next,"
        f" {supervision.__file__}:<n>",
    )
    assert len(list((tmp_path / "reports").iterdir())) == 2


class BarrierBehindStuckRank(Quick):
    """In a step, ``stuck_rank`` blocks, and the others wait for it in a barrier."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        if index == STUCK_IN:
            if self.global_rank == self.stuck_rank:
                supervision.wait_for_ever()
            self.trainer.strategy.barrier()
        return self.loss(batch)


def test_a_rank_that_waits_in_a_barrier_is_reported_there(tmp_path: Path) -> None:
    """The report names the strategy's call, not the hook around it."""
    outcomes = ranks.launch_ranks(fit, 2, tmp_path, BarrierBehindStuckRank())
    finding = f"has made no progress for <n> s; it is in training_step, {supervision.__file__}:<n>"
    assert_stopped(outcomes, 1, finding)
    who = ranks.rank_name(0, outcomes[0].pid)
    waiting = f"{who}: last progress <n>.<n> s ago, in barrier, {__file__}:<n>"
    assert re.search(pattern(waiting), read_report(tmp_path))


class StuckBeforeFinalBarrier(Quick):
    """After the last step, ``stuck_rank`` blocks, and the others wait in a barrier.

    There, they ask every second whether all ranks still reply.
    """

    def on_train_end(self) -> None:
        training.limit_collectives(1.0)
        if self.global_rank == self.stuck_rank:
            supervision.wait_for_ever()


def test_a_rank_that_others_ask_for_replies_is_still_stuck(tmp_path: Path) -> None:
    """Replies to a rank that waits in the final barrier are not progress."""
    outcomes = ranks.launch_ranks(fit, 2, tmp_path, StuckBeforeFinalBarrier())
    finding = f"has made no progress for <n> s; it is in on_train_end, {supervision.__file__}:<n>"
    assert_stopped(outcomes, 1, finding)
