"""SIGKILL at any moment of a save: the path holds a whole checkpoint, the old one or the new one."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ddp_ext.checkpoint.archive import Archive
from lightning_ddp_ext.checkpoint.atomic_file import find_leftovers
from tests.harness.ranks import run_ranks

KILLS = max(50, int(os.environ.get("SOAK_COUNT", 0))) // 2
NAMES = "abcd"


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_a_killed_save_leaves_a_whole_checkpoint(background: bool, tmp_path: Path) -> None:
    """Many kills at random moments each leave a whole file and at most one leftover, which the next start removes."""
    [hits] = run_ranks(kill_writers, 1, tmp_path / "it.ckpt", background, time_limit=170)
    assert hits > KILLS / 10, "kills that came in the midst of writing"


def kill_writers(rank: int, world_size: int, path: Path, background: bool) -> int:
    """Fork one writer after another, and kill each; how many left something half-written."""
    moments = random.Random(1)
    number = hits = 0
    for _ in range(KILLS):
        number, was_hit = kill_once(path, background, number, moments.uniform(0, 3))
        hits += was_hit
    assert number > 0
    return hits


def kill_once(path: Path, background: bool, first: int, saves: float) -> tuple[int, bool]:
    """Kill a writer about in its ``saves``-th save; return the next number, and whether the save was hit."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        save_without_end(path, background, first, writer)
    os.close(writer)
    with os.fdopen(reader) as told:
        for _ in range(int(saves) + 1):
            last = int(told.readline())
        spin(saves % 1)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    leftovers = find_leftovers(path.parent)
    for leftover in leftovers:
        os.utime(leftover.path, (0, 0))  # an hour passes
    assert {each.name for each in path.parent.iterdir()} <= {path.name, *(left.path.name for left in leftovers)}
    assert len(leftovers) <= 1, "those of earlier kills are removed when a writer starts"
    if not path.exists():  # in the background the first may not be there yet
        assert background
        assert first == 0
        return 0, bool(leftovers)
    content: dict[str, Any] = torch.load(path)
    Archive.open(path).check()
    assert all(torch.all(content[name] == content["number"]) for name in NAMES), "the content is of one moment"
    assert content["number"] >= last - (2 if background else 0), "what was saved before is not lost"
    return int(content["number"]) + 1, bool(leftovers)


def save_without_end(path: Path, background: bool, number: int, told: int) -> None:
    """Save one checkpoint after another, each filled with its number."""
    from lightning_ddp_ext import RankZeroCheckpointIO

    io = RankZeroCheckpointIO(background=background)
    weights = {name: torch.full((50_000,), number) for name in NAMES}
    while True:
        io.save_checkpoint({"number": number, **weights}, path)
        os.write(told, b"%d\n" % number)
        number += 1
        for weight in weights.values():
            weight.fill_(number)


def spin(share: float) -> None:
    """Let a share of the time of about one save pass, in work rather than in sleep."""
    for _ in range(int(share * 4)):
        torch.rand(100_000).sort()
