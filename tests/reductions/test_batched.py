"""Values reduced together: what all-reduces one by one would give."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_ddp_ext.reductions.all_reduce import all_reduce
from lightning_ddp_ext.reductions.batched import DTYPES, OPS, Value, reduce_batch
from tests.harness.ranks import run_ranks
from tests.harness.training import stock_group


def reduced(values: Sequence[Value], idle_ranks: tuple[int, ...] = ()) -> list[Tensor]:
    return reduce_batch(values, device=torch.device("cpu"), idle_ranks=idle_ranks)


def some_values(number: int) -> list[Value]:
    """Of all types, to be reduced in all ways."""
    values = []
    for index in range(number):
        for op in OPS:
            scale = 10.0 ** torch.randint(-3, 4, ()).item()
            dtype = DTYPES[index % len(DTYPES)]
            values.append(Value(f"{index}", op, (torch.randn(()) * scale).to(dtype)))
    return values


def compare(rank: int, world_size: int, directory: Path, idle_ranks: tuple[int, ...]) -> list[list[float]]:
    """With single all-reduces, fewer values and more than a message holds; then powers of two, and a NaN of rank 1."""
    torch.manual_seed(rank)
    with stock_group(rank, world_size, directory):
        for number in (1, 30):
            values = some_values(number)
            own = [value.tensor.clone() for value in values]
            results = reduced(values, idle_ranks)
            assert all(value.tensor.equal(before) for value, before in zip(values, own, strict=True))
            expected = [all_reduce(value.tensor, None, value.op, idle_ranks=idle_ranks) for value in values]
            exactly = {"rtol": 0, "atol": 0} if world_size - len(idle_ranks) == 2 else {}
            torch.testing.assert_close(results, expected, **exactly)  # type: ignore[arg-type]
        powers = [Value(op, op, torch.tensor(2.0**rank, dtype=torch.float64)) for op in OPS]
        odd = torch.tensor(torch.nan if rank == 1 else 1.0)
        odds = [value for op in OPS for value in (Value(op, op, odd), Value("whole", op, torch.tensor(1.0)))]
        last = [results, *(reduced(values, idle_ranks) for values in (powers, odds))]
    return [[float(value) for value in values] for values in last]


@pytest.mark.parametrize(("world_size", "idle_ranks"), [(2, ()), (3, ()), (3, (2,)), (4, (0,))])
def test_results_are_those_of_single_all_reduces(world_size: int, idle_ranks: tuple[int, ...], tmp_path: Path) -> None:
    """With their types, the same on every rank, and of two ranks to the last bit; idle ranks do not count.

    What is no number on one rank is none anywhere, however it is reduced, and its neighbours are not touched.
    """
    by_rank = run_ranks(compare, world_size, tmp_path, idle_ranks)
    counted = [2.0**rank for rank in range(world_size) if rank not in idle_ranks]
    for results, powers, odds in by_rank:
        assert results == by_rank[0][0]
        assert powers == [sum(counted) / len(counted), sum(counted), min(counted), max(counted)]
        assert [math.isnan(value) for value in odds] == [True, False] * len(OPS)
