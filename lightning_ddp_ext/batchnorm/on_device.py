"""Synchronised BatchNorm on an accelerator, with the kernels that torch's own SyncBatchNorm uses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ddp_ext.batchnorm.exchange import Doing, Peers
from lightning_ddp_ext.batchnorm.statistics import Running, dense, dtype_of, values_a_channel
from lightning_ddp_ext.batchnorm.twice import differentiable_gradients, only_wanted


def batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running: Running, eps: float, peers: Peers
) -> Tensor:
    """Normalise a batch (N, C, ...) by the statistics of all ranks' batches together. Collective, as its backward is.

    The host does not wait for the device.
    """
    output: Tensor = _Normalise.apply(dense(input), weight, bias, running, eps, peers)  # type: ignore[no-untyped-call]
    return output


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: Running,
        eps: float,
        peers: Peers,
    ) -> Tensor:
        counts, means, invstds = _gather(input, eps, peers)
        mean, invstd = _joint(counts, means, invstds, running, eps)
        ctx.save_for_backward(input, weight, mean, invstd, counts)
        ctx.eps, ctx.peers = eps, peers
        if input.numel() == 0:
            return torch.empty_like(input)
        return torch.batch_norm_elemt(input, weight, bias, mean, invstd, eps)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, invstd, counts = ctx.saved_tensors
        gradients: tuple[Tensor | None, ...]
        if torch.is_grad_enabled():  # create_graph=True
            gradients = differentiable_gradients(grad_outputs[0], input, weight, ctx.eps, ctx.peers)
        elif input.numel() == 0:
            gradients = _take_part_with_nothing(ctx, input, mean)
        else:
            gradients = _gradients(ctx, _laid_out_as(input, grad_outputs[0]), input, weight, mean, invstd, counts)
        return only_wanted(gradients, ctx)


def _gather(input: Tensor, eps: float, peers: Peers) -> tuple[Tensor, Tensor, Tensor]:
    """Counts (ranks), means (ranks, C) and inverse deviations (ranks, C) of all ranks' batches."""
    channels, dtype = input.size(1), dtype_of(input)
    if input.numel() > 0:
        mean, invstd = torch.batch_norm_stats(input, eps)
        count = mean.new_full((1,), values_a_channel(input))
    else:
        # An inverse deviation above zero: what the kernel multiplies by nothing stays finite.
        mean = torch.zeros(channels, dtype=dtype, device=input.device)
        invstd = torch.ones_like(mean)
        count = mean.new_zeros(1)
    gathered = peers.gather(torch.cat([count, mean, invstd]), Doing.FORWARD)
    means, invstds = gathered[:, 1:].chunk(2, dim=1)
    return gathered[:, 0], means.contiguous(), invstds.contiguous()


def _joint(counts: Tensor, means: Tensor, invstds: Tensor, running: Running, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation (C) of all ranks' batches together, which are taken into the running statistics."""
    # The kernel has one type for counts and running statistics; counts in float16 could be infinite.
    kept = [None if value is None else value.to(means.dtype) for value in (running.mean, running.var)]
    mean, invstd = torch.batch_norm_gather_stats_with_counts(
        means, means, invstds, kept[0], kept[1], running.momentum, eps, _above_zero(counts)
    )
    for value, updated in zip((running.mean, running.var), kept, strict=True):
        if value is not None and updated is not None and value is not updated:
            value.copy_(updated)
    return mean, invstd


def _above_zero(counts: Tensor) -> Tensor:
    """Counts that the kernel can divide by.

    Leaving empty shares out, as torch does, makes the host wait for the device in every layer:
    https://github.com/pytorch/pytorch/issues/78549.
    """
    return counts.clamp(min=torch.finfo(counts.dtype).tiny)


def _laid_out_as(input: Tensor, gradient: Tensor) -> Tensor:
    """The gradient in the input's memory format: some kernels look at that of only one of the two."""
    return gradient if gradient.stride() == input.stride() else torch.empty_like(input).copy_(gradient)


def _gradients(
    ctx: Any, dy: Tensor, input: Tensor, weight: Tensor | None, mean: Tensor, invstd: Tensor, counts: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    needed = ctx.needs_input_grad
    sum_dy, sum_dy_xmu, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
        dy, input, mean, invstd, weight, needed[0], needed[1], needed[2]
    )
    if not needed[0]:
        return None, grad_weight, grad_bias
    sums = ctx.peers.gather(torch.cat([sum_dy, sum_dy_xmu]), Doing.BACKWARD).sum(0)
    scale = weight if weight is None else weight.to(mean.dtype)
    sum_dy, sum_dy_xmu = sums.chunk(2)
    grad_input = torch.batch_norm_backward_elemt(
        dy, input, mean, invstd, scale, sum_dy, sum_dy_xmu, counts.to(torch.int32)
    )
    return grad_input, grad_weight, grad_bias


def _take_part_with_nothing(ctx: Any, input: Tensor, mean: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if ctx.needs_input_grad[0]:
        ctx.peers.gather(mean.new_zeros(2 * len(mean)), Doing.BACKWARD)
    return torch.zeros_like(input), torch.zeros_like(mean), torch.zeros_like(mean)
