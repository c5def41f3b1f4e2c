"""Mean and variance of a batch, and of several ranks' batches together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# A mean so many times the deviation leaves float32 too few digits for the rest; torch's own error is then 1e-6 or more.
_LARGE_OFFSET = 8.0
_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Statistics:
    """Of a batch, per channel: ``mean`` (C) and biased ``var`` (C) in float64, of ``count`` values each."""

    mean: Tensor
    var: Tensor
    count: float


def dtype_of(input: Tensor) -> torch.dtype:
    """In what torch computes with a batch of this type."""
    return torch.float32 if input.dtype in _HALF else input.dtype


def values_a_channel(input: Tensor) -> int:
    """How many values each channel of a batch (N, C, ...) has."""
    return input.numel() // input.size(1)


def dense(input: Tensor) -> Tensor:
    """The batch in a memory format that torch's kernels are fast for."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(input.dim())
    if input.is_contiguous() or (wanted is not None and input.is_contiguous(memory_format=wanted)):
        return input
    return input.contiguous()


def statistics_of(input: Tensor) -> Statistics:
    """Those of a batch (N, C, ...) in CPU memory; zeros for an empty one."""
    count = values_a_channel(input)
    channels = input.size(1)
    if count == 0:
        return Statistics(torch.zeros(channels).double(), torch.zeros(channels).double(), 0.0)
    # Stand-ins for running statistics, which stay as they are, make the kernel compute half precision in float32.
    stand_in = torch.zeros(channels, dtype=dtype_of(input))
    mean, var = torch.batch_norm_update_stats(input, stand_in, stand_in.clone(), 0.0)
    return Statistics(mean.double(), var.double(), float(count))


def has_large_offset(statistics: Statistics, eps: float) -> bool:
    """Whether a channel's mean is so large beside its deviation that float32 has too few digits for what is left."""
    return bool((statistics.mean.square() > _LARGE_OFFSET**2 * (statistics.var + eps)).any())


def merge(counts: Tensor, means: Tensor, variances: Tensor) -> Statistics:
    """The statistics of several batches together.

    The pairwise merge of T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances" (1979), for any number of parts: nothing large is subtracted from something large.

    Args:
        counts: values a channel in each part, (parts, 1), in float64.
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
    """A layer's running statistics (C), and the weight of a new batch in them; ``None``: the layer keeps none."""

    mean: Tensor | None
    var: Tensor | None
    momentum: float

    def update(self, joint: Statistics) -> None:
        """Take a batch in, by its unbiased variance, as torch does."""
        if self.mean is None or self.var is None or joint.count == 0:
            return
        unbiased = joint.var * (joint.count / (joint.count - 1))
        # Rounded once, to what may be half precision.
        self.mean.copy_(self.mean.double().lerp(joint.mean, self.momentum))
        self.var.copy_(self.var.double().lerp(unbiased, self.momentum))
