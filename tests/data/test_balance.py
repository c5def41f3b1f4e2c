"""Equal numbers of batches: the arithmetic, and the batch samplers that follow it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, SubsetRandomSampler

from lightning_ddp_ext.data.balance import (
    Balance,
    BalancedBatchSampler,
    PaddedBatchSampler,
    PaddedSampler,
    deals_unevenly,
    is_exact,
)
from lightning_ddp_ext.data.batch_dealing import DistributedBatchSamplerWrapper
from lightning_ddp_ext.data.default_samplers import SharedSampler
from lightning_ddp_ext.data.loader import set_index_sampler
from lightning_ddp_ext.data.samplers import ExactDistributedSampler, ScalableDistributedSampler

SAMPLES, RANKS, BATCH_SIZES = st.integers(0, 120), st.integers(1, 9), st.integers(1, 8)


def by_rank(samples: int, ranks: int, batch_size: int, **options: bool) -> list[BalancedBatchSampler]:
    samplers = [ExactDistributedSampler(range(samples), ranks, rank) for rank in range(ranks)]
    return [BalancedBatchSampler(sampler, batch_size, **options) for sampler in samplers]


def counting(each: BalancedBatchSampler) -> list[list[int]]:
    return list(each)[: each.balance.batches[each.sampler.rank]]


@settings(max_examples=100, deadline=None)
@given(SAMPLES, RANKS, BATCH_SIZES)
def test_batches_that_count_hold_each_sample_once(samples: int, ranks: int, batch_size: int) -> None:
    """Whatever the numbers, the batches that count hold every sample exactly once, on the rank that it is dealt to."""
    for rank, each in enumerate(by_rank(samples, ranks, batch_size)):
        assert [sample for batch in counting(each) for sample in batch] == list(range(rank, samples, ranks))


@settings(max_examples=100, deadline=None)
@given(SAMPLES, RANKS, BATCH_SIZES, st.booleans(), st.booleans())
def test_all_ranks_have_equally_many_batches(
    samples: int, ranks: int, batch_size: int, drop_last: bool, may_split: bool
) -> None:
    """Every rank yields as many batches as its length says, none empty or too large, and all lengths are equal."""
    batches = [list(each) for each in by_rank(samples, ranks, batch_size, drop_last=drop_last, may_split=may_split)]
    lengths = {len(each) for each in by_rank(samples, ranks, batch_size, drop_last=drop_last, may_split=may_split)}
    assert {len(each) for each in batches} == lengths
    assert len(lengths) == 1
    assert all(1 <= len(batch) <= batch_size for each in batches for batch in each)


@settings(max_examples=100, deadline=None)
@given(SAMPLES, RANKS, BATCH_SIZES)
def test_a_rank_is_absent_only_where_nothing_else_is_possible(samples: int, ranks: int, batch_size: int) -> None:
    """With two samples a batch or more, and a sample a rank, every rank has batches of its own throughout."""
    balance = Balance.dealt(samples, ranks, batch_size)
    impossible = samples % ranks != 0 and (batch_size == 1 or samples < ranks)
    assert balance.is_even != impossible
    idle = [rank for step in range(balance.steps) for rank in balance.idle(step)]
    assert idle == (list(range(samples % ranks, ranks)) if impossible else [])


@settings(max_examples=100, deadline=None)
@given(SAMPLES, RANKS, BATCH_SIZES)
def test_no_more_batches_than_the_rank_with_most_samples_needs(samples: int, ranks: int, batch_size: int) -> None:
    """Batches in two add no step to those that rank 0 needs, and all others are full up to the last."""
    steps = -(-len(range(0, samples, ranks)) // batch_size)
    balance = Balance.dealt(samples, ranks, batch_size)
    assert balance.steps == steps
    for each in by_rank(samples, ranks, batch_size):
        assert all(len(batch) == batch_size for batch in counting(each)[:-2])


@given(SAMPLES, RANKS, BATCH_SIZES)
def test_dropping_leaves_complete_batches_alone(samples: int, ranks: int, batch_size: int) -> None:
    """With drop_last each rank has the complete batches that the rank with fewest has, and nobody is idle."""
    for each in by_rank(samples, ranks, batch_size, drop_last=True):
        assert each.balance.is_even
        assert [len(batch) for batch in each] == [batch_size] * (samples // ranks // batch_size)


def test_a_batch_in_two_keeps_the_order() -> None:
    """The rank with fewer samples reads its last batch in two halves, the larger one first."""
    assert [list(each) for each in by_rank(11, 2, 5)] == [[[0, 2, 4, 6, 8], [10]], [[1, 3, 5], [7, 9]]]


def test_without_division_the_last_batch_does_not_count() -> None:
    """Where batches stay whole, the rank with fewer repeats a sample of its own in a batch that does not count."""
    each = by_rank(9, 2, 4, may_split=False)[1]
    assert list(each) == [[1, 3, 5, 7], [1]]
    assert each.balance == Balance((2, 1))


def test_ranks_without_a_sample_read_the_first_of_the_order() -> None:
    """A rank for which there is no sample yields, once, the sample that the global order begins with."""
    samplers = [ExactDistributedSampler(range(2), 4, rank, shuffle=True, seed=5) for rank in range(4)]
    batches = [list(BalancedBatchSampler(sampler, 3)) for sampler in samplers]
    assert batches[2] == batches[3] == batches[0]
    assert sorted(batches[0] + batches[1]) == [[0], [1]]


def test_first_sample_is_one_that_the_users_sampler_yields() -> None:
    """A rank without samples of a sampler that draws from a part of the dataset reads one of that part."""
    shared = SharedSampler(SubsetRandomSampler([70, 80]), num_replicas=3, rank=2, uneven="exact")
    assert shared.first() in {70, 80}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_reads_through_a_balanced_batch_sampler_again_and_again(num_workers: int) -> None:
    """Put into a loader that exists already, it is iterated over each epoch, with workers too."""
    loader = DataLoader(range(9), 4, sampler=ExactDistributedSampler(range(9), 2, 1), num_workers=num_workers)
    set_index_sampler(loader, BalancedBatchSampler(loader.sampler, 4))
    epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
    assert epochs == [[[1, 3], [5, 7]]] * 2
    assert len(loader) == 2


def test_a_sampler_that_goes_on_is_balanced_from_there() -> None:
    """The batches are those of what is left of the epoch when the sampler begins in its middle."""
    each = by_rank(20, 2, 4)[1]
    each.sampler.resume_at(0, 11)
    assert each.balance == Balance.dealt(9, 2, 4)
    assert list(each) == [[12, 14], [16, 18]]


class Backwards(BatchSampler):
    """A user's batch sampler."""

    colour = "red"

    def __iter__(self) -> Any:
        return reversed(list(super().__iter__()))


@pytest.mark.parametrize(("own", "filler"), [(2, [0]), (0, [0])])
def test_any_batch_sampler_is_filled_up(own: int, filler: list[int]) -> None:
    """A custom batch sampler keeps its batches and its attributes, and repeats a sample until it has as many as all."""
    sampler = ExactDistributedSampler(range(5 if own else 1), 2, 0 if own else 1)
    batches = Backwards(sampler, 2, False)
    levelled = PaddedBatchSampler(batches, (own, 4), 0)
    assert list(levelled) == list(batches) + [filler] * (4 - own)
    assert (len(levelled), levelled.sampler, levelled.batch_size, levelled.colour) == (4, sampler, 2, "red")
    assert [levelled.balance.idle(step) for step in range(4)] == [()] * own + [(0,)] * (4 - own)


def test_whole_batches_are_filled_up() -> None:
    """Where whole batches are dealt out, a rank without any repeats a sample of the first one."""
    batches = BatchSampler(range(5, 8), 2, False)
    dealt = [DistributedBatchSamplerWrapper(batches, 3, rank, uneven="exact") for rank in range(3)]
    assert all(map(deals_unevenly, dealt))
    assert [list(PaddedBatchSampler(each, (1, 1, 0), rank)) for rank, each in enumerate(dealt)] == [
        [[5, 6]], [[7]], [[5]],
    ]  # fmt: skip


def test_samples_without_batches_are_filled_up() -> None:
    """A loader without batches gets as many samples on each rank, and the epoch is passed on."""
    samplers = [PaddedSampler(ExactDistributedSampler(range(4), 3, rank)) for rank in range(3)]
    assert [list(each) for each in samplers] == [[0, 3], [1, 1], [2, 2]]
    assert [len(each) for each in samplers] == [2, 2, 2]
    assert samplers[0].balance == Balance((2, 1, 1))
    samplers[0].set_epoch(7)
    assert samplers[0].sampler.epoch == 7


def test_only_samplers_that_may_be_uneven_are_exact() -> None:
    """Samplers that pad, and those of torch, need no balance."""
    assert is_exact(ScalableDistributedSampler(range(3), 2, 0, uneven="exact"))
    assert not is_exact(ScalableDistributedSampler(range(3), 2, 0))
    assert not is_exact(SequentialSampler(range(3)))
