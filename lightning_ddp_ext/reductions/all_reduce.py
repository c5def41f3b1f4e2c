"""Reduce a tensor over the ranks, without those that only take part in the collective.

Lightning's own reduction runs a barrier first, which this one does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_ddp_ext.ranks import is_gloo

# Each reduces the rows of a tensor.
_OPS: dict[Any, Callable[[Tensor], Tensor]] = {
    ReduceOp.SUM: lambda rows: rows.sum(0),
    ReduceOp.PRODUCT: lambda rows: rows.prod(0),
    ReduceOp.MIN: lambda rows: rows.amin(0),
    ReduceOp.MAX: lambda rows: rows.amax(0),
    ReduceOp.BAND: partial(reduce, torch.bitwise_and),
    ReduceOp.BOR: partial(reduce, torch.bitwise_or),
    ReduceOp.BXOR: partial(reduce, torch.bitwise_xor),
}


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
    ranks = dist.get_process_group_ranks(group)
    active = [index for index, rank in enumerate(ranks) if rank not in idle_ranks]
    are_some_idle = 0 < len(active) < len(ranks)
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    if op == ReduceOp.AVG and is_integer:
        tensor = tensor.to(torch.int64, copy=True)
    # Gloo has no AVG, and NCCL's would round integers.
    is_divided_here = op == ReduceOp.AVG and (
        is_integer or are_some_idle or is_gloo(tensor.device, group)
    )
    op = ReduceOp.SUM if is_divided_here else op
    if are_some_idle:
        rows = [torch.empty_like(tensor) for _ in ranks]
        dist.all_gather(rows, tensor.contiguous(), group=group)
        tensor.copy_(_OPS[op](torch.stack([rows[index] for index in active])))
    else:
        dist.all_reduce(tensor, op=op, group=group)
    if not is_divided_here:
        return tensor
    count = len(active) or len(ranks)
    return tensor / count if is_integer else tensor.div_(count)
