"""The ring adds up what all-reduce adds up, whatever the size and the number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_ddp_ext.reductions.ring import ring_sum
from tests.harness.ranks import run_ranks

SIZES = (0, 1, 2, 3, 4, 5, 7, 64, 1001)


def compare(rank: int, world_size: int, directory: Path, of_some: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)
    members = list(range(1, world_size)) if of_some else list(range(world_size))
    group = dist.new_group(members)
    found = []
    for size in SIZES if rank in members else ():
        mine = torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        expected = mine.clone()
        dist.all_reduce(expected, group=group)
        found.append((ring_sum(mine, group), expected))
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("of_some", [False, True], ids=["all", "a group"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sums_are_those_of_all_reduce(world_size: int, of_some: bool, tmp_path: Path) -> None:
    """Up to the order of additions, and the same to the last bit on all ranks."""
    results = [result for result in run_ranks(compare, world_size, tmp_path, of_some) if result]
    assert len(results) == world_size - of_some
    for by_rank in zip(*results, strict=True):
        for found, expected in by_rank:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            assert torch.equal(found, by_rank[0][0])
