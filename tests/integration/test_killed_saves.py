"""Saves during which a rank dies or the process is killed leave a whole checkpoint."""

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ddp_ext import RankZeroCheckpointIO
from lightning_ddp_ext.checkpoint.archive import Archive
from tests.harness import ranks, training
from tests.harness.training import Net
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


def saves_slowly(
    rank: int,
    world_size: int,
    directory: Path,
    io: type[RankZeroCheckpointIO],
    save_deadline: float,
) -> None:
    save = training.At(
        "on_train_epoch_end", lambda trainer: trainer.save_checkpoint(directory / "it.ckpt")
    )
    strategy = training.make_strategy(
        "ours", directory, checkpoint_io=io(), save_deadline=save_deadline
    )
    training.make_trainer(strategy, callbacks=[Keeper(Waits()), save], max_epochs=1).fit(Net())


@pytest.mark.parametrize(
    ("io", "save_deadline", "is_finished"),
    [
        pytest.param(RankZeroCheckpointIO, 60, True, id="in time"),
        pytest.param(OwnIO, 60, True, id="a user's IO, in time"),
        pytest.param(RankZeroCheckpointIO, 1, False, id="not in time"),
    ],
)
def test_a_save_is_finished_when_another_rank_dies(
    io: type[RankZeroCheckpointIO], save_deadline: float, is_finished: bool, tmp_path: Path
) -> None:
    """Rank 0 finishes its save, which needs no other rank, or exits at the deadline."""
    with ranks.RankProcesses(saves_slowly, 2, tmp_path, io, save_deadline) as processes:
        processes.wait_for("saving", rank=0)
        processes.kill(1)
        processes.wait_for_output(
            "This rank will finish writing its checkpoint before it exits", rank=0
        )
        if is_finished:
            processes.release(0)
        outcome, _ = processes.wait()
    assert outcome.exit_code != 0
    assert (tmp_path / "it.ckpt").exists() == is_finished
    if is_finished:
        assert "rank 1" in outcome.failure.message
        assert torch.load(tmp_path / "it.ckpt", weights_only=False)["global_step"] == 4
        assert not list(tmp_path.glob(".ddpx-*.partial"))


KILLS = max(50, int(os.environ.get("SOAK_COUNT", 0))) // 2
FEWEST_HITS = KILLS / 10  # kills that interrupt a write, of those at random times
NAMES = "abcd"


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_a_killed_save_leaves_a_whole_checkpoint(background: bool, tmp_path: Path) -> None:
    """Kills at random times leave a whole file and at most one leftover each.

    The next start removes the leftover.
    """
    path = tmp_path / "it.ckpt"
    times = random.Random(1)
    unfinished_saves = 2 if background else 0
    first = 0
    hits = 0
    for _ in range(KILLS):
        last_reported = kill_writer(path, background, first, times.uniform(0, 3))
        leftovers = list(tmp_path.glob(".ddpx-*.partial"))
        for leftover in leftovers:
            os.utime(leftover, (0, 0))  # the next writer takes it for one of an hour ago
        assert len(leftovers) <= 1, "those of earlier kills are removed when a writer starts"
        assert {*tmp_path.iterdir()} <= {path, *leftovers}
        hits += len(leftovers)
        if not path.exists():
            assert background, "its first save may not have ended"
            assert first == 0
            continue
        saved = number_in_whole_file(path)
        assert saved >= last_reported - unfinished_saves, "a finished save is not lost"
        first = saved + 1
    assert first > 0
    assert hits > FEWEST_HITS


def kill_writer(path: Path, background: bool, first: int, saves: float) -> int:
    """Kill a writer, which counts from ``first``, at about its ``saves``-th save.

    Return the last number that it reported before.
    """
    with ranks.RankProcesses(save_without_end, 1, path, background, first) as writer:
        for _ in range(int(saves) + 1):
            last: int = writer.wait_for("saved", rank=0)
        spin(saves % 1)
        writer.kill(0)
    return last


def save_without_end(rank: int, world_size: int, path: Path, background: bool, number: int) -> None:
    """Save one checkpoint after another, each filled with its number."""
    io = RankZeroCheckpointIO(background=background)
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
    with Archive.open(path) as archive:
        archive.check()
    number = int(content["number"])
    assert all(torch.all(content[name] == number) for name in NAMES), "the content is of one save"
    return number
