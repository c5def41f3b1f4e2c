"""Synchronised BatchNorm on CPU, with torch's kernels for a single process and one exchange in each pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ddp_ext.batchnorm.double_backward import differentiable_gradients, only_needed
from lightning_ddp_ext.batchnorm.statistics import (
    Running,
    Statistics,
    at_least_float32,
    dense,
    has_large_offset,
    merge,
    statistics_of,
)
from lightning_ddp_ext.batchnorm.sync_context import Phase, SyncContext
from lightning_ddp_ext.errors import BatchNormInputError

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running: Running, eps: float, context: SyncContext
) -> Tensor:
    """Normalise a batch (N, C, ...) by the statistics of all ranks' batches. Collective, and so is its backward.

    Raises:
        BatchNormInputError: all batches together have one value per channel.
        BatchNormMismatchError: another rank is in another layer.
    """
    x = dense(at_least_float32(input))
    local = statistics_of(x)
    # Each rank decides for its own share: what ranks exchange is the same either way.
    if x.dtype == torch.float32 and has_large_offset(local, eps=eps):
        x = x.double()
        local = statistics_of(x)
    joint = _joint_statistics(local, context)
    running.update(joint)
    output: Tensor = _Normalise.apply(x, weight, bias, joint, eps, context)  # type: ignore[no-untyped-call]
    return output.to(input.dtype)


def _joint_statistics(local: Statistics, context: SyncContext) -> Statistics:
    channels = len(local.mean)
    numbers = torch.cat([local.mean.new_tensor([local.count]), local.mean, local.var])
    gathered = context.gather(numbers, Phase.FORWARD)
    joint = merge(gathered[:, :1], gathered[:, 1 : 1 + channels], gathered[:, 1 + channels :])
    if joint.count == 1:
        raise BatchNormInputError(
            f"{context.name} needs more than 1 value per channel in training (the batches of all ranks together have "
            "1); use larger batches, or drop the last incomplete one"
        )
    return joint


class _Normalise(torch.autograd.Function):
    """Normalises by given statistics, and differentiates as if they had been computed here from all ranks' inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        joint: Statistics,
        eps: float,
        context: SyncContext,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.joint, ctx.eps, ctx.context = joint, eps, context
        if x.numel() == 0:
            return torch.empty_like(x)
        scale = None if weight is None else weight.to(x.dtype)
        shift = None if bias is None else bias.to(x.dtype)
        mean, var = joint.mean.to(x.dtype), joint.var.to(x.dtype)
        return torch.native_batch_norm(x, scale, shift, mean, var, False, 0.0, eps)[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradients: Gradients
        if torch.is_grad_enabled():  # create_graph=True
            gradients = differentiable_gradients(grad_outputs[0], x, weight, eps=ctx.eps, context=ctx.context)
        else:
            gradients = _gradients(ctx, grad_outputs[0], x, weight)
        return only_needed(gradients, ctx)


def _gradients(ctx: Any, dy: Tensor, x: Tensor, weight: Tensor | None) -> Gradients:
    mean, var = ctx.joint.mean.to(x.dtype), ctx.joint.var.to(x.dtype)
    # This rank's sums of ``dy`` × normalised ``x``, and of ``dy``.
    grad_weight, grad_bias = torch.zeros_like(mean), torch.zeros_like(mean)
    if x.numel() > 0:
        _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
            dy, x, None, mean, var, None, None, False, ctx.eps, [False, True, True]
        )
    if not ctx.needs_input_grad[0]:
        return None, grad_weight, grad_bias
    sums = ctx.context.gather(torch.cat([grad_weight, grad_bias]).double(), Phase.BACKWARD).sum(0)
    return _input_gradient(ctx, dy, x, weight, sums), grad_weight, grad_bias


def _input_gradient(ctx: Any, dy: Tensor, x: Tensor, weight: Tensor | None, sums: Tensor) -> Tensor:
    """``scale * (dy - mean(dy) - normalised * mean(dy * normalised))``, with means over all ranks' batches."""
    if x.numel() == 0:
        return torch.zeros_like(x)
    by_normalised, by_one = (sums / ctx.joint.count).chunk(2)
    invstd = (ctx.joint.var + ctx.eps).rsqrt()
    scale = invstd if weight is None else invstd * weight.double()
    factor = -scale * invstd * by_normalised
    shift = -scale * by_one - factor * ctx.joint.mean
    # ``x * factor + shift`` by channel in one pass: BatchNorm in evaluation, with nothing to normalise.
    zeros = torch.zeros_like(scale, dtype=x.dtype)
    gradient = torch.native_batch_norm(
        x, factor.to(x.dtype), shift.to(x.dtype), zeros, torch.ones_like(zeros), False, 0.0, 0.0
    )[0]
    return gradient.addcmul_(dy, scale.to(x.dtype).view([1, -1] + [1] * (x.dim() - 2)))
