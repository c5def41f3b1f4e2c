"""Iterators of several ranks that end together."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, WeightedRandomSampler

from lightning_ddp_ext.data.default_samplers import SharedSampler
from lightning_ddp_ext.data.samplers import ScalableDistributedSampler
from lightning_ddp_ext.data.shortest import AsyncMin, StopAtShortest, is_counted
from tests.integration.training import stock_group
from tests.ranks import run_ranks

LENGTHS = [(0, 0, 0), (0, 4, 2), (3, 3, 3), (1, 5, 3), (9, 2, 8)]


def counting(length: int, asked: list[int]) -> Iterator[int]:
    for number in range(length):
        asked.append(number)
        yield number


def until_the_shortest(rank: int, world_size: int, directory: Path) -> list[Any]:
    found = []
    with stock_group(rank, world_size, directory):
        for lengths in LENGTHS:
            for at_most in (float("inf"), 2):
                asked: list[int] = []
                last: list[bool] = []
                items = counting(lengths[rank], asked)
                iterator = StopAtShortest(items, at_most=at_most, on_last=partial(last.append, True))
                given = [(item, len(asked), bool(last)) for item in iterator]
                assert next(iterator, None) is None
                iterator.finish()
                found.append((lengths, at_most, given, len(asked)))
        assert AsyncMin([rank, -rank, float("inf")]).wait() == [0, 1 - world_size, float("inf")]
    return found


def test_every_rank_gets_as_many_items_as_the_shortest_has(tmp_path: Path) -> None:
    """In order, told which is the last one, with two more drawn beyond each, and none beyond those."""
    for rank, found in enumerate(run_ranks(until_the_shortest, 3, tmp_path)):
        for lengths, at_most, given, asked in found:
            shortest = min(*lengths, at_most)
            assert [item for item, _, _ in given] == list(range(int(shortest)))
            assert all(drawn == min(item + 3, lengths[rank], at_most) for item, drawn, _ in given)
            assert [is_last for _, _, is_last in given] == [number == shortest - 1 for number in range(int(shortest))]
            assert asked == min(shortest + 2, lengths[rank], at_most)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


class ByTokens(BatchSampler):
    def __len__(self) -> int:
        return 2


class Filtering(DataLoader[int]):
    def __iter__(self) -> Any:
        return iter([torch.ones(1)])


def test_only_what_torch_or_we_count_is_taken_at_its_word() -> None:
    """Lengths of iterable datasets, of loaders of one's own and of samplers of one's own may be estimates."""
    data = list(range(6))
    ours = ScalableDistributedSampler(data, num_replicas=2, rank=0)
    weighted = WeightedRandomSampler([1.0] * 6, 6)
    torchs = DistributedSampler(data, num_replicas=2, rank=0)  # type: ignore[arg-type, var-annotated]
    for sampler in (None, ours, weighted, torchs, SharedSampler(weighted, num_replicas=2, rank=0)):
        assert is_counted(DataLoader(data, batch_size=2, sampler=sampler))  # type: ignore[arg-type]
    assert is_counted(DataLoader(data, batch_size=None, shuffle=True))  # type: ignore[arg-type]
    for loader in (
        DataLoader(Stream()),
        DataLoader(data, batch_sampler=ByTokens(weighted, 2, False)),  # type: ignore[arg-type]
        DataLoader(data, batch_sampler=[[0, 1], [2]]),  # type: ignore[arg-type]
        Filtering(data),  # type: ignore[arg-type]
        data,
        iter(data),
    ):
        assert not is_counted(loader)
