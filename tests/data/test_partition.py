"""Shares of all ranks cover the order as their policy says, also after stops on other numbers of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ddp_ext.data.partition import Share, Uneven

LENGTHS = st.integers(0, 60)
WORLDS = st.integers(1, 9)
POLICIES = st.sampled_from(["pad", "drop", "exact"])
law = settings(max_examples=200, derandomize=True, deadline=None)


def shares(length: int, world_size: int, uneven: Uneven, start: int = 0) -> list[Share]:
    return [Share(length, world_size, rank, uneven, start) for rank in range(world_size)]


def read(share: Share, begin: int = 0, end: int | None = None) -> list[int]:
    positions = share.positions(begin, len(share) if end is None else end)
    assert positions.dtype == np.int64
    return positions.tolist()


def joined(parts: Iterable[list[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


@law
@given(length=LENGTHS, world_size=WORLDS, data=st.data())
def test_exact_covers_each_position_once(length: int, world_size: int, data: st.DataObject) -> None:
    """Shares are disjoint, cover what is left, and differ by one at most, the first ranks having more."""
    start = data.draw(st.integers(0, length))
    parts = [read(share) for share in shares(length, world_size, "exact", start)]
    assert sorted(joined(parts)) == list(range(start, length))
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@law
@given(length=LENGTHS, world_size=WORLDS, data=st.data())
def test_drop_leaves_out_less_than_a_round(length: int, world_size: int, data: st.DataObject) -> None:
    """Shares are equal and disjoint, and only the last positions are missing, fewer than there are ranks."""
    start = data.draw(st.integers(0, length))
    parts = [read(share) for share in shares(length, world_size, "drop", start)]
    dealt = sorted(joined(parts))
    assert dealt == list(range(start, start + len(dealt)))
    assert len({len(part) for part in parts}) == 1
    assert 0 <= length - start - len(dealt) < world_size


@law
@given(length=st.integers(1, 60), world_size=WORLDS, data=st.data())
def test_pad_repeats_the_first_positions(length: int, world_size: int, data: st.DataObject) -> None:
    """Shares are equal, everything left is covered, and beyond it come the epoch's first positions in order."""
    start = data.draw(st.integers(0, length))
    parts = [read(share) for share in shares(length, world_size, "pad", start)]
    in_turn = [position for turn in zip(*parts, strict=True) for position in turn]
    assert in_turn == [number % length for number in range(start, start + len(in_turn))]
    assert 0 <= len(in_turn) - (length - start) < world_size


@law
@given(length=LENGTHS, stops=st.lists(st.tuples(WORLDS, st.integers(0, 5)), max_size=5), last=WORLDS, uneven=POLICIES)
def test_stop_and_go_reads_each_position_once(
    length: int, stops: list[tuple[int, int]], last: int, uneven: Uneven
) -> None:
    """Over any chain of stops on any numbers of ranks each position is read once, but for what the policy says."""
    seen: Counter[int] = Counter()
    start = 0
    for world_size, consumed in stops:
        seen.update(joined(read(share, 0, consumed) for share in shares(length, world_size, uneven, start)))
        after = {share.position_after(consumed) for share in shares(length, world_size, uneven, start)}
        assert len(after) == 1
        start = after.pop()
    seen.update(joined(read(share) for share in shares(length, last, uneven, start)))
    allowed = max([last, *(world_size for world_size, _ in stops)])
    assert sum(seen.values()) == sum(seen[position] for position in range(length))
    if uneven == "exact":
        assert seen == Counter(range(length))
    elif uneven == "pad":
        assert set(seen) == set(range(length))
        assert sum(seen.values()) < length + allowed
    else:
        assert max(seen.values(), default=1) == 1
        assert length - len(seen) < allowed
        assert set(seen) == set(range(len(seen)))


@pytest.mark.parametrize("uneven", ["pad", "drop", "exact"])
def test_shares_of_huge_orders_are_exact(uneven: Uneven) -> None:
    """No rounding: near 2**62 a share ends where it should."""
    length, world_size = 2**62 - 3, 1000
    share = Share(length, world_size, 7, uneven, start=length - 5001)
    positions = share.positions(len(share) - 2, len(share))
    expected = [length - 5001 + 7 + number * world_size for number in range(len(share) - 2, len(share))]
    assert positions.tolist() == [position % length for position in expected]
    assert len(share) == {"pad": 6, "drop": 5, "exact": 5}[uneven]
