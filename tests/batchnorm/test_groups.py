"""Ranks join their batches: all of them, a number of consecutive ones, or those of a group."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_ddp_ext import convert_sync_batchnorm
from lightning_ddp_ext.errors import ConfigurationError
from tests.harness.ranks import run_ranks
from tests.harness.training import stock_group


@pytest.mark.parametrize("ranks", [0, True, "nodes", 2.5, [0, 1], "node", 2])
def test_what_cannot_be_a_group_is_refused(ranks: Any) -> None:
    """The error has the value and the allowed ones; "node" and numbers need a process group."""
    told = "process_group must be None, 'node', a positive number of ranks, or a ProcessGroup (got {!r}); omit it"
    told = "process_group={!r} needs a process group, which is not initialised yet" if ranks in ("node", 2) else told
    with pytest.raises(ConfigurationError) as raised:
        convert_sync_batchnorm(torch.nn.BatchNorm1d(3), process_group=ranks)
    assert str(raised.value).startswith(told.format(ranks))


def members(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    """Return the mean over this rank's group, for each form of the argument; rank r's batch has the mean 2 ** r."""
    with stock_group(rank, world_size, directory):
        by_hand = dist.new_group([0, 3]), dist.new_group([1, 2])
        ways: dict[str, Any] = {
            "None": None,
            **{str(size): size for size in (1, 2, 3, 9)},
            "by hand": by_hand[rank in (1, 2)],
            "of others": dist.new_group([0, 1]),
        }
        layers: dict[str, Any] = {
            way: convert_sync_batchnorm(torch.nn.BatchNorm1d(1, momentum=1.0), process_group=ranks)
            for way, ranks in ways.items()
        }
        layers["copied"] = copy.deepcopy(layers["by hand"])
        layers["pickled"] = pickle.loads(pickle.dumps(layers["by hand"]))
        assert (layers["copied"].process_group, layers["pickled"].process_group) == (ways["by hand"], None)
        for layer in layers.values():
            layer(torch.tensor([[-1.0], [1.0]]) + 2**rank)
        return {way: layer.running_mean.item() for way, layer in layers.items()}


def test_statistics_are_those_of_the_ranks_in_the_group(tmp_path: Path) -> None:
    """Only ranks of the group count; a rank outside of it is alone. A pickled layer uses all ranks."""
    found = run_ranks(members, 4, tmp_path)
    expected = {
        "None": [[0, 1, 2, 3]],
        "9": [[0, 1, 2, 3]],
        "pickled": [[0, 1, 2, 3]],
        "1": [[0], [1], [2], [3]],
        "2": [[0, 1], [2, 3]],
        "3": [[0, 1, 2], [3]],
        "by hand": [[0, 3], [1, 2]],
        "copied": [[0, 3], [1, 2]],
        "of others": [[0, 1], [2], [3]],
    }
    for way, parts in expected.items():
        for part in parts:
            mean = pytest.approx(sum(2**rank for rank in part) / len(part))
            assert [found[rank][way] for rank in part] == [mean] * len(part), way
