"""``strategy.reduce`` gives stock's values, except for means of integers and idle ranks."""

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_ddp_ext.reductions.all_reduce import all_reduce
from tests.harness.training import (
    Kind,
    Net,
    assert_same,
    make_strategy,
    make_trainer,
    on_both,
    on_ranks,
)


class Reduced(NamedTuple):
    """What a rank gets."""

    means_of_integers: dict[str, Tensor]  # by name of the op
    others: dict[str, Any]  # by op or kind of value


def reduce_values(kind: Kind, directory: Path) -> Reduced:
    """Reduce values of two ranks, of which rank 0 has the smaller ones."""
    trainer = make_trainer(make_strategy(kind, directory))
    trainer.test(Net(), verbose=False)
    rank = trainer.global_rank
    reduce: Any = trainer.strategy.reduce
    in_place = torch.tensor(float(rank))
    reduce(in_place, reduce_op="mean")
    integers = torch.tensor([1 + rank, 4])
    means_of_integers = {op: reduce(integers, reduce_op=op) for op in ("mean", "avg")}
    others = {
        f"{op}": reduce(torch.tensor(rank + 3), reduce_op=op)
        for op in ("sum", "min", "max", ReduceOp.SUM)
    }
    others["in place"] = in_place
    others["number"] = reduce(3.0)
    others["half"] = reduce(torch.tensor(0.5 * rank, dtype=torch.half))
    return Reduced(means_of_integers, others)


@pytest.mark.lowest
def test_a_mean_of_integers_is_not_rounded(tmp_path: Path) -> None:
    """The mean of 1 and 2 is 1.5, where stock divides to whole numbers.

    All else that ``reduce`` returns is stock's.
    """
    ours, stock = on_both(reduce_values, tmp_path)
    mean = torch.tensor([1.5, 4.0])
    for reduced in ours:
        assert_same(reduced.means_of_integers, {"mean": mean, "avg": mean})
    assert_same([reduced.others for reduced in ours], [reduced.others for reduced in stock])


VALUES = (torch.tensor([2.5, -1.0]), torch.tensor([2, -1]), torch.tensor([True, False]))
OPS = ("sum", "product", "min", "max", "mean")
OPS_ON_BITS = ("band", "bor", "bxor")  # not of floats
CASES = [*itertools.product(VALUES, OPS), *itertools.product(VALUES[1:], OPS_ON_BITS)]


def reduce_without_rank_one(kind: Kind, directory: Path) -> list[Tensor]:
    """Reduce values, of which those of rank 1 do not count; they differ from rank 0's."""
    reduced = []
    for value, op in CASES:
        own = value.clone() if dist.get_rank() == 0 else value.logical_not().to(value.dtype)
        reduced.append(all_reduce(own, reduce_op=op, idle_ranks=[1]))
    return reduced


def test_the_values_of_an_idle_rank_do_not_count(tmp_path: Path) -> None:
    """Each op returns rank 0's values for each dtype, if rank 1 is idle."""
    expected = [value.float() if op == "mean" else value for value, op in CASES]
    for reduced in on_ranks("stock", reduce_without_rank_one, tmp_path):
        assert_same(reduced, expected)
