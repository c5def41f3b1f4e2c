"""Which ranks join their batches: all, those of one machine, so many at a time, or those of a group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_ddp_ext import convert_sync_batchnorm
from lightning_ddp_ext.batchnorm import groups
from lightning_ddp_ext.batchnorm.groups import check_ranks, group_of
from lightning_ddp_ext.errors import ConversionError
from lightning_ddp_ext.rendezvous.process_context import join, leave
from tests.harness.ranks import run_ranks
from tests.rendezvous.rooms import request


@pytest.mark.parametrize("ranks", [0, -1, True, False, "nodes", "", 2.5, [0, 1]])
def test_what_cannot_be_a_group_is_refused(ranks: Any) -> None:
    """The error has the allowed values and the one that was given."""
    told = r"^process_group must be None, 'node', a number of ranks from 1 on, or a ProcessGroup \(got "
    with pytest.raises(ConversionError, match=told) as raised:
        convert_sync_batchnorm(torch.nn.BatchNorm1d(3), process_group=ranks)
    assert str(raised.value).endswith(f"(got {ranks!r}); leave it out for all ranks")


@pytest.mark.parametrize("ranks", ["node", 1, 2])
def test_groups_that_must_be_opened_need_the_ranks(ranks: Any) -> None:
    """Before there is a process group, ranks cannot be counted; all of them can be meant, though."""
    check_ranks(ranks)
    with pytest.raises(ConversionError, match=f"^process_group={ranks!r} needs the ranks, and they have not met yet"):
        group_of(ranks)
    assert group_of(None) is None


def running_mean_over(ranks: Any, rank: int) -> float:
    """After one batch whose mean is two to the power of the rank."""
    layer = convert_sync_batchnorm(torch.nn.BatchNorm1d(1, momentum=1.0), process_group=ranks)
    layer(torch.tensor([[-1.0], [1.0]]) + 2**rank)
    assert layer.running_mean is not None
    return float(layer.running_mean)


def members(rank: int, world_size: int, directory: Path, is_ours: bool) -> dict[str, Any]:
    """The mean over this rank's group, for each way to say which it is."""
    if is_ours:
        join(request(rank, world_size, str(directory / "store")))
    else:
        dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)
    groups.network_identity = lambda: f"host {rank in (1, 3)}"
    by_hand = dist.new_group([0, 3]), dist.new_group([1, 2])
    ways: dict[str, Any] = {
        "None": None,
        "world": dist.group.WORLD,
        "1": 1,
        "2": 2,
        "3": 3,
        "4": 4,
        "9": 9,
        "node": "node",
        "by hand": by_hand[rank in (1, 2)],
        "of others": dist.new_group([0, 1]),
    }
    found: dict[str, Any] = {way: running_mean_over(ranks, rank) for way, ranks in ways.items()}
    if is_ours:
        leave()
    else:
        dist.destroy_process_group()
    return found


EXPECTED: dict[str, list[list[int]]] = {
    "None": [[0, 1, 2, 3]],
    "world": [[0, 1, 2, 3]],
    "1": [[0], [1], [2], [3]],
    "2": [[0, 1], [2, 3]],
    "3": [[0, 1, 2], [3]],
    "4": [[0, 1, 2, 3]],
    "9": [[0, 1, 2, 3]],
    "node": [[0, 2], [1, 3]],
    "by hand": [[0, 3], [1, 2]],
    "of others": [[0, 1], [2], [3]],
}


@pytest.mark.parametrize("is_ours", [True, False], ids=["joined by us", "by hand"])
def test_statistics_are_those_of_the_ranks_in_the_group(is_ours: bool, tmp_path: Path) -> None:
    """Only they count, whoever opened the process group; a rank that a group does not have is alone."""
    found = run_ranks(members, 4, tmp_path, is_ours)
    for way, parts in EXPECTED.items():
        for part in parts:
            for rank in part:
                assert found[rank][way] == pytest.approx(sum(2**each for each in part) / len(part)), (way, rank)
