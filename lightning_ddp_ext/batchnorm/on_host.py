"""Synchronised BatchNorm in CPU memory, with torch's own kernels for a single process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_ddp_ext.batchnorm.exchange import Doing, Peers
from lightning_ddp_ext.batchnorm.statistics import (
    Running,
    Statistics,
    dense,
    dtype_of,
    has_large_offset,
    merge,
    statistics_of,
    values_a_channel,
)
from lightning_ddp_ext.batchnorm.twice import differentiable_gradients, only_wanted
from lightning_ddp_ext.errors import BatchNormInputError


def batch_norm(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, running: Running, eps: float, peers: Peers
) -> Tensor:
    """Normalise a batch (N, C, ...) by the statistics of all ranks' batches together. Collective, as its backward is.

    Raises:
        BatchNormInputError: the batches together have one value a channel.
        BatchNormMismatchError: another rank is in another layer.
    """
    input = dense(input)
    with torch.no_grad():
        local = statistics_of(input)
        # Decided by each rank for its own share: what the ranks exchange is the same either way.
        in_double = input.dtype == torch.float32 and has_large_offset(local, eps)
        if in_double:
            local = statistics_of(input.double())
        joint = _joint(local, peers)
        running.update(joint)
    output: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
        input, weight, bias, joint.mean, joint.var, joint.count, eps, in_double, peers
    )
    return output


def _joint(local: Statistics, peers: Peers) -> Statistics:
    channels = len(local.mean)
    numbers = torch.cat([local.mean.new_tensor([local.count]), local.mean, local.var])
    gathered = peers.gather(numbers, Doing.FORWARD)
    joint = merge(gathered[:, :1], gathered[:, 1 : 1 + channels], gathered[:, 1 + channels :])
    if joint.count == 1:
        raise BatchNormInputError(
            f"{peers.name} needs more than 1 value per channel in training (the batches of all ranks together have 1); "
            "use larger batches, or drop the last incomplete one"
        )
    return joint


def _affine(input: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """``input * scale + shift`` by channel, in one pass: BatchNorm in evaluation, with nothing to normalise."""
    zeros = torch.zeros_like(scale)
    return torch.native_batch_norm(input, scale, shift, zeros, torch.ones_like(scale), False, 0.0, 0.0)[0]


class _Normalise(torch.autograd.Function):
    """Normalises by given statistics, and differentiates as if they had been computed from all ranks' inputs here."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: float,
        eps: float,
        in_double: bool,
        peers: Peers,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, mean, var)
        ctx.count, ctx.eps, ctx.in_double, ctx.peers = count, eps, in_double, peers
        if input.numel() == 0:
            return torch.empty_like(input)
        dtype = torch.float64 if in_double else dtype_of(input)
        x = input.double() if in_double else input
        scale = None if weight is None else weight.to(dtype)
        shift = None if bias is None else bias.to(dtype)
        output = torch.native_batch_norm(x, scale, shift, mean.to(dtype), var.to(dtype), False, 0.0, eps)[0]
        return output.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, var = ctx.saved_tensors
        gradients: tuple[Tensor | None, ...]
        if torch.is_grad_enabled():  # create_graph=True
            gradients = differentiable_gradients(grad_outputs[0], input, weight, ctx.eps, ctx.peers)
        else:
            gradients = _gradients(ctx, grad_outputs[0], input, weight, Statistics(mean, var, ctx.count))
        return only_wanted(gradients, ctx)


def _gradients(
    ctx: Any, grad_output: Tensor, input: Tensor, weight: Tensor | None, joint: Statistics
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dtype = torch.float64 if ctx.in_double else dtype_of(input)
    x, dy = input.to(dtype), grad_output.to(dtype)
    grad_weight, grad_bias = _sums(dy, x, joint, ctx.eps)
    grad_input = None
    if ctx.needs_input_grad[0]:
        numbers = torch.cat([grad_weight, grad_bias]).double()
        sums = ctx.peers.gather(numbers, Doing.BACKWARD).sum(0)
        grad_input = _input_gradient(dy, x, weight, joint, sums, ctx.eps).to(input.dtype)
    if weight is not None:
        grad_weight, grad_bias = grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)
    return grad_input, grad_weight, grad_bias


def _sums(dy: Tensor, x: Tensor, joint: Statistics, eps: float) -> tuple[Tensor, Tensor]:
    """This rank's sums of ``dy`` × normalised ``x``, and of ``dy``: the gradients of weight and bias."""
    mean, var = joint.mean.to(x.dtype), joint.var.to(x.dtype)
    if values_a_channel(x) == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    _, grad_weight, grad_bias = torch.ops.aten.native_batch_norm_backward(
        dy, x, None, mean, var, None, None, False, eps, [False, True, True]
    )
    return grad_weight, grad_bias


def _input_gradient(
    dy: Tensor, x: Tensor, weight: Tensor | None, joint: Statistics, sums: Tensor, eps: float
) -> Tensor:
    """``scale * (dy - mean(dy) - normalised * mean(dy * normalised))``, the means being those over all ranks."""
    if x.numel() == 0:
        return torch.zeros_like(x)
    by_normalised, by_one = (sums / joint.count).chunk(2)
    invstd = (joint.var + eps).rsqrt()
    scale = invstd if weight is None else invstd * weight.double()
    of_x = -scale * invstd * by_normalised
    shift = -scale * by_one - of_x * joint.mean
    gradient = _affine(x, of_x.to(x.dtype), shift.to(x.dtype))
    return gradient.addcmul_(dy, scale.to(x.dtype).view([1, -1] + [1] * (x.dim() - 2)))
