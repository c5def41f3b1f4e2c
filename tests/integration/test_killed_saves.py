"""Saves during which a rank dies or the process is killed leave a whole checkpoint."""

import os
import random
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import AsyncCheckpointIO

from lightning_ddp_ext import RankZeroCheckpointIO
from tests.harness import ranks, training
from tests.harness.training import Net
from tests.integration import checkpointing
from tests.integration.checkpointing import Keeper


class Waits:
    """Blocks its pickling until the test allows it."""

    def __reduce__(self) -> Any:
        ranks.hold("saving")
        return Waits, ()


class OwnIO(RankZeroCheckpointIO):
    """A user's checkpoint IO."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        torch.save(checkpoint, path)


def save_slowly(
    rank: int,
    world_size: int,
    directory: Path,
    io: RankZeroCheckpointIO,
    save_deadline: float = 60,
) -> None:
    save = training.At(
        "on_train_epoch_end", lambda trainer: trainer.save_checkpoint(directory / "it.ckpt")
    )
    strategy = {"checkpoint_io": io, "save_deadline": save_deadline, "stop_checkpoint": None}
    keeper = Keeper(Waits())
    training.fit("ours", directory, Net(), keeper, save, strategy=strategy, max_epochs=1)


def kill_rank_1_during_save(processes: ranks.RankProcesses) -> None:
    """Kill rank 1 while rank 0 saves, which it does until it is released."""
    processes.wait_for("saving", rank=0)
    processes.kill(1)
    processes.wait_for_output(
        "This rank will finish writing its checkpoint before it exits", rank=0
    )


@pytest.mark.parametrize("io", [RankZeroCheckpointIO(), OwnIO()], ids=["ours", "the user's"])
def test_a_save_is_finished_when_another_rank_dies(
    io: RankZeroCheckpointIO, tmp_path: Path
) -> None:
    """Rank 0 finishes its save, which needs no other rank, and then exits."""
    with ranks.RankProcesses(save_slowly, 2, tmp_path, io) as processes:
        kill_rank_1_during_save(processes)
        processes.release(0)
        outcome, _ = processes.wait()
    assert outcome.exit_code != 0
    assert "rank 1" in outcome.failure.message
    assert torch.load(tmp_path / "it.ckpt", weights_only=False)["global_step"] == 4
    assert not list(tmp_path.glob(".ddpx-*.partial"))


def test_a_save_that_takes_too_long_when_another_rank_dies_is_given_up(tmp_path: Path) -> None:
    """Rank 0 exits after ``save_deadline`` seconds, and there is no checkpoint."""
    io = RankZeroCheckpointIO()
    with ranks.RankProcesses(save_slowly, 2, tmp_path, io, save_deadline=1) as processes:
        kill_rank_1_during_save(processes)
        outcome, _ = processes.wait()
    assert outcome.exit_code != 0
    assert not (tmp_path / "it.ckpt").exists()


KILLS = max(50, int(os.environ.get("SOAK_COUNT", 0))) // 2
NAMES = "abcd"


def test_a_killed_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Kills at random times leave a whole file, and at most one partial file each."""
    path = tmp_path / "it.ckpt"
    times = random.Random(1)
    next_number = 0
    interrupted = 0
    for _ in range(KILLS):
        saves = times.randint(1, 3)
        last_reported = kill_writer(path, next_number, saves, times.random())
        leftovers = list(tmp_path.glob(".ddpx-*.partial"))
        assert len(leftovers) <= 1
        assert {*tmp_path.iterdir()} == {path, *leftovers}
        for leftover in leftovers:
            leftover.unlink()
            interrupted += 1
        saved = number_in_whole_file(path)
        assert saved >= last_reported, "a finished save is lost"
        next_number = saved + 1
    assert interrupted > KILLS / 10, "too few kills at random times have interrupted a save"


def kill_writer(path: Path, number: int, saves: int, share: float) -> int:
    """Kill a writer, which counts from ``number``, in the save after it has reported some.

    Return the last number that it reported.

    Args:
        path: the checkpoint.
        number: the first number.
        saves: the number of saves to be reported before.
        share: the part of the next save that is done by then, about.
    """
    with ranks.RankProcesses(save_without_end, 1, path, number) as writer:
        for _ in range(saves):
            last: int = writer.wait_for("saved", rank=0)
        spin(share)
        writer.kill(0)
    return last


def save_without_end(rank: int, world_size: int, path: Path, number: int) -> None:
    """Save one checkpoint after another, each filled with its number."""
    io = RankZeroCheckpointIO()
    weights = {name: torch.full((50_000,), number) for name in NAMES}
    while True:
        io.save_checkpoint({"number": number, **weights}, path)
        ranks.announce("saved", number)
        number += 1
        for weight in weights.values():
            weight.fill_(number)


def spin(share: float) -> None:
    """Let a share of the time of about one save pass, in work rather than in sleep."""
    for _ in range(int(share * 4)):
        torch.rand(100_000).sort()


def number_in_whole_file(path: Path) -> int:
    content: dict[str, Any] = torch.load(path)
    RankZeroCheckpointIO().load_checkpoint(path)
    number = int(content["number"])
    assert all(torch.all(content[name] == number) for name in NAMES), "the content is of one save"
    return number


STEP_OF_FIRST = 1


class HoldsSecond(RankZeroCheckpointIO):
    """Saves the first checkpoint, and holds the second one until the test allows it."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        if checkpoint["global_step"] == STEP_OF_FIRST + 1:
            ranks.hold("saving")
        super().save_checkpoint(checkpoint, path, storage_options)


def save_each_step(rank: int, world_size: int, kind: training.Kind, directory: Path) -> None:
    """Keep the newest checkpoint only, saved in the background after each step."""
    saver = checkpointing.checkpoint_callback(
        kind, dirpath=directory / "kept", filename="{step}", every_n_train_steps=1
    )
    go_on = training.At(
        "on_train_batch_start", lambda trainer: ranks.announce("training"), earlier=2
    )
    io = AsyncCheckpointIO(HoldsSecond())
    is_stock = kind == "stock"
    with training.stock_group(rank, world_size, directory) if is_stock else nullcontext():
        trainer = checkpointing.trainer_for(kind, directory, io, [saver, go_on], max_epochs=1)
        trainer.fit(Net())


def steps_of(directory: Path) -> list[int]:
    """Return the steps of the checkpoints, all of which are whole."""
    paths = directory.glob("*.ckpt")
    return sorted(RankZeroCheckpointIO().load_checkpoint(path)["global_step"] for path in paths)


@pytest.mark.parametrize("kind", training.KINDS)
def test_a_run_killed_during_a_background_save_has_the_checkpoint_before(
    kind: training.Kind, tmp_path: Path
) -> None:
    """The next step trains meanwhile, and the file before is not removed yet."""
    with ranks.RankProcesses(save_each_step, 2, kind, tmp_path) as processes:
        processes.wait_for("saving", rank=0)
        processes.wait_for("training", rank=0)
        for rank in range(2):
            processes.kill(rank)
        processes.wait()
    assert steps_of(tmp_path / "kept") == [STEP_OF_FIRST]


def test_a_run_stopped_during_a_background_save_finishes_it(tmp_path: Path) -> None:
    """After SIGTERM to all ranks, the save goes on, the file before it is removed, and all
    ranks save once more.
    """
    with ranks.RankProcesses(save_each_step, 2, "ours", tmp_path) as processes:
        processes.wait_for("saving", rank=0)
        processes.wait_for("training", rank=0)
        for rank in range(2):
            processes.kill(rank, signal.SIGTERM)
        processes.release(0)
        outcomes = processes.wait()
    assert {outcome.exit_code for outcome in outcomes} == {128 + signal.SIGTERM}
    assert steps_of(tmp_path / "kept")[-1] >= STEP_OF_FIRST + 2
