"""With ``debug=True`` collectives of the user's own are named when ranks are in different ones."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.harness.ranks import by_hand_env, launch_ranks, run_ranks
from tests.harness.training import Net, make_strategy, make_trainer


class Own(Net):
    """Calls collectives of its own in each step."""

    def __init__(self, calls: Callable[[int, int], None]) -> None:
        super().__init__()
        self.calls = calls

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.calls(dist.get_rank(), index)


def the_same(rank: int, index: int) -> None:
    total = torch.ones(2)
    dist.all_reduce(total, async_op=True).wait()
    assert total.tolist() == [2, 2]
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, rank)
    assert gathered == [0, 1]
    dist.barrier()


def skipped(rank: int, index: int) -> None:
    if rank == 0 or index != 1:
        dist.all_reduce(torch.ones(2))


def another(rank: int, index: int) -> None:
    if rank == 0 or index != 1:
        dist.all_reduce(torch.ones(2))
    else:
        dist.broadcast(torch.ones(2), src=0)


def of_other_shape(rank: int, index: int) -> None:
    dist.all_reduce(torch.ones(2 if rank == 0 or index != 1 else 3))


def fitted(rank: int, world_size: int, directory: Path, calls: Callable[[int, int], None]) -> bool:
    before = dist.all_reduce
    make_trainer(make_strategy("ours", directory, debug=True), max_epochs=1).fit(Own(calls))
    return dist.all_reduce is before


def test_collectives_that_all_call_do_what_they_did(tmp_path: Path) -> None:
    """And torch's functions are its own again afterwards."""
    assert run_ranks(fitted, 2, tmp_path, the_same, env=by_hand_env(2)) == [True, True]


@pytest.mark.parametrize(
    ("calls", "kind", "found"),
    [
        (skipped, "RankAbsentError", r"rank 0 began all_reduce of float32 \[2\] \(.*test_debug.py:\d+\), and rank 1"),
        (another, "RankMismatchError", r"rank 1 \(.*?\) began broadcast of float32 \[2\] \(.*test_debug.py:\d+\)"),
        (
            of_other_shape,
            "RankMismatchError",
            r"rank 1 \(.*?\) began all_reduce of float32 \[3\] \(.*test_debug.py:\d+\)",
        ),
    ],
)
def test_a_rank_that_is_in_no_or_another_collective_is_named(
    calls: Callable[[int, int], None], kind: str, found: str, tmp_path: Path
) -> None:
    """With both calls and their lines, on every rank, and at once."""
    for outcome in launch_ranks(fitted, 2, tmp_path, calls, env=by_hand_env(2), time_limit=20):
        assert outcome.error is not None
        assert outcome.error.type_name == kind
        assert re.search(found, outcome.error.message)
