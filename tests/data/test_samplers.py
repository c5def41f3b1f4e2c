"""Samplers deal out one order, whatever the number of ranks, and continue wherever they
were stopped.

The shuffle behind them is a bijection of any length, and as uniform as tests of a fixed
seed can see.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
import tracemalloc
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import islice
from math import isqrt
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.utils.data import BatchSampler, Sampler, SequentialSampler

from lightning_ddp_ext.data.permutation import Permutation
from lightning_ddp_ext.data.samplers import ExactDistributedSampler, ScalableDistributedSampler
from lightning_ddp_ext.data.seeding import mix
from lightning_ddp_ext.data.shared_samplers import DistributedBatchSamplerWrapper, SharedSampler
from lightning_ddp_ext.errors import ConfigurationError

law = settings(max_examples=100, derandomize=True, deadline=None)
Make = Callable[[int, int], Any]  # (ranks, rank) to a sampler


def dealt(make: Make, world_size: int, epoch: int = 0) -> list[list[Any]]:
    """Return the samples of each rank in an epoch."""
    samplers = [make(world_size, rank) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


def in_turn(parts: list[list[Any]]) -> list[Any]:
    """Return the ranks' samples in the global order."""
    longest = max(map(len, parts))
    return [part[number] for number in range(longest) for part in parts if number < len(part)]


def p_of(counts: NDArray[np.int64]) -> float:
    """Return the probability of counts at least as far from equal ones (Pearson's test)."""
    mean = counts.mean()
    statistic = ((counts - mean) ** 2 / mean).sum()
    freedom = len(counts) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2), torch.tensor(statistic / 2)))


class Drawing(Sampler[int]):
    """Yields its epoch, and then sums of numbers that it draws with generators of its
    own and with the global ones.

    Args:
        length: the number of items.
        promised: what ``len`` returns; None: ``length``.
        seed: of its own generators.
    """

    def __init__(self, length: int, promised: int | None = None, *, seed: int = 0) -> None:
        self.length = length
        self.promised = length if promised is None else promised
        self.epoch = 0
        self.of_torch = torch.Generator().manual_seed(seed)
        self.of_numpy = np.random.default_rng(seed)
        self.of_old_numpy = np.random.RandomState(seed)
        self.of_python = random.Random(seed)

    def draw(self) -> Iterator[int]:
        """Yield a number of each generator."""
        yield int(torch.randint(7, (), generator=self.of_torch))
        yield int(self.of_numpy.integers(7))
        yield self.of_old_numpy.randint(7)
        yield self.of_python.randrange(7)
        yield int(torch.randint(7, ()))
        yield np.random.randint(7)
        yield random.randrange(7)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.promised

    def __iter__(self) -> Iterator[int]:
        yield self.epoch
        for _ in range(self.length - 1):
            yield sum(self.draw())


# Each makes a sampler of ``n`` items for rank ``r`` of ``w`` ranks.
KINDS: dict[str, Any] = {
    "scalable": lambda n, w, r, **options: ScalableDistributedSampler(range(n), w, r, **options),
    "in order": lambda n, w, r, **options: ScalableDistributedSampler(
        range(n), w, r, shuffle=False, **options
    ),
    "shared": lambda n, w, r, **options: SharedSampler(Drawing(n, seed=r), w, r, **options),
    "batches": lambda n, w, r, **options: DistributedBatchSamplerWrapper(
        BatchSampler(Drawing(n, seed=r), 3, False), w, r, **options
    ),
}


def sampler_of(kind: str, length: int, **options: Any) -> Make:
    return lambda world_size, rank: KINDS[kind](length, world_size, rank, **options)


@law
@given(
    kind=st.sampled_from([*KINDS]),
    length=st.integers(1, 60),
    ranks=st.integers(1, 9),
    epoch=st.integers(0, 3),
)
def test_the_order_does_not_depend_on_the_number_of_ranks(
    kind: str, length: int, ranks: int, epoch: int
) -> None:
    """The ranks' items in turn are the order of one process; "pad" appends the first
    items, "drop" omits the last.
    """

    def shares(world_size: int, uneven: str) -> list[list[Any]]:
        return dealt(sampler_of(kind, length, seed=3, uneven=uneven), world_size, epoch)

    [order] = shares(1, "exact")
    exact = shares(ranks, "exact")
    assert in_turn(exact) == order
    assert len(exact[0]) - len(exact[-1]) <= 1
    rounds_up = math.ceil(len(order) / ranks)
    rounds_down = len(order) // ranks
    repeated = islice(itertools.cycle(order), rounds_up * ranks)
    assert in_turn(shares(ranks, "pad")) == [*repeated]
    assert in_turn(shares(ranks, "drop")) == order[: rounds_down * ranks]


def with_stops(make: Make, stops: list[tuple[int, int]], last: int, epoch: int) -> list[Any]:
    """Return all samples if each pair of ranks and items is read in turn, and ``last``
    ranks read the rest.
    """
    read: list[Any] = []
    position = 0
    for world_size, consumed in [*stops, (last, None)]:
        samplers = [make(world_size, rank) for rank in range(world_size)]
        for sampler in samplers:
            sampler.resume_at(epoch, position)
            read += islice(sampler, consumed)
        (position,) = {
            sampler.shard(position).position_after(consumed or 0) for sampler in samplers
        }
    return read


@law
@given(
    kind=st.sampled_from([*KINDS]),
    length=st.integers(1, 50),
    stops=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 8)), max_size=4),
    last=st.integers(1, 7),
    epoch=st.integers(0, 3),
    uneven=st.sampled_from(["pad", "drop", "exact"]),
)
def test_other_numbers_of_ranks_read_the_rest(
    kind: str, length: int, stops: list[tuple[int, int]], last: int, epoch: int, uneven: str
) -> None:
    """Each item is read once; "pad" repeats, and "drop" leaves out at the end, less
    than a round of the most ranks.
    """
    make = sampler_of(kind, length, seed=2, uneven=uneven)
    [order] = dealt(make, 1, epoch)
    read = with_stops(make, stops, last, epoch)
    counted = Counter(map(str, read))
    most_ranks = max([last, *(world_size for world_size, _ in stops)])
    if uneven == "drop":
        assert counted == Counter(map(str, order[: len(read)]))
        assert len(read) > len(order) - most_ranks
    else:
        assert counted >= Counter(map(str, order))
        assert len(read) < len(order) + (most_ranks if uneven == "pad" else 1)


@pytest.mark.parametrize(
    ("length", "digest"),
    [(1000, "0df14c22ea6ace32"), (70_001, "0dbb2761ad438328"), (2**62, "58228eda3b538ecb")],
)
def test_an_order_stays_what_it_was(length: int, digest: str) -> None:
    """A seed and an epoch give the same indices in every version, so checkpoints
    continue in their order.
    """
    sampler = ScalableDistributedSampler(range(length), 3, 1, seed=7)
    sampler.set_epoch(5)
    indices = list(islice(sampler, 40_000))
    assert hashlib.sha256(repr(indices).encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "in order"])
def test_another_seed_or_epoch_makes_another_order(kind: str) -> None:
    """This holds for every sampler that shuffles, draws, or divides items among the
    ranks.
    """
    seeds_and_epochs = ((1, 0), (2, 0), (1, 1), (1, 2))
    orders = set()
    for seed, epoch in seeds_and_epochs:
        [order] = dealt(sampler_of(kind, 50, seed=seed), 1, epoch)
        orders.add(str(order[1:]))  # the first item may be the epoch
    assert len(orders) == len(seeds_and_epochs)


def test_the_exact_sampler_deals_each_sample_once_in_the_datasets_order() -> None:
    """Some ranks get one more, some none; an empty dataset is not an error, as with
    torch's own sampler.
    """
    for length, shares in ((5, [[0, 3], [1, 4], [2]]), (2, [[0], [1], []]), (0, [[], [], []])):
        assert (
            dealt(lambda w, r, length=length: ExactDistributedSampler(range(length), w, r), 3)
            == shares
        )
    assert dealt(lambda w, r: ScalableDistributedSampler([], w, r), 3) == [[], [], []]


def test_huge_orders_need_no_memory_and_end_where_they_should() -> None:
    """Orders too long for a list take less than a MiB, repeat no index, and do not
    round near 2**62.
    """
    length = 2**62 - 3
    sampler = ScalableDistributedSampler(range(length), 1000, 7)
    assert len(set(islice(sampler, 40_000))) == 40_000
    tracemalloc.start()
    try:
        deque(islice(sampler, 40_000), maxlen=0)
        sampler.resume_at(1, length // 2)
        deque(islice(sampler, 40_000), maxlen=0)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    for uneven, left in (("pad", 6), ("drop", 5), ("exact", 5)):
        sampler = sampler_of("scalable", length, shuffle=False, uneven=uneven)(1000, 7)
        sampler.resume_at(0, length - 5001)
        assert [*iter(sampler)] == [
            (length - 5001 + 7 + number * 1000) % length for number in range(left)
        ]


def test_a_position_belongs_to_its_epoch() -> None:
    """Setting the same epoch keeps the position; another epoch starts at its beginning,
    even an earlier one.
    """
    sampler = sampler_of("scalable", 100)(1, 0)
    [whole] = dealt(sampler_of("scalable", 100), 1, 5)
    sampler.resume_at(5, 40)
    sampler.set_epoch(5)
    assert (sampler.position, len(sampler)) == (40, 100)
    assert list(sampler) == whole[40:]
    sampler.set_epoch(6)
    assert sampler.position == 0
    sampler.set_epoch(5)
    assert list(sampler) == whole


def one_sample(*arguments: Any, **options: Any) -> ScalableDistributedSampler:
    return ScalableDistributedSampler([1], *arguments, **options)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: ScalableDistributedSampler(iter([1])),
            r"dataset must have a length \(got list_iterator",
        ),
        (lambda: SharedSampler(iter([])), r"sampler must have a length \(got list_iterator"),
        (
            lambda: DistributedBatchSamplerWrapper(iter([])),
            r"batch_sampler must have a length \(got list_iterator",
        ),
        (
            lambda: one_sample(2, 2),
            r"rank must be at least 0 and less than num_replicas=2 \(got 2\)",
        ),
        (
            lambda: one_sample(2, -1),
            r"rank must be at least 0 and less than num_replicas=2 \(got -1\)",
        ),
        (lambda: one_sample(seed=-1), r"seed must be .*at least 0 \(got -1\)"),
        (lambda: one_sample(uneven="wrap"), r"uneven must be 'pad', 'drop' or 'exact' \(got 'w"),
        (lambda: one_sample().set_epoch(-1), r"epoch must be .*at least 0 \(got -1\)"),
        (lambda: one_sample().set_epoch(0.0), r"epoch must be .*at least 0 \(got 0.0\)"),
        (lambda: one_sample().set_epoch(False), r"epoch must be .*at least 0 \(got False\)"),
        (lambda: one_sample().resume_at(0, 2), r"position must be .*from 0 to 1 \(got 2\)"),
    ],
)
def test_bad_arguments_are_refused(make: Any, says: str) -> None:
    """The error, a ValueError, names the field, the rule and the value."""
    with pytest.raises(ConfigurationError, match=says):
        make()


def test_batches_reach_the_loader_unchanged() -> None:
    """This holds for a batch sampler that reuses one list, and for a sampler that
    yields batches.
    """

    class Reusing(list[Any]):
        def __iter__(self) -> Iterator[list[int]]:
            batch = [0]
            for batch[0] in range(len(self)):
                yield batch

    parts = dealt(lambda w, r: DistributedBatchSamplerWrapper(Reusing([0] * 5), w, r), 2)
    assert parts == [[[0], [2], [4]], [[1], [3], [0]]]
    batches = BatchSampler(SequentialSampler(range(4)), 2, drop_last=False)
    assert dealt(lambda w, r: SharedSampler(batches, w, r), 2) == [[[0, 1]], [[2, 3]]]


def test_a_sampler_that_yields_too_little_is_named() -> None:
    """A sampler must yield as many items as its length; further items are not read."""
    with pytest.raises(
        ConfigurationError, match=r"at least len\(sampler\) = 9 items \(got 7\); correct Drawing"
    ):
        list(SharedSampler(Drawing(7, promised=9), 2, 0))
    assert len(in_turn(dealt(lambda w, r: SharedSampler(Drawing(7, promised=6), w, r), 2))) == 6


SMALLEST_P = 1e-4
JUST_ABOVE_THE_TABLE = 65_537


def cells_of(values: NDArray[Any], length: int, cells: int) -> NDArray[np.int64]:
    """Return in which of so many equal parts of the order each value is."""
    return (values.astype(np.float64) / length * cells).astype(np.int64)


@pytest.mark.parametrize(
    "length", [1, 2, 1000, 65_535, 65_536, 65_537, 65_538, 100_003, 257 * 256, 2**18, 999_999]
)
def test_lengths_around_the_table_and_beyond_are_bijections(length: int) -> None:
    """Short orders are read from a table, longer ones from a network; both are complete
    near the limit.
    """
    assert np.array_equal(
        np.sort(Permutation(length, 3).apply(np.arange(length))), np.arange(length)
    )


@pytest.mark.parametrize("length", [JUST_ABOVE_THE_TABLE, 10**7, 10**12, 3 * 2**59])
def test_pairs_of_one_epoch_are_independent(length: int) -> None:
    """Positions side by side, one row apart or far apart have independent images."""
    order = Permutation(length, mix(6, length))
    positions = np.arange(60_000)
    images = order.apply(positions)
    row = isqrt(length - 1) + 1  # the network's positions are a square of such rows
    for lag in (1, 2, row, length // 2):
        other_images = order.apply((positions + lag) % length)
        pairs = cells_of(images, length, 16) * 16 + cells_of(other_images, length, 16)
        assert p_of(np.bincount(pairs, minlength=16 * 16)) > SMALLEST_P
        distances = cells_of((other_images - images) % length, length, 200)
        assert p_of(np.bincount(distances, minlength=200)) > SMALLEST_P
