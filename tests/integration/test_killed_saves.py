"""Saves during which a rank dies or the process is killed leave a whole checkpoint."""

import os
import random
import signal
import traceback
from pathlib import Path
from typing import Any, NamedTuple

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
    [hits] = ranks.run_ranks(kill_writers, 1, tmp_path / "it.ckpt", background, time_limit=170)
    assert hits > FEWEST_HITS


def kill_writers(rank: int, world_size: int, path: Path, background: bool) -> int:
    """Fork one writer after another, kill each, and count the interrupted writes."""
    times = random.Random(1)
    number = 0
    hits = 0
    for _ in range(KILLS):
        killed = kill_one(path, background, number, times.uniform(0, 3))
        hits += killed.is_hit
        number = 0 if killed.saved is None else killed.saved + 1
    assert number > 0
    return hits


class KilledWriter(NamedTuple):
    """What a killed writer left.

    Attributes:
        saved: the number in the checkpoint; ``None`` if it had not saved one.
        is_hit: whether the kill interrupted a write.
    """

    saved: int | None
    is_hit: bool


def kill_one(path: Path, background: bool, first: int, saves: float) -> KilledWriter:
    """Kill a writer, which counts from ``first``, at about its ``saves``-th save."""
    last = fork_and_kill(path, background, first, saves)
    leftovers = list(path.parent.glob(".ddpx-*.partial"))
    for leftover in leftovers:
        os.utime(leftover, (0, 0))  # the next writer takes it for one of an hour ago
    assert {*path.parent.iterdir()} <= {path, *leftovers}
    assert len(leftovers) <= 1, "those of earlier kills are removed when a writer starts"
    if not path.exists():  # in the background, the first save may not have ended
        assert background
        assert first == 0
        return KilledWriter(None, is_hit=bool(leftovers))
    number = number_in_whole_file(path)
    unfinished_saves = 2 if background else 0
    assert number >= last - unfinished_saves, "a finished save is not lost"
    return KilledWriter(number, is_hit=bool(leftovers))


def fork_and_kill(path: Path, background: bool, first: int, saves: float) -> int:
    """Return the last number that the writer reported before its end."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            save_without_end(path, background, first, writer)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)  # an exception must not return into the parent's code
    os.close(writer)
    with os.fdopen(reader) as reports:
        for _ in range(int(saves) + 1):
            last = int(reports.readline())
        spin(saves % 1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return last


def number_in_whole_file(path: Path) -> int:
    content: dict[str, Any] = torch.load(path)
    with Archive.open(path) as archive:
        archive.check()
    number = int(content["number"])
    assert all(torch.all(content[name] == number) for name in NAMES), "the content is of one save"
    return number


def save_without_end(path: Path, background: bool, number: int, reports: int) -> None:
    """Save one checkpoint after another, each filled with its number."""
    io = RankZeroCheckpointIO(background=background)
    weights = {name: torch.full((50_000,), number) for name in NAMES}
    while True:
        io.save_checkpoint({"number": number, **weights}, path)
        os.write(reports, b"%d\n" % number)
        number += 1
        for weight in weights.values():
            weight.fill_(number)


def spin(share: float) -> None:
    """Let a share of the time of about one save pass, in work rather than in sleep."""
    for _ in range(int(share * 4)):
        torch.rand(100_000).sort()
