"""Mean and variance of a batch, and of several ranks' batches together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Where the mean is this many times the deviation, float32 has too few digits left: torch's own error exceeds 1e-6.
_LARGE_OFFSET = 8.0
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Statistics:
    """Per channel: ``mean`` (C) and biased ``var`` (C), in float64, of ``count`` values each."""

    mean: Tensor
    var: Tensor
    count: float


def at_least_float32(tensor: Tensor) -> Tensor:
    """Half precision as float32, which torch computes it in, too; anything else as it is."""
    return tensor.float() if tensor.dtype in HALF else tensor


def values_per_channel(input: Tensor) -> int:
    """How many values each channel of a batch (N, C, ...) has."""
    return input.numel() // input.size(1)


def dense(input: Tensor) -> Tensor:
    """The batch in a memory format that torch's kernels are fast for: contiguous, or channels last."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    is_channels_last = input.is_contiguous(memory_format=formats.get(input.dim(), torch.contiguous_format))
    return input if is_channels_last else input.contiguous()


@torch.no_grad()
def statistics_of(input: Tensor) -> Statistics:
    """The statistics of a batch (N, C, ...) on CPU, in float32 or float64; zeros for an empty batch."""
    count = values_per_channel(input)
    if count == 0:
        zeros = torch.zeros(input.size(1), dtype=torch.float64)
        return Statistics(zeros, zeros, 0.0)
    mean, var = torch.batch_norm_update_stats(input, None, None, 0.0)
    return Statistics(mean.double(), var.double(), float(count))


def has_large_offset(statistics: Statistics, *, eps: float) -> bool:
    """Whether a channel's mean is too large beside its deviation for float32."""
    return bool((statistics.mean.square() > _LARGE_OFFSET**2 * (statistics.var + eps)).any())


def merge(counts: Tensor, means: Tensor, variances: Tensor) -> Statistics:
    """The statistics of several batches together.

    The pairwise merge of T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances" (1979), for any number of parts: nothing large is subtracted from something large.

    Args:
        counts: values per channel in each part, (parts, 1), in float64.
        means: (parts, C), in float64.
        variances: biased, (parts, C), in float64.

    >>> parts = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 60.0]]).double()
    >>> counts = torch.tensor([[3.0], [3.0]]).double()
    >>> joint = merge(counts, parts.mean(1, keepdim=True), parts.var(1, keepdim=True, correction=0))
    >>> joint.count, torch.allclose(joint.mean, parts.mean()), torch.allclose(joint.var, parts.var(correction=0))
    (6.0, True, True)
    """
    count = float(counts.sum())
    if count == 0:
        return Statistics(means[0], variances[0], 0.0)
    weights = (counts / count).T
    mean = (weights @ means)[0]
    var = (weights @ (variances + (means - mean).square()))[0]
    return Statistics(mean, var, count)


class Running(NamedTuple):
    """A layer's running statistics (C), ``None`` without any, and the weight of a new batch in them."""

    mean: Tensor | None
    var: Tensor | None
    momentum: float

    def update(self, joint: Statistics) -> None:
        """Add a batch, with its unbiased variance, as torch does."""
        if self.mean is None or self.var is None or joint.count == 0:
            return
        unbiased = joint.var * (joint.count / (joint.count - 1))
        # In float64, so that half precision is rounded once.
        self.mean.copy_(self.mean.double().lerp(joint.mean, self.momentum))
        self.var.copy_(self.var.double().lerp(unbiased, self.momentum))
