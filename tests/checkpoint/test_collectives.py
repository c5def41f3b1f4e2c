"""One rank alone needs no process group, and several exchange objects and bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_ddp_ext.checkpoint import collectives as module
from lightning_ddp_ext.checkpoint.collectives import Ranks
from tests.harness.ranks import run_ranks
from tests.harness.training import stock_group


def exchanged(ranks: Ranks) -> dict[str, Any]:
    data = torch.full((5,), ranks.rank, dtype=torch.uint8)
    ranks.broadcast(data[1:4])
    return {
        "gathered": ranks.gather("x" * 3000 * ranks.rank),
        "on rank 0": ranks.to_rank_zero(ranks.rank),
        "from rank 0": ranks.from_rank_zero(f"of rank {ranks.rank}"),
        "bytes": data.tolist(),
    }


def in_group(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    module._PIECE = 2
    with stock_group(rank, world_size, directory):
        return exchanged(Ranks(rank, world_size))


@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_exchange(world_size: int, tmp_path: Path) -> None:
    """All have all values by rank, rank 0's object, and rank 0's bytes where they were to be and nowhere else."""
    results = [exchanged(Ranks())] if world_size == 1 else run_ranks(in_group, world_size, tmp_path)
    for rank, result in enumerate(results):
        assert result == {
            "gathered": ["x" * 3000 * rank for rank in range(world_size)],
            "on rank 0": list(range(world_size)) if rank == 0 else None,
            "from rank 0": "of rank 0",
            "bytes": [rank, 0, 0, 0, rank],
        }
