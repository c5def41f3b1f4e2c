"""Compute mean and variance of a batch, and of several ranks' batches together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Vector = NDArray[np.float64]

# With a mean of this many standard deviations, torch's error in float32 exceeds 1e-6.
_LARGE_OFFSET = 8.0
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def dense(input: Tensor) -> Tensor:
    """Return the batch contiguous or in channels-last format, for fast kernels."""
    memory_format = _CHANNELS_LAST.get(input.dim(), torch.contiguous_format)
    return input if input.is_contiguous(memory_format=memory_format) else input.contiguous()


def mean_and_var(x: Tensor) -> tuple[Vector, Vector]:
    """Return mean and biased variance (C) of a batch (N, C, ...); zeros if empty.

    The batch is in float32 or float64 on CPU.
    """
    if x.numel() == 0:
        return np.zeros(x.size(1)), np.zeros(x.size(1))
    mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
    return mean.numpy().astype(np.float64), var.numpy().astype(np.float64)


def has_large_offset(mean: Vector, var: Vector, *, eps: float) -> bool:
    """Whether a mean is too large for float32, relative to its standard deviation."""
    return bool((mean * mean > _LARGE_OFFSET**2 * (var + eps)).any())


@dataclass(frozen=True)
class Statistics:
    """Per channel: ``mean`` (C) and biased ``var`` (C) of ``count`` values each."""

    mean: Vector
    var: Vector
    count: float


def merge(parts: Vector) -> Statistics:
    """Merge the statistics of several batches.

    This is the pairwise merge of T. F. Chan, G. H. Golub and R. J. LeVeque, "Updating
    formulae and a pairwise algorithm for computing sample variances" (1979), for any
    number of parts. It does not subtract large sums of squares.

    Args:
        parts: a row for each batch, (parts, 1 + 2C): the number of values per channel,
            means, and biased variances.

    >>> joint = merge(np.array([[3.0, 1.0, 0.5], [1.0, 5.0, 0.0]]))  # three around 1, and a 5
    >>> joint.count, joint.mean.item(), joint.var.item()
    (4.0, 2.0, 3.375)
    """
    channels = parts.shape[1] // 2
    counts = parts[:, :1]
    means = parts[:, 1 : 1 + channels]
    variances = parts[:, 1 + channels :]
    count = float(counts.sum())
    weights = counts / max(count, 1.0)  # all batches may be empty
    # The ranks must agree, but a matrix product's last bits depend on the processor.
    mean = (weights * means).sum(0)
    var = (weights * (variances + (means - mean) ** 2)).sum(0)
    return Statistics(mean, var, count)


@dataclass(frozen=True)
class RunningStatistics:
    """A layer's running ``mean`` and ``var`` (C).

    ``momentum`` is the weight of a new batch in them.
    """

    mean: Tensor
    var: Tensor
    momentum: float

    def update(self, joint: Statistics) -> None:
        """Add a batch, with its unbiased variance, as torch does.

        A count of 1 is refused before.
        """
        if joint.count == 0:
            return
        unbiased_var = joint.var * (joint.count / (joint.count - 1))
        _move_towards(self.mean, joint.mean, self.momentum)
        _move_towards(self.var, unbiased_var, self.momentum)


def _move_towards(running: Tensor, batch: Vector, momentum: float) -> None:
    if running.dtype.itemsize < 4:  # a batch's variance may exceed the range of float16
        running.copy_(running.double().lerp(torch.from_numpy(batch), momentum))
    else:
        running.lerp_(as_tensor(batch, running.dtype), momentum)


def as_tensor(vector: Vector, dtype: torch.dtype) -> Tensor:
    """Return a vector as a tensor on CPU."""
    if dtype == torch.float32:  # torch's own conversion takes several times as long
        return torch.from_numpy(vector.astype(np.float32))
    return torch.from_numpy(vector).to(dtype)
