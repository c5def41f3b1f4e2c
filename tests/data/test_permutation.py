"""The shuffle of the samplers is a bijection of any length, and looks uniform."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from lightning_ddp_ext.data.permutation import Permutation
from lightning_ddp_ext.data.random_state import mix

LONGEST_TABLE = 65_536  # longer orders are computed by a network
SMALLEST_P = 1e-4
PARTS = 16


def p_of(counts: NDArray[np.int64]) -> float:
    """Return the probability of counts at least as far from equal ones (Pearson's test)."""
    mean = counts.mean()
    statistic = ((counts - mean) ** 2 / mean).sum()
    freedom = len(counts) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2)))


def parts_of(values: NDArray[Any], length: int, parts: int) -> NDArray[np.int64]:
    """Return the number of the part that has each value, of equal parts of the order."""
    return (values.astype(np.float64) / length * parts).astype(np.int64)


@pytest.mark.parametrize(
    "length",
    [
        1,
        2,
        1000,
        LONGEST_TABLE - 1,
        LONGEST_TABLE,
        LONGEST_TABLE + 1,
        LONGEST_TABLE + 2,
        100_003,
        257 * 256,
        2**18,
        999_999,
    ],
)
def test_lengths_around_the_table_and_beyond_are_bijections(length: int) -> None:
    """A table of a short order and the network of a longer one repeat no position."""
    positions = np.arange(length)
    assert np.array_equal(np.sort(Permutation(length, 3).apply(positions)), positions)


@pytest.mark.parametrize("length", [LONGEST_TABLE + 1, 10**7, 10**12, 3 * 2**59])
def test_pairs_of_one_epoch_are_independent(length: int) -> None:
    """Positions side by side, one row apart or far apart have independent images."""
    order = Permutation(length, mix(6, length))
    positions = np.arange(60_000)
    images = order.apply(positions)
    row = math.isqrt(length - 1) + 1  # the network's positions are a square of such rows
    for lag in (1, 2, row, length // 2):
        other_images = order.apply((positions + lag) % length)
        pairs = PARTS * parts_of(images, length, PARTS) + parts_of(other_images, length, PARTS)
        assert p_of(np.bincount(pairs, minlength=PARTS**2)) > SMALLEST_P
        distances = parts_of((other_images - images) % length, length, PARTS**2)
        assert p_of(np.bincount(distances, minlength=PARTS**2)) > SMALLEST_P
