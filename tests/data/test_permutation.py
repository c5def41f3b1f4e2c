"""The shuffle is a bijection of any length, and as uniform as tests of a fixed seed can see; no two seeds are mixed."""

from __future__ import annotations

import itertools
from math import isqrt
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_ddp_ext.data.permutation import Permutation
from lightning_ddp_ext.data.seeding import mix
from tests.data.data import p_of

SMALLEST_P = 1e-4
JUST_ABOVE_THE_TABLE = 65_537


def counts(values: NDArray[Any], length: int, cells: int) -> NDArray[np.int64]:
    return np.bincount((values.astype(np.float64) / length * cells).astype(np.int64), minlength=cells)


@pytest.mark.parametrize("length", [1, 2, 1000, 65_535, 65_536, 65_537, 65_538, 100_003, 257 * 256, 2**18, 999_999])
def test_lengths_around_the_table_and_beyond_are_bijections(length: int) -> None:
    """Short orders are read from a table, longer ones from a network; both are complete near the limit."""
    assert np.array_equal(np.sort(Permutation(length, 3).apply(np.arange(length))), np.arange(length))


@pytest.mark.parametrize("length", [1000, JUST_ABOVE_THE_TABLE, 10**7, 10**12, 3 * 2**59, 2**62])
def test_a_position_has_every_image_over_the_epochs(length: int) -> None:
    """The images of the first, a middle and the last position, over epochs, fill the order evenly."""
    positions = np.array([0, length // 2, length - 1])
    values = np.array([Permutation(length, mix(5, epoch)).apply(positions) for epoch in range(2000)])
    for each in values.T:
        assert p_of(counts(each, length, 50)) > SMALLEST_P
        assert p_of(np.bincount(each % 16, minlength=16)) > SMALLEST_P


@pytest.mark.parametrize("length", [JUST_ABOVE_THE_TABLE, 10**7, 10**12, 3 * 2**59])
def test_pairs_of_one_epoch_are_independent(length: int) -> None:
    """Positions side by side, one row apart or far apart have independent images."""
    order, some = Permutation(length, mix(6, length)), np.arange(60_000)
    values = order.apply(some)
    for lag in (1, 2, isqrt(length - 1) + 1, length // 2):
        others = order.apply((some + lag) % length)
        of_value, of_other = ((each.astype(np.float64) / length * 16).astype(np.int64) for each in (values, others))
        assert p_of(np.bincount(of_value * 16 + of_other, minlength=256)) > SMALLEST_P
        assert p_of(counts((others - values) % length, length, 200)) > SMALLEST_P


def test_mix_has_no_collisions_by_addition_order_or_length() -> None:
    """All pairs, their swapped forms, single words and padded ones have different seeds."""
    words = [*itertools.product(range(200), repeat=2), *((word,) for word in range(200)), (), (0, 0, 0), (2**32,)]
    words += [(2**64 + 5,), (5, 2**64), (2**64, 5), (1, 2**200)]
    assert len({mix(*each) for each in words}) == len(words)
