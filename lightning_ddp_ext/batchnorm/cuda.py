"""Compute synchronised BatchNorm on CUDA with torch's function.

This module extends it to empty batches, any memory format and any dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules._functions import SyncBatchNorm as TorchSyncBatchNorm

from lightning_ddp_ext.batchnorm.statistics import RunningStatistics, dense
from lightning_ddp_ext.batchnorm.sync_context import SyncContext


def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: RunningStatistics | None,
    eps: float,
    context: SyncContext,
) -> Tensor:
    """Normalise a batch (N, C, ...) with the statistics of all ranks' batches.

    The batch is added to the running statistics, if there are any. Collective, as is
    the backward pass.
    """
    dtype = torch.promote_types(input.dtype, torch.float32)
    # An empty batch would send zeros in its own dtype, but other ranks send float32.
    x = input.to(dtype) if input.numel() == 0 else dense(input)
    group = context.process_group or dist.group.WORLD
    if running is None:  # the kernel always updates some
        mean, var = input.new_zeros((2, input.size(1)), dtype=dtype)
        running = RunningStatistics(mean, var, momentum=0.0)
    # The kernel updates statistics in place. It also converts counts of values to their
    # dtype, and float16 may be too small for them.
    mean = running.mean.to(dtype)
    var = running.var.to(dtype)
    output: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, mean, var, eps, running.momentum, group, context.world_size
    )
    running.mean.copy_(mean)
    running.var.copy_(var)
    return output.to(input.dtype)


class _Normalise(TorchSyncBatchNorm):
    """Extends torch's function to empty batches and gradients in any memory format."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        ctx.input_strides = arguments[0].stride()
        output: Tensor = TorchSyncBatchNorm.forward(ctx, *arguments)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        dy = grad_outputs[0]
        if dy.stride() != ctx.input_strides:
            # Some kernels check only the input's memory format, or the gradient's.
            dy = dy.new_empty_strided(dy.shape, ctx.input_strides).copy_(dy)
        gradients: tuple[Tensor | None, ...] = TorchSyncBatchNorm.backward(ctx, dy)
        if dy.numel() > 0:
            return gradients
        # For an empty batch, torch only takes part in the collective.
        zeros = dy, dy.new_zeros(dy.size(1)), dy.new_zeros(dy.size(1)), *gradients[3:]
        pairs = zip(zeros, ctx.needs_input_grad, strict=True)
        return tuple(zero if is_needed else None for zero, is_needed in pairs)
