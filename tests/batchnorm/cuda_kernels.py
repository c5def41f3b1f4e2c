"""Torch's CUDA kernels of SyncBatchNorm in plain torch, for CPU tensors: what calls them is tested without a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.batchnorm.joined import rows


def install() -> torch.library.Library:
    """Put the kernels in place for as long as the library is kept."""
    library = torch.library.Library("aten", "IMPL")
    kernels = (
        batch_norm_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    )
    for kernel in kernels:
        library.impl(kernel.__name__, kernel, "CPU")
    return library


def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = rows(input).double()
    return _at_least_float32(input, x.mean(0)), _at_least_float32(input, (x.var(0, correction=0) + eps).rsqrt())


def batch_norm_gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    assert mean.dtype == counts.dtype == running_mean.dtype, "the kernel reads all of them as one type"
    weights = (counts / counts.sum()).double().unsqueeze(1)
    joint = (weights * mean).sum(0)
    var = (weights * (invstd.double() ** -2 - eps + (mean - joint).square())).sum(0)
    running_mean.lerp_(joint.to(mean.dtype), momentum)
    running_var.lerp_((var * counts.sum() / (counts.sum() - 1)).to(mean.dtype), momentum)
    return joint.to(mean.dtype), (var + eps).rsqrt().to(mean.dtype)


def batch_norm_elemt(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    weight, bias = (None if each is None else _by_channel(each, input) for each in (weight, bias))
    output = (input - _by_channel(mean, input)) * _by_channel(invstd, input)
    output = output if weight is None else output * weight
    return (output if bias is None else output + bias).to(input.dtype)


def batch_norm_backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert grad_out.stride() == input.stride(), "the kernel reads both in one memory format"
    sum_dy = rows(grad_out).double().sum(0)
    sum_dy_xmu = (rows(grad_out) * (rows(input) - mean)).double().sum(0)
    of_weight, of_bias = (
        value.to(mean.dtype if weight is None else weight.dtype) for value in (sum_dy_xmu * invstd, sum_dy)
    )
    return sum_dy.to(mean.dtype), sum_dy_xmu.to(mean.dtype), of_weight, of_bias


def batch_norm_backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    scale = _by_channel(invstd if weight is None else invstd * weight, input)
    factor = _by_channel(invstd.square() * sum_dy_xmu / count.sum(), input)
    shift = _by_channel(sum_dy / count.sum(), input)
    return (scale * (grad_out - shift - (input - _by_channel(mean, input)) * factor)).to(input.dtype)


def _at_least_float32(input: Tensor, value: Tensor) -> Tensor:
    return value.to(torch.promote_types(input.dtype, torch.float32))


def _by_channel(value: Tensor, input: Tensor) -> Tensor:
    return value.view([1, -1] + [1] * (input.dim() - 2))
