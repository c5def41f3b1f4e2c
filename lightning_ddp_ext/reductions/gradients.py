"""Average the gradients of parameters over the ranks, after a backward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_PER_MESSAGE = 1 << 25  # bytes, as in DDP's buckets


def average_gradients(parameters: Iterable[Tensor]) -> None:
    """Replace each parameter's gradient by its mean over all ranks.

    A rank without a gradient for a parameter counts as zero, as with DDP's
    ``find_unused_parameters``; a parameter without a gradient on every rank keeps none.
    Collective: every rank must call it with the same parameters, in the same order.
    """
    for bucket in _buckets(parameters):
        _average(bucket)


def _average(bucket: Sequence[Tensor]) -> None:
    own = [torch.zeros_like(each) if each.grad is None else each.grad.to_dense() for each in bucket]
    is_used = torch.tensor([each.grad is not None for each in bucket]).to(own[0])
    message = torch.cat([*(each.flatten() for each in own), is_used])
    dist.all_reduce(message.div_(dist.get_world_size()))  # in DDP's order of operations
    *means, used = message.split([*(each.numel() for each in bucket), len(bucket)])
    for parameter, mean, share in zip(bucket, means, used, strict=True):
        value = mean.view_as(parameter)
        if parameter.grad is None:
            parameter.grad = value.clone() if share > 0 else None
        elif parameter.grad.is_sparse:
            parameter.grad = value.to_sparse(parameter.grad.sparse_dim())
        else:
            parameter.grad.copy_(value)


def _buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters of the same type and device, as many as fit into a message."""
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for each in parameters:
        bucket = buckets[each.dtype, each.device]
        if bucket and sum(other.nbytes for other in bucket) + each.nbytes > _PER_MESSAGE:
            yield [*bucket]
            bucket.clear()
        bucket.append(each)
    yield from buckets.values()
