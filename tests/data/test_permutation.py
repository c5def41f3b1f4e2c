"""The shuffle is a bijection of any length, and as uniform as tests of a fixed seed can see."""

from __future__ import annotations

import itertools
from math import isqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from lightning_ddp_ext.data import permutation
from lightning_ddp_ext.data.generators import mix
from lightning_ddp_ext.data.permutation import Permutation
from lightning_ddp_ext.errors import SamplerError

SMALLEST_P = 1e-4
JUST_ABOVE_THE_TABLE = 65_537


@pytest.fixture
def without_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the Feistel network for short lengths, too."""
    monkeypatch.setattr(permutation, "_TABLE", -1)


def is_bijection(length: int, key: int) -> bool:
    values = Permutation(length, key).apply(np.arange(length))
    return sorted(values.tolist()) == list(range(length))


def position_of(value: int, length: int, key: int) -> int:
    """Undo the network for one value, with Python's integers and no code of the package but ``mix``."""
    rows = isqrt(length - 1) + 1
    columns, low = -(-length // rows), 2**32 - 1
    words = [mix(key, number) for number in range(10)]
    while True:
        halves, sizes = [*divmod(value, columns)], (rows, columns)
        for number in reversed(range(10)):
            changed, read, word = number % 2, 1 - number % 2, words[number]
            hashed = (halves[read] * (word & low | 1) + (mix(word) & low)) & low
            hashed = (hashed ^ hashed >> 16) * (word >> 32 | 1) & low
            halves[changed] = (halves[changed] - (hashed >> 1)) % sizes[changed]
        value = halves[0] * columns + halves[1]
        if value < length:
            return value


def counts(values: NDArray[Any], length: int, cells: int) -> NDArray[np.int64]:
    return np.bincount((values.astype(np.float64) / length * cells).astype(np.int64), minlength=cells)


def p_of(observed: Any) -> float:
    return float(stats.chisquare(np.asarray(observed).ravel()).pvalue)


@pytest.mark.usefixtures("without_table")
def test_the_network_is_a_bijection_also_of_short_lengths() -> None:
    """It is one by itself, where no table stands in for it."""
    assert [
        length for length in (*range(1, 500), *range(500, 5001, 11)) if not is_bijection(length, mix(2, length))
    ] == []


@pytest.mark.parametrize("length", [65_535, 65_536, 65_537, 65_538, 100_003, 257 * 256, 2**18, 999_999])
def test_lengths_around_the_table_and_beyond_are_bijections(length: int) -> None:
    """The change from table to network loses nothing."""
    assert is_bijection(length, 3)


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    length=st.integers(JUST_ABOVE_THE_TABLE, 2**62) | st.integers(17, 62).map(lambda bits: 2**bits),
    key=st.integers(0, 2**64 - 1),
    parts=st.lists(st.integers(0, 2**62), min_size=1, max_size=50),
)
def test_large_orders_are_undone_by_a_plain_inverse(length: int, key: int, parts: list[int]) -> None:
    """Images are positions of the order and lead back, and so no two positions share one."""
    positions = [0, length - 1, *(part % length for part in parts)]
    values = Permutation(length, key).apply(np.array(positions))
    assert values.dtype == np.int64
    assert 0 <= values.min() <= values.max() < length
    assert [position_of(value, length, key) for value in values.tolist()] == positions


@pytest.mark.parametrize("length", [2, 3, 4, 5, 6])
def test_every_order_of_a_few_is_as_likely(length: int) -> None:
    """Over 100 epochs an order, all orders come equally often."""
    orders = list(itertools.permutations(range(length)))
    seen = dict.fromkeys(orders, 0)
    for epoch in range(100 * len(orders) if length < 6 else 15_000):
        seen[tuple(Permutation(length, mix(length, epoch)).apply(np.arange(length)).tolist())] += 1
    assert p_of(list(seen.values())) > SMALLEST_P


@pytest.mark.parametrize("length", [1000, JUST_ABOVE_THE_TABLE, 2**20, 10**7, 10**12, 2**40, 3 * 2**59, 2**62])
def test_a_position_goes_everywhere_over_the_epochs(length: int) -> None:
    """The images of the first, a middle and the last position, over epochs, fill the order evenly."""
    positions = np.array([0, length // 2, length - 1])
    values = np.array([Permutation(length, mix(5, epoch)).apply(positions) for epoch in range(2000)])
    for each in values.T:
        assert p_of(counts(each, length, 50)) > SMALLEST_P
        assert p_of(np.bincount(each % 16, minlength=16)) > SMALLEST_P


@pytest.mark.parametrize("length", [JUST_ABOVE_THE_TABLE, 2**20, 10**7, 10**12, 2**40, 3 * 2**59])
def test_pairs_of_one_epoch_are_independent(length: int) -> None:
    """Positions side by side, one row apart or far apart have images that know nothing of each other."""
    order, some = Permutation(length, mix(6, length)), np.arange(60_000)
    values = order.apply(some)
    for lag in (1, 2, isqrt(length - 1) + 1, length // 2):
        others = order.apply((some + lag) % length)
        cells = counts(values, length, 16).size
        grid = (values.astype(np.float64) / length * cells).astype(np.int64) * cells
        grid += (others.astype(np.float64) / length * cells).astype(np.int64)
        assert p_of(np.bincount(grid, minlength=cells**2)) > SMALLEST_P
        assert p_of(counts((others - values) % length, length, 200)) > SMALLEST_P


def test_an_order_stays_what_it_was() -> None:
    """A checkpoint is resumed in the same order by every later version."""
    assert Permutation(10, 1).apply(np.arange(10)).tolist() == [9, 2, 4, 7, 5, 0, 8, 6, 3, 1]
    assert Permutation(10**12, 1).apply(np.arange(3)).tolist() == [413221093726, 869680578980, 186290597028]


@pytest.mark.parametrize("positions", [[-1], [10], [0, 2**40]])
@pytest.mark.parametrize("length", [10, 100_000])
def test_positions_outside_are_refused(length: int, positions: list[int]) -> None:
    """Neither a negative position nor one beyond the end has an image."""
    outside = [position if position < 10 else position - 10 + length for position in positions]
    with pytest.raises(SamplerError, match=f"must be from 0 to {length - 1}"):
        Permutation(length, 1).apply(np.array(outside))


@pytest.mark.parametrize(
    ("length", "key", "says"),
    [
        (-1, 0, r"length must be .* \(got -1\)"),
        (2**62 + 1, 0, r"length must be .* from 0 to 4611686018427387904"),
        (10, -1, r"key must be .* \(got -1\)"),
        (10, 2**64, r"key must be .* mix\(seed, epoch\)"),
    ],
)
def test_bad_lengths_and_keys_are_refused(length: int, key: int, says: str) -> None:
    """The error names field, rule and value."""
    with pytest.raises(SamplerError, match=says):
        Permutation(length, key)
