"""Reduce a tensor over the ranks that are not idle.

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
    name = reduce_op.upper() if isinstance(reduce_op, str) else ""
    op = getattr(ReduceOp, "AVG" if name == "MEAN" else name) if name else reduce_op
    ranks = set(dist.get_process_group_ranks(group))
    idle = ranks.intersection(idle_ranks) if not ranks.issubset(idle_ranks) else set()
    is_mean_of_integers = op == ReduceOp.AVG and not (
        tensor.is_floating_point() or tensor.is_complex()
    )
    if is_mean_of_integers:
        tensor = tensor.to(torch.int64, copy=True)
    if dist.get_rank() in idle:
        _neutralise(tensor, op)
    if op == ReduceOp.AVG and (idle or is_mean_of_integers or is_gloo(tensor.device, group)):
        # Gloo has no AVG.
        dist.all_reduce(tensor, op=ReduceOp.SUM, group=group)
        count = len(ranks) - len(idle)
        return tensor / count if is_mean_of_integers else tensor.div_(count)
    dist.all_reduce(tensor, op=op, group=group)
    return tensor


def _neutralise(tensor: Tensor, op: Any) -> None:
    """Fill the tensor with the neutral element of the reduction."""
    is_float = tensor.is_floating_point()
    if op in (ReduceOp.AVG, ReduceOp.SUM):
        tensor.zero_()
    elif op == ReduceOp.MIN:
        tensor.fill_(math.inf if is_float else torch.iinfo(tensor.dtype).max)
    elif op == ReduceOp.MAX:
        tensor.fill_(-math.inf if is_float else torch.iinfo(tensor.dtype).min)
