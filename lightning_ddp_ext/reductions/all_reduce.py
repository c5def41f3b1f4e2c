"""Reduce a tensor over the ranks, without those that only take part in the collective.

Lightning's own reduction runs a barrier first, which this one does not need.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_ddp_ext.ranks import is_gloo


def all_reduce(
    tensor: Tensor, group: Any = None, reduce_op: Any = "mean", *, idle_ranks: Collection[int] = ()
) -> Tensor:
    """Reduce a tensor in place, and return it.

    A mean of integers is a new tensor of floats.

    Collective: every rank of the group must call it, including idle ones.

    Args:
        tensor: this rank's values.
        group: the ranks; ``None`` for all.
        reduce_op: a ``ReduceOp`` or its name; "mean" is the same as "avg".
        idle_ranks: global ranks whose values do not count, unless the whole group is
            idle.
    """
    group = dist.group.WORLD if group is None else group
    op = reduce_op
    if isinstance(reduce_op, str):
        op = getattr(ReduceOp, reduce_op.upper().replace("MEAN", "AVG"))
    ranks = set(dist.get_process_group_ranks(group))
    active_ranks = ranks.difference(idle_ranks) or ranks
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    if op == ReduceOp.AVG and is_integer:
        tensor = tensor.to(torch.int64, copy=True)
    if dist.get_rank() not in active_ranks:
        _neutralise(tensor, op)
    # Gloo has no AVG, and NCCL's would round integers and divide by all ranks.
    is_divided_here = op == ReduceOp.AVG and (
        is_integer or active_ranks != ranks or is_gloo(tensor.device, group)
    )
    dist.all_reduce(tensor, op=ReduceOp.SUM if is_divided_here else op, group=group)
    if not is_divided_here:
        return tensor
    count = len(active_ranks)
    return tensor / count if is_integer else tensor.div_(count)


def _neutralise(tensor: Tensor, op: Any) -> None:
    """Fill the tensor with a value that does not change the result of the reduction."""
    if op in (ReduceOp.AVG, ReduceOp.SUM, ReduceOp.BOR, ReduceOp.BXOR):
        tensor.zero_()
    elif op == ReduceOp.BAND:
        tensor.zero_().bitwise_not_()
    elif op == ReduceOp.PRODUCT:
        tensor.fill_(1)
    elif op in (ReduceOp.MIN, ReduceOp.MAX):
        smallest, largest = _range_of(tensor.dtype)
        tensor.fill_(largest if op == ReduceOp.MIN else smallest)


def _range_of(dtype: torch.dtype) -> tuple[float, float]:
    """Return the smallest and the largest value that a dtype can represent."""
    if dtype.is_floating_point:
        return -math.inf, math.inf
    if dtype == torch.bool:
        return False, True
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max
