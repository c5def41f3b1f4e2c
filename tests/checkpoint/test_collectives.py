"""One rank alone needs no process group, and several exchange objects and bytes."""

from __future__ import annotations

from pathlib import Path

import torch

from lightning_ddp_ext.checkpoint.collectives import Ranks
from tests.integration.training import stock_group
from tests.ranks import run_ranks


def test_one_rank_is_alone() -> None:
    """It has its own values, and nobody else's, without a process group."""
    assert Ranks().gather("mine") == ["mine"]
    assert Ranks().from_rank_zero("mine") == "mine"
    data = torch.ones(3, dtype=torch.uint8)
    Ranks().broadcast(data)
    assert data.tolist() == [1, 1, 1]


def exchanged(rank: int, world_size: int, directory: Path) -> tuple[list[int], str, list[int], list[int]]:
    with stock_group(rank, world_size, directory):
        ranks = Ranks(rank, world_size)
        data = torch.full((5,), rank, dtype=torch.uint8)
        ranks.broadcast(data[1:4])
        long = [len(value) for value in ranks.gather("x" * 3000 * rank)]
        return ranks.gather(rank * rank), ranks.from_rank_zero(f"of rank {rank}"), data.tolist(), long


def test_ranks_exchange(tmp_path: Path) -> None:
    """All have all values by rank, rank 0's object, and rank 0's bytes where they were to be and nowhere else."""
    for rank, result in enumerate(run_ranks(exchanged, 3, tmp_path)):
        assert result == ([0, 1, 4], "of rank 0", [rank, 0, 0, 0, rank], [0, 3000, 6000])
