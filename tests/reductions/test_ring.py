"""The ring adds up what all-reduce adds up, whatever the size and the number of ranks."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from lightning_ddp_ext.reductions.ring import ring_sum
from tests.harness.ranks import run_ranks
from tests.harness.training import stock_group

GROUPS = ([0, 1, 2, 3], [1, 2, 3], [0, 2], [1])


def compare(rank: int, world_size: int, directory: Path) -> dict[tuple[int, int], torch.Tensor]:
    found = {}
    with stock_group(rank, world_size, directory):
        for number, members in enumerate(GROUPS):
            group = dist.new_group(members)
            for size in (0, 1, 2, 3, 4, 5, 7, 64, 1001) if rank in members else ():
                mine = torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
                expected = mine.clone()
                dist.all_reduce(expected, group=group)
                found[number, size] = ring_sum(mine, group)
                torch.testing.assert_close(found[number, size], expected, rtol=1e-12, atol=1e-12)
    return found


def test_sums_are_those_of_all_reduce(tmp_path: Path) -> None:
    """Up to the order of additions, and the same to the last bit on all ranks of a group."""
    by_rank = run_ranks(compare, 4, tmp_path)
    for number, members in enumerate(GROUPS):
        results = [{key: sums for key, sums in by_rank[rank].items() if key[0] == number} for rank in members]
        assert len(results[0]) == 9
        torch.testing.assert_close(results, results[:1] * len(members), rtol=0, atol=0)
