"""What the tests of samplers share: what ranks read, and how likely counts are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Make = Callable[[int, int], Any]  # (ranks, rank) to a sampler


def dealt(make: Make, world_size: int, epoch: int = 0) -> list[list[Any]]:
    """Return the samples of each rank in an epoch."""
    samplers = [make(world_size, rank) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


def in_turn(parts: list[list[Any]]) -> list[Any]:
    """Return the ranks' samples in the global order."""
    longest = max(map(len, parts))
    return [part[number] for number in range(longest) for part in parts if number < len(part)]


def p_of(counts: Any, expected: Any = None) -> float:
    """Return the probability of counts at least as far from the expected ones, by default equal (Pearson's test)."""
    observed = np.asarray(counts, dtype=np.float64).ravel()
    means = np.full_like(observed, observed.mean()) if expected is None else np.asarray(expected)
    statistic, freedom = ((observed - means) ** 2 / means).sum(), len(observed) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2)))
