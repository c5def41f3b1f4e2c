"""A shuffle of any length that is computed where it is looked at, and takes no memory."""

from __future__ import annotations

from functools import cached_property
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_ddp_ext.errors import SamplerError
from lightning_ddp_ext.sampling.checks import LARGEST, whole_number
from lightning_ddp_ext.sampling.streams import mix

ROUNDS = 10  # with 8, whole orders of a few positions are not uniform
_TABLE = 1 << 16  # up to this length a table is as quick, and every order as likely
_HALF = np.uint64(32)
_ODD = np.uint64(0xD6E8FEB86659FD93)

Words = NDArray[np.uint64]


class Permutation:
    """A bijection of the positions 0 to ``length - 1``, chosen by ``key``.

    A position is a pair from Z_a × Z_b with a = ⌈√length⌉ and b = ⌈length / a⌉, and ten Feistel rounds add, modulo a
    and b in turn, a hash of one half to the other (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    The few pairs beyond ``length`` are permuted again until they fall below it. Up to 65,536 it is a table.

    Args:
        length: 0 to 2**62.
        key: 0 to 2**64 - 1; see ``sampling.streams.mix``.

    Raises:
        SamplerError: length or key out of range.

    >>> order = Permutation(10**12, key=7)
    >>> some = np.array([0, 1, 999_999_999_999])
    >>> order.invert(order.apply(some)).tolist()
    [0, 1, 999999999999]
    """

    def __init__(self, length: int, key: int) -> None:
        remedy = "a length is a number of samples"
        self._length = whole_number(length, "length", at_most=LARGEST, remedy=remedy)
        self._key = whole_number(key, "key", at_most=2**64 - 1, remedy="make one with mix(seed, epoch)")
        self._rows = isqrt(max(length - 1, 0)) + 1
        self._columns = max(1, -(-length // self._rows))
        self._round_keys = [(np.uint64(mix(key, turn, 0)), np.uint64(mix(key, turn, 1) | 1)) for turn in range(ROUNDS)]

    def __len__(self) -> int:
        return self._length

    def apply(self, positions: NDArray[Any]) -> NDArray[np.int64]:
        """What stands at these positions; any shape, whole numbers from 0 to ``length - 1``."""
        self._check(positions)
        return self._table[positions] if self._is_small else self._walk(positions, range(ROUNDS))

    def invert(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """Where these values stand."""
        self._check(values)
        return self._inverse_table[values] if self._is_small else self._walk(values, range(ROUNDS)[::-1])

    @property
    def _is_small(self) -> bool:
        return self._length <= _TABLE

    @cached_property
    def _table(self) -> NDArray[np.int64]:
        # NumPy promises that this stream stays the same in all versions; it does not for Generator.permutation.
        draws = np.random.PCG64(self._key).random_raw(self._length)
        return np.argsort(draws, kind="stable").astype(np.int64)

    @cached_property
    def _inverse_table(self) -> NDArray[np.int64]:
        inverse = np.empty_like(self._table)
        inverse[self._table] = np.arange(self._length)
        return inverse

    def _check(self, positions: NDArray[Any]) -> None:
        if positions.size and not (positions.min() >= 0 and positions.max() < self._length):
            raise SamplerError(
                f"positions must be from 0 to {self._length - 1}"
                f" (got {positions.min()} to {positions.max()}); take them from a Share of this length"
            )

    def _walk(self, start: NDArray[Any], turns: range) -> NDArray[np.int64]:
        """Cycle walking: a value beyond the length goes through the rounds until it is one below."""
        values = self._rounds(start.astype(np.uint64), turns)
        beyond = np.nonzero(values >= np.uint64(self._length))
        while beyond[0].size:
            again = self._rounds(values[beyond], turns)
            values[beyond] = again
            beyond = tuple(axis[again >= np.uint64(self._length)] for axis in beyond)
        return values.view(np.int64)

    def _rounds(self, values: Words, turns: range) -> Words:
        columns = np.uint64(self._columns)
        left = values // columns
        right = values - left * columns
        one, other = np.empty_like(left), np.empty_like(left)
        for turn in turns:
            changed, read, size = (left, right, self._rows) if turn % 2 == 0 else (right, left, self._columns)
            self._hash(read, turn, size, one, other)
            _shift(changed, one, other, np.uint64(size), forwards=turns.step > 0)
        left *= columns
        left += right
        return left

    def _hash(self, values: Words, turn: int, size: int, out: Words, scratch: Words) -> None:
        """Numbers below ``size``, at most 2**31, from values and the keys of a round."""
        offset, factor = self._round_keys[turn]
        np.bitwise_xor(values, offset, out=out)
        out *= factor
        np.right_shift(out, _HALF, out=scratch)
        out ^= scratch
        out *= _ODD
        out >>= _HALF
        out *= np.uint64(size)
        out >>= _HALF


def _shift(values: Words, by: Words, scratch: Words, size: np.uint64, *, forwards: bool) -> None:
    """Add or subtract modulo ``size``: unsigned, what has left the range is huge and loses to its other form."""
    if forwards:
        values += by
        np.subtract(values, size, out=scratch)
    else:
        values -= by
        np.add(values, size, out=scratch)
    np.minimum(values, scratch, out=values)
