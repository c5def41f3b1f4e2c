"""Average the gradients of parameters over the ranks, after a backward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_BUCKET_BYTES = 25 << 20  # as in DDP's buckets


def average_gradients(parameters: Iterable[Tensor]) -> None:
    """Replace each parameter's gradient by its mean over all ranks.

    A rank without a gradient for a parameter counts as zero, as with DDP's
    ``find_unused_parameters``; a parameter without a gradient on every rank keeps none.
    Collective: every rank must call it with the same parameters, in the same order.
    """
    for bucket in _buckets(parameters):
        message = _pack(bucket)
        dist.all_reduce(message.div_(dist.get_world_size()))  # in DDP's order of operations
        sizes = [parameter.numel() for parameter in bucket]
        *means, fractions = message.split([*sizes, len(bucket)])
        # One wait for the device; a fraction is complex if the parameters are.
        for parameter, mean, fraction in zip(bucket, means, fractions.tolist(), strict=True):
            _set_gradient(parameter, mean.view_as(parameter), is_used_anywhere=bool(fraction))


def _buckets(parameters: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield parameters of the same type and device, as many as fit into a message."""
    buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for parameter in parameters:
        bucket = buckets[parameter.dtype, parameter.device]
        size = sum(other.nbytes for other in bucket) + parameter.nbytes
        if bucket and size > _BUCKET_BYTES:
            yield [*bucket]
            bucket.clear()
        bucket.append(parameter)
    yield from buckets.values()


def _pack(bucket: Sequence[Tensor]) -> Tensor:
    """Return the gradients in one vector, and for each parameter whether it has one."""
    gradients = [
        torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()
        for parameter in bucket
    ]
    has_gradient = torch.tensor([parameter.grad is not None for parameter in bucket])
    return torch.cat([*map(torch.flatten, gradients), has_gradient.to(gradients[0])])


def _set_gradient(parameter: Tensor, mean: Tensor, *, is_used_anywhere: bool) -> None:
    if parameter.grad is None:
        parameter.grad = mean.clone() if is_used_anywhere else None
    elif parameter.grad.is_sparse:
        parameter.grad = mean.to_sparse(parameter.grad.sparse_dim())
    else:
        parameter.grad.copy_(mean)
