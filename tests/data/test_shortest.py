"""Iterators of several ranks that end together."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lightning_ddp_ext.data.shortest import until_shortest
from tests.harness.ranks import run_ranks
from tests.harness.training import stock_group

LENGTHS = [(0, 0, 0), (0, 4, 2), (3, 3, 3), (1, 5, 3), (9, 2, 8)]


def counting(length: int, asked: list[int]) -> Iterator[int]:
    for number in range(length):
        asked.append(number)
        yield number


def until_the_shortest(rank: int, world_size: int, directory: Path) -> list[Any]:
    found = []
    with stock_group(rank, world_size, directory):
        for lengths in LENGTHS:
            asked: list[int] = []
            last: list[bool] = []
            iterator = until_shortest(counting(lengths[rank], asked), on_last=partial(last.append, True))
            given = [(item, len(asked), bool(last)) for item in iterator]
            assert next(iterator, None) is None
            found.append((lengths, given, len(asked)))
    return found


def test_every_rank_gets_as_many_items_as_the_shortest_has(tmp_path: Path) -> None:
    """In order, told which is the last one, with one more drawn beyond each, and none beyond that."""
    for rank, found in enumerate(run_ranks(until_the_shortest, 3, tmp_path)):
        for lengths, given, asked in found:
            shortest = min(lengths)
            assert [item for item, _, _ in given] == list(range(shortest))
            assert all(drawn == min(item + 2, lengths[rank]) for item, drawn, _ in given)
            assert [is_last for _, _, is_last in given] == [number == shortest - 1 for number in range(shortest)]
            assert asked == min(shortest + 1, lengths[rank])
