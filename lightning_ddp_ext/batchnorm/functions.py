"""Normalise a batch with the statistics of all ranks' batches together.

On CPU, torch's kernels for one process get statistics that are merged here. On CUDA,
torch's own function for several ranks does both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules._functions import SyncBatchNorm as TorchSyncBatchNorm

from lightning_ddp_ext.batchnorm.sync_context import SyncContext
from lightning_ddp_ext.errors import BatchNormError

Vector = NDArray[np.float64]

# With a mean of this many standard deviations, torch's error in float32 exceeds 1e-6.
_LARGE_OFFSET = 8.0
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def merge(parts: Vector) -> tuple[float, Vector, Vector]:
    """Merge the statistics of several batches.

    This is the pairwise merge of T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating
    formulae and a pairwise algorithm for computing sample variances" (1979), for any
    number of parts. It does not subtract large sums of squares.

    Args:
        parts: a row for each batch, (parts, 1 + 2C): the number of values per channel,
            means, and biased variances.

    Returns:
        The same three for all batches together.

    >>> count, mean, var = merge(np.array([[3.0, 1.0, 0.5], [1.0, 5.0, 0.0]]))
    >>> count, mean.item(), var.item()  # of three values around 1, and a 5
    (4.0, 2.0, 3.375)
    """
    counts = parts[:, :1]
    means, variances = parts[:, 1:].reshape(len(parts), 2, -1).swapaxes(0, 1)
    count = float(counts.sum())
    weights = counts / max(count, 1.0)  # all batches may be empty
    # The ranks must agree, but a matrix product's last bits depend on the processor.
    mean = (weights * means).sum(0)
    var = (weights * (variances + (means - mean) ** 2)).sum(0)
    return count, mean, var


class RunningStatistics(NamedTuple):
    """A layer's running ``mean`` and ``var`` (C).

    ``momentum`` is the weight of a new batch in them.
    """

    mean: Tensor
    var: Tensor
    momentum: float

    def add(self, mean: Vector, var: Vector) -> None:
        """Add a batch with this mean and unbiased variance, in place."""
        self.mean.lerp_(_as_tensor(mean, self.mean.dtype), self.momentum)
        self.var.lerp_(_as_tensor(var, self.var.dtype), self.momentum)


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
        x, mean_here, var_here = _measured(input, eps)
        parts = context.gather("forward", [x.numel() / x.size(1)], mean_here, var_here)
        count, mean, var = merge(parts)
        if count == 1:
            raise BatchNormError(
                f"{context.name} needs more than 1 value per channel in training (the batches of"
                " all ranks together have 1); use larger batches, or drop the incomplete last one"
            )
        if running is not None and count > 1:  # it is 0 if all batches are empty
            running.add(mean, var * (count / (count - 1)))
        batch = _NormalisedBatch(x, _as_tensor(mean, x.dtype), _as_tensor(var, x.dtype), eps)
        weight = None if weight is None else weight.to(x.dtype)
        bias = None if bias is None else bias.to(x.dtype)
        ctx.save_for_backward(x, weight, batch.mean, batch.var)
        ctx.count = max(count, 1.0)
        ctx.eps = eps
        ctx.context = context
        return batch.output(weight, bias).to(input.dtype)

    @staticmethod
    @once_differentiable
    @np.errstate(all="ignore")
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients. Collective if the input needs a gradient."""
        x, weight, mean, var = ctx.saved_tensors  # activation checkpointing allows one read
        needs_input, needs_weight, needs_bias, *others = ctx.needs_input_grad
        batch = _NormalisedBatch(x, mean, var, ctx.eps)
        dy = grad_outputs[0].to(x.dtype)
        grad_weight, grad_bias = batch.parameter_gradients(dy)
        grad_input = None
        if needs_input:
            sums_by_rank = ctx.context.gather("backward", grad_weight.numpy(), grad_bias.numpy())
            mean_of_dy_x_hat, mean_of_dy = (sums_by_rank.sum(0) / ctx.count).reshape(2, -1)
            grad_input = batch.input_gradient(dy, weight, mean_of_dy_x_hat, mean_of_dy)
        return (
            grad_input,
            grad_weight if needs_weight else None,
            grad_bias if needs_bias else None,
            *[None] * len(others),
        )


class SyncBatchNormOnCUDA(TorchSyncBatchNorm):
    """Normalise a batch as ``SyncBatchNormOnCPU`` does, with torch's function.

    This extends it to empty batches, and to any memory format and dtype. It relies on
    three details of torch's function: ``forward`` takes a process group and its size
    after the momentum, it saves the ranks' counts of values as the last tensor, and
    ``backward`` returns the gradients of input, weight and bias first.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running: RunningStatistics | None,
        eps: float,
        context: SyncContext,
    ) -> Tensor:
        """Normalise, and add the batch to the running statistics. Collective.

        If all batches together have one value per channel, the running statistics do
        not change; to raise an error, the host would have to wait for the GPU.
        """
        dtype = torch.promote_types(input.dtype, torch.float32)
        # An empty batch would send zeros in its own dtype, but other ranks send float32.
        x = input.to(dtype) if input.numel() == 0 else _dense(input)
        ctx.input_strides = x.stride()
        zeros = x.new_zeros(x.size(1))
        running = running or RunningStatistics(zeros, zeros, momentum=0.0)
        # The kernel always updates statistics, in place, also with those of no value. It
        # converts counts of values to their dtype, and float16 may be too small for them.
        mean = running.mean.to(dtype, copy=True)
        var = running.var.to(dtype, copy=True)
        output: Tensor = TorchSyncBatchNorm.forward(
            ctx,
            x,
            weight,
            bias,
            mean,
            var,
            eps,
            running.momentum,
            context.process_group or dist.group.WORLD,
            context.world_size,
        )
        has_several_values = ctx.to_save[-1].sum() > 1  # the ranks' counts of values
        running.mean.copy_(torch.where(has_several_values, mean, running.mean))
        running.var.copy_(torch.where(has_several_values, var, running.var))
        return output.to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients. Collective if the input needs a gradient."""
        dy = grad_outputs[0]
        if dy.stride() != ctx.input_strides:
            # Some kernels check only the input's memory format, or the gradient's.
            dy = dy.new_empty_strided(dy.shape, ctx.input_strides).copy_(dy)
        gradients: tuple[Tensor | None, ...] = TorchSyncBatchNorm.backward(ctx, dy)[:3]
        if dy.numel() == 0:  # torch then only takes part in the collective
            zeros = dy.new_zeros(dy.size(1))
            pairs = zip((dy, zeros, zeros), ctx.needs_input_grad, strict=False)
            gradients = tuple(zero if is_needed else None for zero, is_needed in pairs)
        return (*gradients, None, None, None)


def _measured(input: Tensor, eps: float) -> tuple[Tensor, Vector, Vector]:
    """Return a batch on CPU, in a dtype and format for the kernels, with mean and variance.

    A batch in float32 with a large mean is converted to float64. Each rank decides this
    alone, because the exchanged data have the same form.
    """
    x = _dense(input.to(torch.promote_types(input.dtype, torch.float32)))
    mean, var = _mean_and_var(x)
    if x.dtype == torch.float32 and (mean * mean > _LARGE_OFFSET**2 * (var + eps)).any():
        x = x.double()
        mean, var = _mean_and_var(x)
    return x, mean, var


def _dense(input: Tensor) -> Tensor:
    """Return the batch contiguous or in channels-last format, for fast kernels."""
    memory_format = _CHANNELS_LAST.get(input.dim(), torch.contiguous_format)
    return input if input.is_contiguous(memory_format=memory_format) else input.contiguous()


def _mean_and_var(x: Tensor) -> tuple[Vector, Vector]:
    """Return mean and biased variance (C) of a batch (N, C, ...); zeros if empty.

    The batch is in float32 or float64 on CPU.
    """
    if x.numel() == 0:
        return np.zeros(x.size(1)), np.zeros(x.size(1))
    mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
    return mean.numpy().astype(np.float64), var.numpy().astype(np.float64)


def _as_tensor(vector: Vector, dtype: torch.dtype) -> Tensor:
    """Return a vector as a tensor on CPU."""
    if dtype == torch.float32:  # torch's own conversion takes several times as long
        return torch.from_numpy(vector.astype(np.float32))
    return torch.from_numpy(vector).to(dtype)


class _NormalisedBatch(NamedTuple):
    """A batch on CPU with its statistics, for torch's kernels for one process.

    Attributes:
        x: the batch (N, C, ...).
        mean, var: the statistics of all ranks' batches (C), in the dtype of ``x``.
        eps: added to ``var``.
    """

    x: Tensor
    mean: Tensor
    var: Tensor
    eps: float

    def output(self, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return normalised ``x`` × ``weight`` + ``bias``."""
        return torch.native_batch_norm(
            self.x, weight, bias, self.mean, self.var, False, 0.0, self.eps
        )[0]

    def parameter_gradients(self, dy: Tensor) -> tuple[Tensor, Tensor]:
        """Return the channel sums of ``dy`` × normalised ``x``, and those of ``dy``."""
        if self.x.numel() == 0:  # the kernel would divide by zero
            return torch.zeros_like(self.mean), torch.zeros_like(self.mean)
        gradients = torch.ops.aten.native_batch_norm_backward(
            dy, self.x, None, self.mean, self.var, None, None, False, self.eps, [False, True, True]
        )
        return gradients[1], gradients[2]

    def input_gradient(
        self, dy: Tensor, weight: Tensor | None, mean_of_dy_x_hat: Vector, mean_of_dy: Vector
    ) -> Tensor:
        """Return the gradient of ``x``.

        It is ``weight / sqrt(var + eps) * (dy - x_hat * mean(dy * x_hat) - mean(dy))``,
        where ``x_hat`` is the normalised ``x``, and the means are over all ranks' batches.
        """
        scale = 1 / np.sqrt(self.var.numpy() + self.eps)
        if weight is not None:
            scale = scale * weight.detach().numpy()
        factor = _as_tensor(-scale * mean_of_dy_x_hat, self.x.dtype)
        shift = _as_tensor(-scale * mean_of_dy, self.x.dtype)
        scale_by_channel = _as_tensor(scale, self.x.dtype).view(-1, *[1] * (self.x.dim() - 2))
        return self.output(factor, shift).addcmul_(dy, scale_by_channel)
