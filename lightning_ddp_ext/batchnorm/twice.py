"""The gradients of a synchronised BatchNorm, as functions that can be differentiated once more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_ext.batchnorm.exchange import Doing, Peers
from lightning_ddp_ext.batchnorm.statistics import dtype_of, values_a_channel


class _SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' vectors; its gradient is that of the sum of all ranks' losses."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return peers.gather(vector.double(), Doing.BACKWARD).sum(0).to(vector.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        return sum_over_ranks(grad_outputs[0], ctx.peers), None


def sum_over_ranks(vector: Tensor, peers: Peers) -> Tensor:
    """The sum of all ranks' vectors (n), differentiable. Collective, and so is its backward."""
    total: Tensor = _SumOverRanks.apply(vector, peers)  # type: ignore[no-untyped-call]
    return total


def differentiable_gradients(
    grad_output: Tensor, input: Tensor, weight: Tensor | None, eps: float, peers: Peers
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias, computed anew from what they depend on. Collective.

    Slower than what an ordinary backward does, with three collectives of its own, and more when it is differentiated:
    for ``create_graph=True``.
    """
    dims = [0, *range(2, input.dim())]
    shape = [1, -1] + [1] * (input.dim() - 2)
    x, dy = input.to(dtype_of(input)), grad_output.to(dtype_of(input))
    channels = input.size(1)

    count = x.new_full((1,), values_a_channel(input))
    joint = sum_over_ranks(torch.cat([x.sum(dims), count]), peers)
    count = joint[channels:].detach().clamp(min=1.0)
    centred = x - (joint[:channels] / count).view(shape)
    var = sum_over_ranks(centred.square().sum(dims), peers) / count
    invstd = (var + eps).rsqrt()
    normalised = centred * invstd.view(shape)

    grad_bias, grad_weight = dy.sum(dims), (dy * normalised).sum(dims)
    sums = sum_over_ranks(torch.cat([grad_bias, grad_weight]), peers) / count
    centred_grad = dy - sums[:channels].view(shape) - normalised * sums[channels:].view(shape)
    scale = invstd if weight is None else invstd * weight
    return (centred_grad * scale.view(shape)).to(input.dtype), grad_weight, grad_bias


def only_wanted(gradients: Sequence[Tensor | None], ctx: Any) -> tuple[Tensor | None, ...]:
    """What a backward returns for all arguments of its forward, the first of which are those of the gradients."""
    needed = ctx.needs_input_grad
    nothing = [None] * (len(needed) - len(gradients))
    return tuple(value if is_needed else None for value, is_needed in zip([*gradients, *nothing], needed, strict=True))
