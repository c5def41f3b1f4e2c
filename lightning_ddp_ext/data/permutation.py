"""Compute a random permutation position by position, and split positions among ranks.

Only a short permutation is stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import isqrt
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lightning_ddp_ext.data.random_state import mix

ROUNDS = 10
_LONGEST_TABLE = 1 << 16  # up to this length, a permutation is stored

Halves = NDArray[np.uint32]
RoundKey = tuple[Halves, Halves, Halves]
Uneven = Literal["pad", "drop", "exact"]


def _half(number: int) -> Halves:
    """Return an array without dimensions, which NumPy handles faster than a scalar."""
    return np.array(number, dtype=np.uint32)


_ONE = _half(1)
_SIXTEEN = _half(16)


class Permutation:
    """A bijection of the positions 0 to ``length - 1``, chosen by ``key``.

    A position is a pair from Z_a × Z_b with a = ⌈√length⌉ and b = ⌈length / a⌉. Ten
    Feistel rounds add a hash of one half to the other, modulo a and b in turn (Black
    and Rogaway, "Ciphers with arbitrary finite domains", 2002). The few results that
    are not below ``length`` are permuted again until they are. Lengths up to 65,536 use
    a table instead, because with few positions ten rounds do not make all orders
    equally likely, whatever the hash.

    Args:
        length: from 0 to 2**62.
        key: from 0 to 2**64 - 1; see ``data.random_state.mix``.

    >>> Permutation(10**12, key=7).apply(np.array([0, 1, 999_999_999_999])).tolist()
    [322212786160, 735315487814, 184429750278]
    """

    def __init__(self, length: int, key: int) -> None:
        self._length = length
        self._key = key
        self._rows = isqrt(max(length - 1, 0)) + 1
        self._columns = max(1, -(-length // self._rows))

    def apply(self, positions: NDArray[Any]) -> NDArray[np.int64]:
        """Return the images of positions from 0 to ``length - 1``.

        Positions are a one-dimensional array of integers.
        """
        return self._table[positions] if self._length <= _LONGEST_TABLE else self._walk(positions)

    @cached_property
    def _table(self) -> NDArray[np.int64]:
        # Unlike Generator.permutation, this stream is the same in all NumPy versions.
        draws = np.random.PCG64(self._key).random_raw(self._length)
        return np.argsort(draws, kind="stable").astype(np.int64)

    def _walk(self, positions: NDArray[Any]) -> NDArray[np.int64]:
        """Walk cycles: apply the rounds to each value until it is below the length."""
        values = self._run_rounds(positions.astype(np.uint64))
        beyond = np.flatnonzero(values >= np.uint64(self._length))
        while beyond.size:
            again = self._run_rounds(values[beyond])
            values[beyond] = again
            beyond = beyond[again >= np.uint64(self._length)]
        return values.view(np.int64)

    def _run_rounds(self, values: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Apply all rounds once."""
        columns = np.uint64(self._columns)
        rows = values // columns
        halves = [rows.astype(np.uint32), (values - rows * columns).astype(np.uint32)]
        sizes = _half(self._rows), _half(self._columns)
        for number, key in enumerate(self._round_keys):
            changed = number % 2
            halves[changed] = _add_modulo(
                halves[changed], _hash(halves[1 - changed], key), sizes[changed]
            )
        return halves[0].astype(np.uint64) * columns + halves[1]

    @cached_property
    def _round_keys(self) -> list[RoundKey]:
        return [_round_key(mix(self._key, number)) for number in range(ROUNDS)]


def _round_key(word: int) -> RoundKey:
    """Return an odd factor, an offset, and another odd factor."""
    return _half(word & 0xFFFFFFFF | 1), _half(mix(word) & 0xFFFFFFFF), _half(word >> 32 | 1)


def _hash(values: Halves, key: RoundKey) -> Halves:
    """Hash to 31 bits.

    Multiplication carries upwards, so the upper half is shifted down between the two
    factors.
    """
    factor, offset, second_factor = key
    hashes = values * factor + offset
    hashes ^= hashes >> _SIXTEEN
    hashes *= second_factor
    hashes >>= _ONE
    return hashes


def _add_modulo(values: Halves, hashes: Halves, size: Halves) -> Halves:
    """Add 31-bit hashes to values below ``size``, modulo ``size``.

    ``size`` is at most 2**31.
    """
    sums = hashes + values
    return sums - sums // size * size  # much faster than a remainder


@dataclass(frozen=True)
class Shard:
    """The positions of the global order that one rank reads from ``start`` on.

    The rank's k-th position is ``start + rank + k * world_size``.

    If the number of remaining positions is not a multiple of the number of ranks,
    ``uneven`` decides:

    - ``"pad"``: every rank reads the same number; at the end, some ranks read the
      epoch's first positions again.
    - ``"drop"``: every rank reads the same number; the last positions are left out.
    - ``"exact"``: each position is read by one rank; the first ranks may read one more
      than the others.

    To resume on a different number of ranks, create a new shard that starts at
    ``position_after(consumed)``.

    Args:
        length: number of positions in the whole epoch.
        world_size: number of ranks.
        rank: this rank.
        uneven: the policy.
        start: the first position that has not been read, from 0 to ``length``.

    >>> [Shard(10, 4, rank, "pad").positions(0, 3).tolist() for rank in range(4)]
    [[0, 4, 8], [1, 5, 9], [2, 6, 0], [3, 7, 1]]
    >>> Shard(10, 4, 0, "pad").position_after(1)
    4
    >>> [Shard(10, 2, rank, "exact", start=4).positions(0, 3).tolist() for rank in range(2)]
    [[4, 6, 8], [5, 7, 9]]
    """

    length: int
    world_size: int
    rank: int
    uneven: Uneven
    start: int = 0

    def __len__(self) -> int:
        """Return the number of positions that this rank reads."""
        shared, left_over = divmod(self.length - self.start, self.world_size)
        if self.uneven == "pad":
            return shared + (left_over > 0)
        if self.uneven == "exact":
            return shared + (self.rank < left_over)
        return shared

    def positions(self, begin: int, end: int) -> NDArray[np.int64]:
        """Return the rank's positions from number ``begin`` up to ``end``.

        ``end`` is exclusive and may exceed ``len(self)``.
        """
        end = min(end, len(self))
        offset = self.start + self.rank
        step = self.world_size
        positions = np.arange(offset + begin * step, offset + end * step, step, dtype=np.int64)
        is_padded = positions.size > 0 and positions[-1] >= self.length
        return positions % self.length if is_padded else positions

    def position_after(self, consumed: int) -> int:
        """Return the first unread position after ``consumed`` positions per rank.

        A rank with fewer positions has then read all of them. The position is the same
        on every rank.
        """
        return min(self.start + consumed * self.world_size, self.length)
