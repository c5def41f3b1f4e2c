"""``strategy.reduce`` gives stock's values, except for means of integers and idle ranks."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from tests.harness.training import (
    Kind,
    Net,
    assert_same,
    make_strategy,
    make_trainer,
    on_both,
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
