"""Synchronised BatchNorm on CPU, with torch's kernels for a single process and one exchange in each pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ddp_ext.batchnorm.statistics import (
    Running,
    at_least_float32,
    dense,
    has_large_offset,
    mean_and_var,
    merge,
)
from lightning_ddp_ext.batchnorm.sync_context import Phase, SyncContext
from lightning_ddp_ext.errors import BatchNormInputError


def batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running: Running, eps: float, context: SyncContext
) -> Tensor:
    """Normalise a batch (N, C, ...) by the statistics of all ranks' batches. Collective, and so is its backward.

    Raises:
        BatchNormInputError: all batches together have one value per channel.
        BatchNormMismatchError: another rank is in another layer.
    """
    x = dense(at_least_float32(input))
    mean, var = mean_and_var(x)
    # Each rank decides for its own share: what ranks exchange is the same either way.
    if x.dtype == torch.float32 and has_large_offset(mean, var, eps=eps):
        x = x.double()
        mean, var = mean_and_var(x)
    joint = merge(context.gather(Phase.FORWARD, [x.numel() / x.size(1)], mean, var))
    if joint.count == 1:
        raise BatchNormInputError(
            f"{context.name} needs more than 1 value per channel in training (the batches of all ranks together have "
            "1); use larger batches, or drop the last incomplete one"
        )
    running.update(joint)
    statistics = (torch.from_numpy(each).to(x.dtype) for each in (joint.mean, joint.var))
    weight, bias = (None if each is None else each.to(x.dtype) for each in (weight, bias))
    output: Tensor = _Normalise.apply(x, weight, bias, *statistics, joint.count, eps, context)  # type: ignore[no-untyped-call]
    return output.to(input.dtype)


def _normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias`` in one pass: BatchNorm in evaluation."""
    if x.numel() == 0:
        return torch.empty_like(x)
    return torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]


class _Normalise(torch.autograd.Function):
    """Normalises by given statistics, and differentiates as if they had been computed here from all ranks' inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: float,
        eps: float,
        context: SyncContext,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var)
        ctx.count, ctx.eps, ctx.context = count, eps, context
        return _normalised(x, weight, bias, mean, var, eps)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        ctx.context.refuse_double_backward()
        x, weight, mean, var = ctx.saved_tensors
        grad_weight, grad_bias = _parameter_gradients(grad_outputs[0], x, mean, var, ctx.eps)
        grad_x = None
        if ctx.needs_input_grad[0]:
            gathered = torch.from_numpy(ctx.context.gather(Phase.BACKWARD, grad_weight.numpy(), grad_bias.numpy()))
            means = (gathered.sum(0) / ctx.count).to(x.dtype).view(2, -1)
            scale = (var + ctx.eps).rsqrt()
            scale = scale if weight is None else scale * weight
            # scale * (dy - normalised x * mean(dy * normalised x) - mean(dy)), with means over all ranks' batches.
            factor, shift = -scale * means
            by_channel = scale.view([1, -1] + [1] * (x.dim() - 2))
            grad_x = _normalised(x, factor, shift, mean, var, ctx.eps).addcmul_(grad_outputs[0], by_channel)
        _, needs_weight, needs_bias, *others = ctx.needs_input_grad
        return grad_x, grad_weight if needs_weight else None, grad_bias if needs_bias else None, *[None] * len(others)


def _parameter_gradients(dy: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """This rank's sums of ``dy`` × normalised ``x``, and of ``dy``, per channel."""
    if x.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    wanted = [False, True, True]
    _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
        dy, x, None, mean, var, None, None, False, eps, wanted
    )
    return grad_weight, grad_bias
