"""How likely counts are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def p_of(counts: Any, expected: Any = None) -> float:
    """The probability of counts that are no nearer to what is expected, by default equal counts (Pearson's test)."""
    observed = np.asarray(counts, dtype=np.float64).ravel()
    means = np.full_like(observed, observed.mean()) if expected is None else np.asarray(expected)
    statistic, freedom = ((observed - means) ** 2 / means).sum(), len(observed) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2)))
