"""`HangWatchdog` names the stuck rank and its place in training, whatever happened to
that rank.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ddp_ext import DDPExtStrategy, HangWatchdog
from lightning_ddp_ext.errors import RankHungError
from tests.harness import ranks, training
from tests.harness.outcomes import Outcome, output_of_all
from tests.harness.training import Net
from tests.supervision import model as supervision

HERE = re.escape(__file__)
WAITS_FOR_EVER = re.escape(supervision.__file__)
TIMEOUT = 3.0  # seconds, of the watchdog
# Two ranks share 32 samples in batches of two, so that an epoch or a validation has
# eight steps. With a pause in each it takes 3.2 s, which is longer than the timeout.
SAMPLES = 32
PAUSE = 0.4


def pause() -> None:
    threading.Event().wait(PAUSE)


class Stuck(Net):
    """Hangs on one rank in its third step, in the ``place`` "step" or "dataset"."""

    def __init__(self, place: str = "", rank: int = 1, **loader: Any) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 1))
        self.place = place
        self.rank = rank
        self.loader = loader

    def hang(self) -> None:
        supervision.wait_for_ever()

    def reach(self, place: str, index: int) -> None:
        if (index, place, self.global_rank) == (2, self.place, self.rank):
            self.hang()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Samples(self), batch_size=2, **self.loader)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.reach("step", batch_idx)
        return self.loss(batch)


class Samples(Dataset[Any]):
    """Reaches the place "dataset" with the first sample of each batch."""

    def __init__(self, model: Stuck) -> None:
        self.model = model
        self.rows = training.data(SAMPLES)
        self.batches = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.model.reach("dataset", self.batches)
        self.batches += 1
        return [self.rows[index] for index in indices]


class WaitsInAnotherGroup(Stuck):
    def on_train_start(self) -> None:
        self.group = dist.new_group(list(range(self.trainer.world_size)))

    def hang(self) -> None:
        dist.all_reduce(torch.ones(1), group=self.group)


class Holds(Stuck):
    """Waits until the test releases the rank."""

    def hang(self) -> None:
        ranks.hold("stuck")


class Slow(Stuck):
    """Makes progress, but takes longer than the timeout for an epoch and for a
    validation.
    """

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        pause()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, index: int) -> None:
        pause()

    val_dataloader = Stuck.train_dataloader


def fit(
    rank: int,
    world_size: int,
    directory: Path,
    model: Stuck,
    *,
    kind: training.Kind = "ours",
    on_hang: str = "abort",
    **options: Any,
) -> None:
    watchdog = HangWatchdog(TIMEOUT, on_hang, directory / "reports")
    strategy = training.make_strategy(kind, directory)
    if isinstance(strategy, DDPExtStrategy):
        timeouts = strategy.rendezvous.timeouts
        grace = {**timeouts.grace, "hung": 0.3}
        strategy.rendezvous.timeouts = replace(timeouts, answer=3.0, grace=grace)
    options = {"devices": world_size, "max_epochs": 1, "limit_val_batches": 0, **options}
    with training.stock_group(rank, world_size, directory) if kind == "stock" else nullcontext():
        training.make_trainer(strategy, callbacks=[watchdog], **options).fit(model)


def hang_reports(outcomes: list[Outcome]) -> list[str]:
    """Return the lines that the ranks have printed about a hang."""
    lines = [line for each in outcomes for line in each.output.splitlines()]
    return [line for line in lines if "no progress for 3 s:" in line]


def expect_report(outcomes: list[Outcome], culprit: int, sentence: str, directory: Path) -> str:
    """Expect that one rank has printed the sentence, in which WHO is the culprit, and
    that each has failed with it; return the file's content.
    """
    output_of_all(outcomes, exit_code=1)
    who = rf"rank {culprit} \(host {re.escape(socket.gethostname())}, pid {outcomes[culprit].pid}\)"
    [line] = hang_reports(outcomes)
    assert re.search(sentence.replace("WHO", who), line)
    for error in [each.error for each in outcomes if each.error is not None]:
        assert isinstance(error.exception, RankHungError), error.message
        assert error.exception.rank == culprit
    [written] = [path.read_text() for path in (directory / "reports").iterdir()]
    return written


NEVER = r"WHO never entered all_reduce #\d+.*; it is in "


def test_a_stuck_rank_is_named(tmp_path: Path) -> None:
    """One line names its place and the collective in which the others wait; all end,
    and the file has all stacks.
    """
    outcomes = ranks.launch_ranks(fit, 3, tmp_path, WaitsInAnotherGroup("step"))
    sentence = (
        rf"{NEVER}all_reduce #1 \[\[1\]\] of group .+, training_step, {HERE}:.*ranks 0, 2 waited"
        r" for it for"
    )
    written = expect_report(outcomes, 1, sentence, tmp_path)
    assert len(re.findall(r"^MainThread:", written, re.MULTILINE)) == 3
    assert re.search(rf'File "{HERE}", line \d+, in hang', written)


def test_ranks_that_move_are_left_alone(tmp_path: Path) -> None:
    """An epoch or a validation may take any time."""
    outcomes = ranks.launch_ranks(fit, 2, tmp_path, Slow(), limit_val_batches=1.0)
    assert hang_reports(outcomes) == []
    output_of_all(outcomes, exit_code=0)


class Streamed(Stuck):
    """Reads a stream, with a pause before each batch or without."""

    def __init__(self, has_pauses: bool) -> None:
        super().__init__()
        self.has_pauses = has_pauses

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(StreamedBatches(self.has_pauses), batch_size=None)


class StreamedBatches(IterableDataset[Any]):
    def __init__(self, has_pauses: bool) -> None:
        self.has_pauses = has_pauses

    def __iter__(self) -> Iterator[Any]:
        for batch in DataLoader(training.data(SAMPLES), batch_size=2):
            if self.has_pauses:
                pause()
            yield batch


def train_on_stream(
    directory: Path, max_steps: int, path: Path | None, *, has_pauses: bool
) -> None:
    watchdog = HangWatchdog(TIMEOUT, directory=directory / "reports")
    trainer = training.make_trainer(
        training.make_strategy("ours", directory),
        callbacks=[watchdog],
        max_steps=max_steps,
        limit_val_batches=0,
    )
    trainer.fit(Streamed(has_pauses), ckpt_path=path)
    trainer.save_checkpoint(directory / f"{trainer.global_step}.ckpt")


def resume_slowly(rank: int, world_size: int, directory: Path) -> None:
    """Resume after nine steps, whose batches are read again in 9 * 0.4 = 3.6 s."""
    train_on_stream(directory, 9, None, has_pauses=False)
    train_on_stream(directory, 10, directory / "9.ckpt", has_pauses=True)


def test_reading_a_stream_again_is_progress(tmp_path: Path) -> None:
    """A resumed run may take longer than the timeout until it is where the other run
    was.
    """
    ranks.run_ranks(resume_slowly, 2, tmp_path)
    assert (tmp_path / "10.ckpt").exists()
    assert not (tmp_path / "reports").exists()


def test_a_stuck_worker_of_a_loader_ends_with_its_rank(tmp_path: Path) -> None:
    """The worker itself would never check whether its rank still exists."""
    model = Stuck("dataset", num_workers=1, multiprocessing_context="fork")
    outcomes = ranks.launch_ranks(fit, 2, tmp_path, model)
    expect_report(outcomes, 1, f"{NEVER}train_dataloader_next, ", tmp_path)


def test_a_rank_continues(tmp_path: Path) -> None:
    """With ``on_hang="continue"`` a rank that moves again trains to the end."""
    with ranks.RankProcesses(fit, 2, tmp_path, Holds("dataset"), on_hang="continue") as processes:
        processes.wait_for("stuck", 1)
        processes.wait_for_output("no progress for", 0)
        processes.release(1)
        outcomes = processes.wait()
    output_of_all(outcomes, exit_code=0)
    assert re.search(
        r"train_dataloader_next.*the ranks continue \(on_hang='continue'\)",
        hang_reports(outcomes)[0],
    )


REPORT_ON_ITSELF = (
    rf"has made no progress for \d+ s; it is in train_dataloader_next, {WAITS_FOR_EVER}:\d+"
)


def test_a_single_rank_reports_on_itself(tmp_path: Path) -> None:
    """It has no channel to other ranks."""
    outcomes = ranks.launch_ranks(fit, 1, tmp_path, Stuck("dataset", rank=0))
    expect_report(outcomes, 0, f"WHO {REPORT_ON_ITSELF}", tmp_path)


def test_ranks_of_a_stock_strategy_report_on_themselves(tmp_path: Path) -> None:
    """They have no channel, so each rank writes its own file."""
    outcomes = ranks.launch_ranks(fit, 2, tmp_path, Stuck("dataset"), kind="stock")
    output_of_all(outcomes, exit_code=1)
    assert re.search(f"rank 1 .* {REPORT_ON_ITSELF}", outcomes[1].output)
    assert len(list((tmp_path / "reports").iterdir())) == 2


class OthersAtBarrier(Stuck):
    """Hangs on one rank, for which the others wait in a barrier."""

    def reach(self, place: str, index: int) -> None:
        super().reach(place, index)
        if (index, place) == (2, self.place):
            self.trainer.strategy.barrier()


def test_a_rank_that_waits_in_a_barrier_is_reported_there(tmp_path: Path) -> None:
    """The report names the strategy's call, not the hook around it."""
    outcomes = ranks.launch_ranks(fit, 2, tmp_path, OthersAtBarrier("step"))
    written = expect_report(outcomes, 1, "WHO has made no progress .* training_step", tmp_path)
    assert re.search(rf"rank 0 .* last progress .*, in barrier, {HERE}:", written), written
