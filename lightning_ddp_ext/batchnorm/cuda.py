"""Compute synchronised BatchNorm on CUDA with torch's function.

This module extends it to empty batches and any memory format.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules._functions import SyncBatchNorm as TorchSyncBatchNorm

from lightning_ddp_ext.batchnorm.statistics import Running, dense
from lightning_ddp_ext.batchnorm.sync_context import SyncContext


def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running: Running,
    eps: float,
    context: SyncContext,
) -> Tensor:
    """Normalise a batch (N, C, ...) with the statistics of all ranks' batches.

    Collective, as is its backward pass.
    """
    # The kernel converts counts to this dtype, and float16 may be too small for them.
    dtype = torch.promote_types(input.dtype, torch.float32)
    # An empty batch would send zeros in its own dtype, but other ranks send float32.
    x = input.to(dtype) if input.numel() == 0 else dense(input)
    kept = [value for value in (running.mean, running.var) if value is not None]
    mean, var = [value.to(dtype) for value in kept] or input.new_zeros(
        (2, input.size(1)), dtype=dtype
    )
    group = context.process_group or dist.group.WORLD
    output: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, mean, var, eps, running.momentum, group, context.world_size
    )
    for value, updated in zip(kept, (mean, var), strict=False):
        value.copy_(updated)
    return output.to(input.dtype)


class _Normalise(TorchSyncBatchNorm):
    """Extends torch's function to empty batches and gradients in any memory format."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        ctx.strides = arguments[0].stride()
        output: Tensor = TorchSyncBatchNorm.forward(ctx, *arguments)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        dy = grad_outputs[0]
        if dy.stride() != ctx.strides:
            # Some kernels check only the input's memory format, or the gradient's.
            dy = dy.new_empty_strided(dy.shape, ctx.strides).copy_(dy)
        gradients = TorchSyncBatchNorm.backward(ctx, dy)[:3]
        if dy.numel() == 0:  # torch has no kernel for an empty batch
            gradients = dy, dy.new_zeros(dy.size(1)), dy.new_zeros(dy.size(1))
        needed = ctx.needs_input_grad[:3]
        others = ctx.needs_input_grad[3:]
        wanted = (
            value if is_needed else None for value, is_needed in zip(gradients, needed, strict=True)
        )
        return *wanted, *[None] * len(others)
