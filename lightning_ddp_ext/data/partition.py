"""Split the positions of a global order among the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Uneven = Literal["pad", "drop", "exact"]


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
        rounds, left_over = divmod(self.length - self.start, self.world_size)
        if self.uneven == "pad":
            return rounds + (left_over > 0)
        if self.uneven == "exact":
            return rounds + (self.rank < left_over)
        return rounds

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
        on every rank. After the whole epoch it is ``length``, even if ``"drop"`` left
        positions out.
        """
        if self.uneven == "drop" and 0 < len(self) <= consumed:
            return self.length
        return min(self.start + consumed * self.world_size, self.length)
