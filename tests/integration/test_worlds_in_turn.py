"""Trainers of one rank and of several, one after the other in one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from lightning_ddp_ext import DDPExtStrategy
from tests.harness.ranks import run_ranks
from tests.harness.training import Net, make_trainer


def fit_in_turn(rank: int, world_size: int, directory: Path, worlds: Sequence[tuple[str, int]]) -> list[int]:
    """Fit with each start method and number of devices; how many ranks each Trainer had."""
    found = []
    for start_method, devices in worlds:
        trainer = make_trainer(DDPExtStrategy(start_method=start_method), devices=devices, max_epochs=1)  # type: ignore[arg-type]
        trainer.fit(Net())
        found.append(trainer.world_size)
    return found


@pytest.mark.parametrize(
    "worlds",
    [
        [("popen", 1), ("fork", 2), ("popen", 1)],
        [("fork", 2), ("popen", 1), ("fork", 3), ("fork", 1)],
        [("popen", 1), ("spawn", 2)],
    ],
    ids=str,
)
def test_worlds_of_other_sizes_in_turn(worlds: Sequence[tuple[str, int]], tmp_path: Path) -> None:
    """In any order, without a launcher and without an address."""
    expected = [devices for _, devices in worlds]
    env = {"OMP_NUM_THREADS": "1"}  # a forked process cannot use OpenMP threads that its parent has started
    assert run_ranks(fit_in_turn, 1, tmp_path, worlds, env=env, time_limit=90.0) == [expected]
