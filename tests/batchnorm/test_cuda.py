"""What the layer does on CUDA, without a GPU: torch's kernels of SyncBatchNorm in plain torch, for CPU tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_ddp_ext import SyncBatchNorm
from lightning_ddp_ext.batchnorm import cuda
from tests.batchnorm.test_joined_batch import Way, all_deviations, rows
from tests.harness.ranks import run_ranks


def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x = rows(input).double()
    return _at_least_float32(input, x.mean(0)), _at_least_float32(input, (x.var(0, correction=0) + eps).rsqrt())


def batch_norm_gather_stats_with_counts(*arguments: Any) -> tuple[Tensor, Tensor]:
    _, mean, invstd, running_mean, running_var, momentum, eps, counts = arguments
    assert mean.dtype == counts.dtype == running_mean.dtype, "the kernel reads all of them as one type"
    weights = (counts / counts.sum()).double().unsqueeze(1)
    joint = (weights * mean).sum(0)
    var = (weights * (invstd.double() ** -2 - eps + (mean - joint).square())).sum(0)
    running_mean.lerp_(joint.to(mean.dtype), momentum)
    running_var.lerp_((var * counts.sum() / (counts.sum() - 1)).to(mean.dtype), momentum)
    return joint.to(mean.dtype), (var + eps).rsqrt().to(mean.dtype)


def batch_norm_elemt(input: Tensor, *arguments: Any) -> Tensor:
    weight, bias, mean, invstd, _ = arguments
    weight, bias = (None if each is None else _by_channel(each, input) for each in (weight, bias))
    output = (input - _by_channel(mean, input)) * _by_channel(invstd, input)
    output = output if weight is None else output * weight
    return (output if bias is None else output + bias).to(input.dtype)


def batch_norm_backward_reduce(grad_out: Tensor, input: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    mean, invstd, weight, *_ = arguments
    assert grad_out.stride() == input.stride(), "the kernel reads both in one memory format"
    sum_dy = rows(grad_out).double().sum(0)
    sum_dy_xmu = (rows(grad_out) * (rows(input) - mean)).double().sum(0)
    of_weight, of_bias = (
        value.to(mean.dtype if weight is None else weight.dtype) for value in (sum_dy_xmu * invstd, sum_dy)
    )
    return sum_dy.to(mean.dtype), sum_dy_xmu.to(mean.dtype), of_weight, of_bias


def batch_norm_backward_elemt(grad_out: Tensor, input: Tensor, *arguments: Any) -> Tensor:
    mean, invstd, weight, sum_dy, sum_dy_xmu, count = arguments
    scale = _by_channel(invstd if weight is None else invstd * weight, input)
    factor = _by_channel(invstd.square() * sum_dy_xmu / count.sum(), input)
    shift = _by_channel(sum_dy / count.sum(), input)
    return (scale * (grad_out - shift - (input - _by_channel(mean, input)) * factor)).to(input.dtype)


def _at_least_float32(input: Tensor, value: Tensor) -> Tensor:
    return value.to(torch.promote_types(input.dtype, torch.float32))


def _by_channel(value: Tensor, input: Tensor) -> Tensor:
    return value.view([1, -1] + [1] * (input.dim() - 2))


KERNELS = (
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
)


class ByCudaKernels(SyncBatchNorm):
    """Takes the way of CUDA tensors, with kernels for the CPU."""

    def _normalise(self, input: Tensor) -> Tensor:
        return cuda.batch_norm(input, self.weight, self.bias, self._count_batch(), self.eps, self._ddpx_context)


def with_kernels(rank: int, world_size: int, directory: Path, way: Way) -> list[str]:
    library = torch.library.Library("aten", "IMPL")  # the kernels are in place for as long as it is kept
    for kernel in KERNELS:
        library.impl(kernel.__name__, kernel, "CPU")
    return all_deviations(rank, world_size, directory, way)


def test_equals_the_joined_batch(tmp_path: Path) -> None:
    """Whatever the input has: types, memory formats, and no values at all on a rank."""
    assert run_ranks(with_kernels, 3, tmp_path, Way(ByCudaKernels, slack=16.0)) == [[]] * 3
