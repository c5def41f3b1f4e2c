"""A shuffle of any length that is computed where it is looked at, and takes no memory."""

from __future__ import annotations

from functools import cached_property
from math import isqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_ddp_ext.data.checks import LARGEST, whole_number
from lightning_ddp_ext.data.streams import mix
from lightning_ddp_ext.errors import SamplerError

ROUNDS = 10
_TABLE = 1 << 16
_ONE, _HALF = np.uint32(1), np.uint32(16)

Words = NDArray[np.uint64]
Halves = NDArray[np.uint32]


class Permutation:
    """A bijection of the positions 0 to ``length - 1``, chosen by ``key``.

    A position is a pair from Z_a × Z_b with a = ⌈√length⌉ and b = ⌈length / a⌉, and ten Feistel rounds add, modulo a
    and b in turn, a hash of one half to the other (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002).
    The few pairs beyond ``length`` are permuted again until they fall below it. Up to a length of 65,536 it is a table
    instead, because ten rounds do not make all orders of a few positions equally likely, whatever the hash.

    Args:
        length: 0 to 2**62.
        key: 0 to 2**64 - 1; see ``data.streams.mix``.

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

    def __len__(self) -> int:
        return self._length

    def apply(self, positions: NDArray[Any]) -> NDArray[np.int64]:
        """What stands at these positions: whole numbers in one dimension, from 0 to ``length - 1``."""
        self._check(positions)
        return self._table[positions] if self._is_small else self._walk(positions, range(ROUNDS))

    def invert(self, values: NDArray[Any]) -> NDArray[np.int64]:
        """Where these values stand."""
        self._check(values)
        return self._inverse_table[values] if self._is_small else self._walk(values, range(ROUNDS)[::-1])

    @cached_property
    def _round_keys(self) -> list[tuple[np.uint32, np.uint32, np.uint32]]:
        return [_round_key(self._key, turn) for turn in range(ROUNDS)]

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
        beyond = np.flatnonzero(values >= np.uint64(self._length))
        while beyond.size:
            again = self._rounds(values[beyond], turns)
            values[beyond] = again
            beyond = beyond[again >= np.uint64(self._length)]
        return values.view(np.int64)

    def _rounds(self, values: Words, turns: range) -> Words:
        columns = np.uint64(self._columns)
        quotients = values // columns
        left = quotients.astype(np.uint32)
        quotients *= columns
        values -= quotients
        right = values.astype(np.uint32)
        hashes, scratch = np.empty_like(left), np.empty_like(left)
        change = _add if turns.step > 0 else _subtract
        for turn in turns:
            changed, read, size = (left, right, self._rows) if turn % 2 == 0 else (right, left, self._columns)
            self._hash(read, turn, hashes, scratch)
            change(changed, hashes, scratch, np.uint32(size))
        np.copyto(values, left)
        values *= columns
        values += right
        return values

    def _hash(self, values: Halves, turn: int, out: Halves, scratch: Halves) -> None:
        """31 bits each; a multiplication carries upwards, so the upper half is brought down between two of them."""
        first, offset, second = self._round_keys[turn]
        np.multiply(values, first, out=out)
        out += offset
        np.right_shift(out, _HALF, out=scratch)
        out ^= scratch
        out *= second
        out >>= _ONE


def _add(values: Halves, by: Halves, scratch: Halves, size: np.uint32) -> None:
    """Add 31 bits modulo ``size``, which is at most 2**31."""
    by += values
    np.floor_divide(by, size, out=scratch)  # far quicker than a remainder
    scratch *= size
    np.subtract(by, scratch, out=values)


def _subtract(values: Halves, by: Halves, scratch: Halves, size: np.uint32) -> None:
    """Undo ``_add``."""
    np.floor_divide(by, size, out=scratch)
    scratch *= size
    by -= scratch
    values -= by
    np.add(values, size, out=scratch)
    np.minimum(values, scratch, out=values)  # unsigned: what has fallen below 0 is huge


def _round_key(key: int, turn: int) -> tuple[np.uint32, np.uint32, np.uint32]:
    """An odd factor, an offset, and another odd factor."""
    word = mix(key, turn)
    return np.uint32(word & 0xFFFFFFFF | 1), np.uint32(mix(word) & 0xFFFFFFFF), np.uint32(word >> 32 | 1)
