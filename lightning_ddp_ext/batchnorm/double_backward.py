"""The gradients of a synchronised BatchNorm as functions that can be differentiated once more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.batchnorm.statistics import at_least_float32, values_per_channel
from lightning_ddp_ext.batchnorm.sync_context import SyncContext


class _AllReduce(torch.autograd.Function):
    """The sum of all ranks' tensors; its gradient is that of the sum of all ranks' losses."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = tensor.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return _all_reduce(grad_outputs[0], ctx.group), None


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    total: Tensor = _AllReduce.apply(tensor, group)  # type: ignore[no-untyped-call]
    return total


def differentiable_gradients(
    grad_output: Tensor, input: Tensor, weight: Tensor | None, *, eps: float, context: SyncContext
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias, for ``create_graph=True``. Collective, and so is each of their backwards.

    They are computed anew from what they depend on, with three collectives: slower than an ordinary backward.
    """
    dims = [0, *range(2, input.dim())]
    shape = [1, -1] + [1] * (input.dim() - 2)
    x, dy = at_least_float32(input), at_least_float32(grad_output)
    channels, group = input.size(1), context.process_group

    count = x.new_full((1,), values_per_channel(input))
    joint = _all_reduce(torch.cat([x.sum(dims), count]), group)
    count = joint[channels:].detach().clamp(min=1.0)
    centred = x - (joint[:channels] / count).view(shape)
    var = _all_reduce(centred.square().sum(dims), group) / count
    invstd = (var + eps).rsqrt()
    normalised = centred * invstd.view(shape)

    grad_bias, grad_weight = dy.sum(dims), (dy * normalised).sum(dims)
    sums = _all_reduce(torch.cat([grad_bias, grad_weight]), group) / count
    centred_grad = dy - sums[:channels].view(shape) - normalised * sums[channels:].view(shape)
    scale = invstd if weight is None else invstd * weight
    return (centred_grad * scale.view(shape)).to(input.dtype), grad_weight, grad_bias


def only_needed(gradients: Sequence[Tensor | None], ctx: Any) -> tuple[Tensor | None, ...]:
    """What a backward returns: the gradients that are needed, and ``None`` for all other arguments of its forward."""
    padded = [*gradients, *[None] * (len(ctx.needs_input_grad) - len(gradients))]
    return tuple(value if needed else None for value, needed in zip(padded, ctx.needs_input_grad, strict=True))
