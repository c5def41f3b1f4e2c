"""Compute synchronised BatchNorm on CPU, with one exchange in each pass.

The kernels are those of torch for a single process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_ddp_ext.batchnorm.statistics import (
    RunningStatistics,
    Vector,
    as_tensor,
    dense,
    has_large_offset,
    mean_and_var,
    merge,
)
from lightning_ddp_ext.batchnorm.sync_context import SyncContext
from lightning_ddp_ext.errors import BatchNormError


class SyncBatchNormOnCPU(torch.autograd.Function):
    """Normalise a batch (N, C, ...) with the statistics of all ranks' batches."""

    @staticmethod
    @np.errstate(all="ignore")  # torch does not warn about infinities in a diverging network either
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: RunningStatistics | None,
        eps: float,
        context: SyncContext,
    ) -> Tensor:
        """Normalise, and add the batch to the running statistics. Collective.

        Raises:
            BatchNormError: all batches together have one value per channel, or another
                rank is in a different layer.
        """
        x = dense(input.to(torch.promote_types(input.dtype, torch.float32)))
        mean, var = mean_and_var(x)
        # Each rank may decide this for itself: the exchanged data have the same form.
        if x.dtype == torch.float32 and has_large_offset(mean, var, eps=eps):
            x = x.double()
            mean, var = mean_and_var(x)
        joint = merge(context.gather("forward", [x.numel() / x.size(1)], mean, var))
        if joint.count == 1:
            raise BatchNormError(
                f"{context.name} needs more than 1 value per channel in training (the batches of"
                " all ranks together have 1); use larger batches, or drop the incomplete last one"
            )
        if running is not None:
            running.update(joint)
        mean_of_all = as_tensor(joint.mean, x.dtype)
        var_of_all = as_tensor(joint.var, x.dtype)
        weight = None if weight is None else weight.to(x.dtype)
        bias = None if bias is None else bias.to(x.dtype)
        ctx.save_for_backward(x, weight, mean_of_all, var_of_all)
        ctx.count = max(joint.count, 1.0)  # it is 0 if the batches of all ranks are empty
        ctx.eps = eps
        ctx.context = context
        output = _normalise(x, weight, bias, mean_of_all, var_of_all, eps)
        return output.to(input.dtype)

    @staticmethod
    @once_differentiable
    @np.errstate(all="ignore")
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients. Collective if the input needs a gradient."""
        x, weight, mean, var = ctx.saved_tensors  # activation checkpointing allows one read
        needs_input, needs_weight, needs_bias, *others = ctx.needs_input_grad
        dy = grad_outputs[0].to(x.dtype)
        grad_weight, grad_bias = _parameter_gradients(dy, x, mean, var, ctx.eps)
        grad_input = None
        if needs_input:
            sums_by_rank = ctx.context.gather("backward", grad_weight.numpy(), grad_bias.numpy())
            mean_of_dy_x_hat, mean_of_dy = (sums_by_rank.sum(0) / ctx.count).reshape(2, -1)
            grad_input = _input_gradient(
                dy, x, weight, mean, var, ctx.eps, mean_of_dy_x_hat, mean_of_dy
            )
        return (
            grad_input,
            grad_weight if needs_weight else None,
            grad_bias if needs_bias else None,
            *[None] * len(others),
        )


def _normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float
) -> Tensor:
    """Return normalised ``x`` × ``weight`` + ``bias``."""
    outputs = torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)
    return outputs[0]


def _parameter_gradients(
    dy: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the channel sums of ``dy`` × normalised ``x``, and those of ``dy``."""
    if x.numel() == 0:  # the kernel would divide by zero
        return torch.zeros_like(mean), torch.zeros_like(mean)
    wanted = [False, True, True]
    gradients = torch.ops.aten.native_batch_norm_backward(
        dy, x, None, mean, var, None, None, False, eps, wanted
    )
    return gradients[1], gradients[2]


def _input_gradient(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    var: Tensor,
    eps: float,
    mean_of_dy_x_hat: Vector,
    mean_of_dy: Vector,
) -> Tensor:
    """Return the gradient of the input.

    It is ``weight / sqrt(var + eps) * (dy - x_hat * mean(dy * x_hat) - mean(dy))``, where
    ``x_hat`` is the normalised input, and the means are over all ranks' batches.
    """
    scale = 1 / np.sqrt(var.numpy() + eps)
    if weight is not None:
        scale = scale * weight.detach().numpy()
    factor = as_tensor(-scale * mean_of_dy_x_hat, x.dtype)
    shift = as_tensor(-scale * mean_of_dy, x.dtype)
    gradient = _normalise(x, factor, shift, mean, var, eps)
    scale_by_channel = as_tensor(scale, x.dtype).view(-1, *[1] * (x.dim() - 2))
    return gradient.addcmul_(dy, scale_by_channel)
