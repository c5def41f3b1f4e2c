"""Mean and variance of a batch, and of several ranks' batches together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Where the mean is this many times the deviation, float32 has too few digits left: torch's own error exceeds 1e-6.
_LARGE_OFFSET = 8.0
_HALF = (torch.float16, torch.bfloat16)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Half precision as float32, which torch computes it in, too; anything else as it is."""
    return tensor.float() if tensor.dtype in _HALF else tensor


def dense(input: Tensor) -> Tensor:
    """The batch in a memory format that torch's kernels are fast for: contiguous, or channels last."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    is_channels_last = input.is_contiguous(memory_format=formats.get(input.dim(), torch.contiguous_format))
    return input if is_channels_last else input.contiguous()


@torch.no_grad()
def mean_and_var(input: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance (C) of a batch (N, C, ...) on CPU, in float32 or float64; zeros for an empty batch."""
    if input.numel() == 0:
        zeros = input.new_zeros(input.size(1))
        return zeros, zeros
    return torch.batch_norm_update_stats(input, None, None, 0.0)


def has_large_offset(mean: Tensor, var: Tensor, *, eps: float) -> bool:
    """Whether a channel's mean is too large beside its deviation for float32."""
    return bool((mean.square() > _LARGE_OFFSET**2 * (var + eps)).any())


@dataclass(frozen=True)
class Statistics:
    """Per channel: ``mean`` (C) and biased ``var`` (C), in float64, of ``count`` values each."""

    mean: Tensor
    var: Tensor
    count: float


def merge(parts: Tensor) -> Statistics:
    """The statistics of several batches together.

    The pairwise merge of T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating formulae and a pairwise algorithm for
    computing sample variances" (1979), for any number of parts: nothing large is subtracted from something large.

    Args:
        parts: a row for each batch, (parts, 1 + 2C) in float64: values per channel, means, and biased variances.

    >>> parts = torch.tensor([[3.0, 1.0, 0.5], [1.0, 5.0, 0.0]])  # three values around 1, and a 5
    >>> joint = merge(parts.double())
    >>> joint.count, joint.mean.item(), joint.var.item()
    (4.0, 2.0, 3.375)
    """
    channels = parts.size(1) // 2
    counts, means, variances = parts.split([1, channels, channels], dim=1)
    count = float(counts.sum())
    weights = (counts / max(count, 1.0)).T
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
