"""SIGKILL at any moment of a save: the path holds a whole checkpoint, the old one or the new one."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ddp_ext import RankZeroCheckpointIO
from lightning_ddp_ext.checkpoint.archive import find_damage, open_archive
from lightning_ddp_ext.checkpoint.partial import find_leftovers
from tests.ranks import RankProcesses, announce

KILLS = 50  # in each of the four tests below


def saves_without_end(rank: int, world_size: int, path: Path, background: bool, first: int) -> None:
    """Save one checkpoint after another, each full of its own number, and the one before it under another name."""
    io = RankZeroCheckpointIO(background=background)
    weights = {name: torch.full((50_000,), first) for name in "abcd"}
    number = first
    while True:
        io.save_checkpoint({"number": number, **weights}, path)
        announce("saved", number)
        number += 1
        for weight in weights.values():
            weight.fill_(number)


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("part", [1, 2])
def test_a_killed_save_leaves_a_whole_checkpoint(background: bool, part: int, tmp_path: Path) -> None:
    """After each of many kills at random moments: a whole file, at most one leftover, gone at the next start."""
    path, moments = tmp_path / "it.ckpt", random.Random(part)
    number = hits = 0
    for _ in range(KILLS):
        number, was_hit = killed_once(path, background, number, moments.uniform(0, 3))
        hits += was_hit
    assert number > 0
    assert hits > KILLS / 10, "kills that came in the midst of writing"


def killed_once(path: Path, background: bool, first: int, saves: float) -> tuple[int, bool]:
    """Kill the writer in the midst of its ``saves``-th save or so; the number to go on with, and if it was hit."""
    with RankProcesses(saves_without_end, 1, path, background, first) as ranks:
        for _ in range(int(saves) + 1):
            last = ranks.wait_for("saved", 0)
        _spin(saves % 1)
        os.kill(ranks.pids[0], signal.SIGKILL)
        ranks.wait()
    leftovers = find_leftovers(path.parent)
    assert {each.name for each in path.parent.iterdir()} <= {path.name, *(left.path.name for left in leftovers)}
    assert len(leftovers) <= 1, "those of earlier kills are removed when a writer starts"
    if not path.exists():  # in the background the first may not be there yet
        assert background
        assert first == 0
        return 0, bool(leftovers)
    content: dict[str, Any] = torch.load(path)
    archive = open_archive(path)
    assert not find_damage(archive, archive.records or ())
    assert all(torch.all(content[name] == content["number"]) for name in "abcd"), "the content is of one moment"
    assert content["number"] >= last - (2 if background else 0), "what was saved before is not lost"
    return int(content["number"]) + 1, bool(leftovers)


def _spin(share: float) -> None:
    """Let a share of the time of about one save pass, in work rather than in sleep."""
    for _ in range(int(share * 4)):
        torch.rand(100_000).sort()
