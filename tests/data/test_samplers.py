"""Samplers divide one order among any number of ranks, and continue at any position.

``test_permutation`` shows that the order is shuffled well.
"""

import hashlib
import itertools
import math
import random
import tracemalloc
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, Sampler

from lightning_ddp_ext.data.samplers import (
    DistributedBatchSamplerWrapper,
    RankOrderSampler,
    ScalableDistributedSampler,
)
from lightning_ddp_ext.errors import ConfigurationError

on_fifty_cases = settings(max_examples=50, derandomize=True, deadline=None)
Make = Callable[[int, int], Any]  # makes a sampler for a number of ranks, and a rank


def items_by_rank(make: Make, world_size: int, epoch: int = 0) -> list[list[Any]]:
    """Return the items of each rank in an epoch."""
    samplers = [make(world_size, rank) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


def in_global_order(parts: list[list[Any]]) -> list[Any]:
    """Return the ranks' items in the global order: each one's first item, and so on."""
    longest = max(map(len, parts))
    return [part[number] for number in range(longest) for part in parts if number < len(part)]


# The samplers.


class Drawing(Sampler[int]):
    """Yields its epoch, and then sums of numbers from each kind of generator that a user's
    sampler may own, and from each global one. All of them have to be seeded.

    Args:
        length: the number of items.
        seed: of its own generators.
    """

    def __init__(self, length: int, seed: int = 0) -> None:
        self.length = length
        self.epoch = 0
        self.of_torch = torch.Generator().manual_seed(seed)
        self.of_numpy = np.random.default_rng(seed)
        self.of_old_numpy = np.random.RandomState(seed)
        self.of_python = random.Random(seed)

    def draw(self) -> int:
        """Return the sum of a number of each generator."""
        return (
            int(torch.randint(7, (), generator=self.of_torch))
            + int(self.of_numpy.integers(7))
            + self.of_old_numpy.randint(7)
            + self.of_python.randrange(7)
            + int(torch.randint(7, ()))
            + np.random.randint(7)
            + random.randrange(7)
        )

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        yield self.epoch
        for _ in range(self.length - 1):
            yield self.draw()


# Samplers of a number of items, by kind; the generators of the ranks' ``Drawing`` differ.
SAMPLERS: dict[str, Callable[..., Any]] = {
    "shuffled": lambda length, **options: ScalableDistributedSampler(range(length), **options),
    "in order": lambda length, **options: ScalableDistributedSampler(
        range(length), shuffle=False, **options
    ),
    "wrapped items": lambda length, rank, **options: DistributedBatchSamplerWrapper(
        Drawing(length, seed=rank), rank=rank, **options
    ),
    "wrapped batches": lambda length, rank, **options: DistributedBatchSamplerWrapper(
        BatchSampler(Drawing(length, seed=rank), 3, False), rank=rank, **options
    ),
}


def sampler_of(kind: str, length: int, **options: Any) -> Make:
    """Return a function that makes one of ``SAMPLERS``, of ``length`` items."""
    make = SAMPLERS[kind]
    return lambda world_size, rank: make(length, num_replicas=world_size, rank=rank, **options)


# One order for any number of ranks.


@on_fifty_cases
@given(
    kind=st.sampled_from([*SAMPLERS]),
    length=st.integers(0, 60),
    ranks=st.integers(1, 9),
    epoch=st.integers(0, 3),
)
def test_the_order_does_not_depend_on_the_number_of_ranks(
    kind: str, length: int, ranks: int, epoch: int
) -> None:
    """The ranks' items in turn are the order of one process.

    ``"pad"`` appends the first items, and ``"drop"`` omits the last.
    """

    def shares(world_size: int, uneven: str) -> list[list[Any]]:
        return items_by_rank(sampler_of(kind, length, seed=3, uneven=uneven), world_size, epoch)

    [order] = shares(1, "exact")
    exact = shares(ranks, "exact")
    assert in_global_order(exact) == order
    assert len(exact[0]) - len(exact[-1]) <= 1
    padded_length = math.ceil(len(order) / ranks) * ranks
    assert in_global_order(shares(ranks, "pad")) == [
        *itertools.islice(itertools.cycle(order), padded_length)
    ]
    dropped_length = len(order) // ranks * ranks
    assert in_global_order(shares(ranks, "drop")) == order[:dropped_length]


class Turn(NamedTuple):
    """Some ranks that read from the position on where others stopped.

    Attributes:
        ranks: their number.
        items: how many each of them reads; ``None`` for the rest of the epoch.
    """

    ranks: int
    items: int | None


def read_in_turns(make: Make, turns: list[Turn], epoch: int) -> list[Any]:
    """Return the items that all ranks read; fail if ranks disagree on a position."""
    read: list[Any] = []
    position = 0
    for ranks, items in turns:
        samplers = [make(ranks, rank) for rank in range(ranks)]
        for sampler in samplers:
            sampler.resume_at(epoch, position)
            read += itertools.islice(sampler, items)
        [position] = {sampler.shard(position).position_after(items or 0) for sampler in samplers}
    return read


@on_fifty_cases
@given(
    kind=st.sampled_from([*SAMPLERS]),
    length=st.integers(1, 50),
    stopped=st.lists(st.builds(Turn, st.integers(1, 7), st.integers(0, 8)), max_size=4),
    last=st.builds(Turn, st.integers(1, 7), st.none()),
    epoch=st.integers(0, 3),
    uneven=st.sampled_from(["pad", "drop", "exact"]),
)
def test_other_numbers_of_ranks_read_the_rest(
    kind: str, length: int, stopped: list[Turn], last: Turn, epoch: int, uneven: str
) -> None:
    """Each item is read once, if several numbers of ranks read one after another.

    At the end, ``"pad"`` repeats and ``"drop"`` leaves out less than one item of each of
    the most ranks.
    """
    make = sampler_of(kind, length, seed=2, uneven=uneven)
    turns = [*stopped, last]
    [order] = items_by_rank(make, 1, epoch)
    read = read_in_turns(make, turns, epoch)
    counted = Counter(map(str, read))
    if uneven == "drop":
        assert counted == Counter(map(str, order[: len(read)])), "only the last are left out"
    else:
        assert counted >= Counter(map(str, order)), "no item is left out"
    repeated_or_left_out = abs(len(read) - len(order))
    most_ranks = max(turn.ranks for turn in turns)
    assert repeated_or_left_out < (1 if uneven == "exact" else most_ranks)


# Orders and positions.


@pytest.mark.parametrize(
    ("length", "digest"),
    [(1000, "0df14c22ea6ace32"), (70_001, "0dbb2761ad438328"), (2**62, "58228eda3b538ecb")],
)
def test_an_order_stays_what_it_was(length: int, digest: str) -> None:
    """A seed and an epoch give the same indices in every release."""
    sampler = ScalableDistributedSampler(range(length), 3, 1, seed=7)
    sampler.set_epoch(5)
    indices = list(itertools.islice(sampler, 40_000))
    assert hashlib.sha256(repr(indices).encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("kind", [kind for kind in SAMPLERS if kind != "in order"])
def test_another_seed_or_epoch_makes_another_order(kind: str) -> None:
    """No two seeds or epochs give a sampler that shuffles or draws the same order."""
    seeds_and_epochs = ((1, 0), (2, 0), (1, 1), (1, 2))
    orders = {
        # The first item of ``Drawing`` is the epoch itself.
        str(items_by_rank(sampler_of(kind, 50, seed=seed), 1, epoch)[0][1:])
        for seed, epoch in seeds_and_epochs
    }
    assert len(orders) == len(seeds_and_epochs)


HUGE = 2**62 - 3


def test_huge_orders_need_no_memory() -> None:
    """Orders that are too long for a list take less than a MiB, and repeat no index."""
    read = 40_000
    sampler = ScalableDistributedSampler(range(HUGE), 1000, 7)
    assert len(set(itertools.islice(sampler, read))) == read
    tracemalloc.start()
    sampler.resume_at(1, HUGE // 2)
    deque(itertools.islice(sampler, read), maxlen=0)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 1 << 20


def test_a_position_belongs_to_its_epoch() -> None:
    """Setting the same epoch keeps the position; any other one starts at its beginning."""
    sampler = sampler_of("shuffled", 100)(1, 0)
    [whole] = items_by_rank(sampler_of("shuffled", 100), 1, 5)
    sampler.resume_at(5, 40)
    sampler.set_epoch(5)
    assert (sampler.position, len(sampler)) == (40, 100)
    assert list(sampler) == whole[40:]
    sampler.set_epoch(6)
    assert sampler.position == 0
    sampler.set_epoch(5)
    assert list(sampler) == whole


# What users give to samplers.


def one_sample(*arguments: Any, **options: Any) -> ScalableDistributedSampler:
    return ScalableDistributedSampler([1], *arguments, **options)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        pytest.param(
            lambda: ScalableDistributedSampler(iter([1])),
            r"dataset must have a length \(got list_iterator",
            id="dataset without a length",
        ),
        pytest.param(
            lambda: DistributedBatchSamplerWrapper(iter([])),
            r"batch_sampler must have a length \(got list_iterator",
            id="batch sampler without a length",
        ),
        pytest.param(
            lambda: one_sample(2, 2),
            r"rank must be an integer from 0 to 1 \(got 2\); leave num_replicas and rank out",
            id="rank",
        ),
        pytest.param(
            lambda: one_sample("2", 0),
            r"num_replicas must be an integer of at least 1 \(got '2'",
            id="num_replicas",
        ),
        pytest.param(
            lambda: one_sample(seed=-1), r"seed must be .*at least 0 \(got -1\)", id="seed"
        ),
        pytest.param(
            lambda: one_sample(uneven="wrap"),
            r"uneven must be 'pad', 'drop' or 'exact' \(got 'w",
            id="uneven",
        ),
        pytest.param(
            lambda: one_sample().set_epoch(False),
            r"epoch must be .*at least 0 \(got False\)",
            id="epoch that is a bool",
        ),
        pytest.param(
            lambda: one_sample().set_epoch(torch.tensor(True)),
            r"epoch must be .*\(got tensor\(True",
            id="epoch that is a tensor",
        ),
        pytest.param(
            lambda: one_sample().resume_at(0, 2),
            r"position must be .*from 0 to 1 \(got 2\)",
            id="position",
        ),
    ],
)
def test_bad_arguments_are_refused(make: Any, says: str) -> None:
    """The error, a ValueError, names the field, the rule and the value."""
    with pytest.raises(ConfigurationError, match=says):
        make()


class Reusing(list[Any]):
    """A batch sampler that yields one list or array again and again."""

    def __init__(self, length: int, batch: Any) -> None:
        super().__init__([batch] * length)

    def __iter__(self) -> Iterator[Any]:
        batch = self[0]
        for number in range(len(self)):
            batch[0] = number
            yield batch


@pytest.mark.parametrize("batch", [[0], np.array([0])])
def test_a_batch_sampler_may_reuse_one_batch(batch: Any) -> None:
    """Each rank yields a copy of the batch as it was."""
    parts = items_by_rank(partial(DistributedBatchSamplerWrapper, Reusing(5, batch)), 2)
    assert parts == [[[0], [2], [4]], [[1], [3], [0]]]


class Promising(list[int]):
    """A sampler of seven items that promises another number."""

    def __init__(self, promised: int) -> None:
        super().__init__(range(7))
        self.promised = promised

    def __len__(self) -> int:
        return self.promised


def test_a_sampler_that_yields_too_little_is_named() -> None:
    """A sampler must yield as many items as its length; more count for nothing."""
    message = r"at least its length of 9 items \(got 7\); correct Promising"
    with pytest.raises(ConfigurationError, match=message):
        list(DistributedBatchSamplerWrapper(Promising(9), 2, 0))
    parts = items_by_rank(partial(DistributedBatchSamplerWrapper, Promising(6)), 2)
    assert in_global_order(parts) == [*range(6)]


@pytest.mark.parametrize("promised", [9, 6])
def test_a_rank_that_draws_by_itself_reads_what_there_is(promised: int) -> None:
    """A sampler may yield less than its length; items beyond the length are left out."""
    assert len([*RankOrderSampler(Promising(promised))]) == min(7, promised)
