"""Batches are the same on every number of ranks, each on one of them, and can be gone on with."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from lightning_ddp_ext.data.batch_dealing import DistributedBatchSamplerWrapper
from lightning_ddp_ext.errors import SamplerError
from tests.data.data import Sized, dealt, in_turn, stop_and_go, take


class Buckets(Sampler[list[int]]):
    """Batches of samples of like length, drawn with every generator there is, in an order of its own each epoch."""

    def __init__(self, lengths: list[int], promised: int | None = None) -> None:
        self.lengths, self.promised, self.epoch = lengths, promised, 0
        self.generator = torch.Generator().manual_seed(torch.initial_seed())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return (len(self.lengths) + 3) // 4 if self.promised is None else self.promised

    def __iter__(self) -> Iterator[list[int]]:
        noise = torch.rand(len(self.lengths), generator=self.generator) + float(np.random.random()) + random.random()
        order = sorted(range(len(self.lengths)), key=lambda sample: (self.lengths[sample], noise[sample].item()))
        batches = [order[begin : begin + 4] for begin in range(0, len(order), 4)]
        while batches:
            yield batches.pop(int(torch.randint(len(batches), ())))


LENGTHS = [sample * 7 % 5 for sample in range(41)]


def buckets(**options: Any) -> Any:
    def make(world_size: int, rank: int) -> DistributedBatchSamplerWrapper:
        torch.manual_seed(rank)  # ranks need not agree
        return DistributedBatchSamplerWrapper(Buckets(LENGTHS), world_size, rank, seed=3, **options)

    return make


@pytest.mark.parametrize("epoch", [0, 1, 4])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 12, 25])
def test_batches_are_the_same_on_every_number_of_ranks(world_size: int, epoch: int) -> None:
    """Dealt out in turn they are one process's; padding repeats the first ones, dropping leaves the last ones out."""
    one = dealt(buckets(), 1, epoch)[0]
    assert sorted(sample for batch in one for sample in batch) == list(range(41))
    assert in_turn(dealt(buckets(uneven="exact"), world_size, epoch)) == one
    padded = in_turn(dealt(buckets(), world_size, epoch))
    assert padded == [one[number % 11] for number in range(len(padded))]
    assert 11 <= len(padded) < 11 + world_size
    assert in_turn(dealt(buckets(uneven="drop"), world_size, epoch)) == one[: 11 // world_size * world_size]


def test_every_epoch_has_batches_of_its_own() -> None:
    """Setting the epoch reseeds what the batch sampler draws from."""
    epochs = [str(dealt(buckets(), 1, epoch)) for epoch in range(10)]
    assert len(set(epochs)) == 10


def test_the_epoch_reaches_everything_that_is_wrapped() -> None:
    """The batch sampler and the sampler in it are told, when the epoch is set and when it is resumed."""
    inner = BatchSampler(Buckets(LENGTHS), 2, drop_last=False)
    inner.set_epoch = lambda epoch: setattr(inner, "epoch", epoch)
    sampler = DistributedBatchSamplerWrapper(inner, 1, 0)
    sampler.set_epoch(4)
    assert (inner.epoch, inner.sampler.epoch) == (4, 4)
    sampler.resume_at(7, 0)
    assert (inner.epoch, inner.sampler.epoch) == (7, 7)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    before=st.integers(1, 5),
    after=st.integers(1, 13),
    consumed=st.integers(0, 12),
    epoch=st.integers(0, 2),
    uneven=st.sampled_from(["pad", "drop", "exact"]),
)
def test_another_number_of_ranks_gets_the_rest(before: int, after: int, consumed: int, epoch: int, uneven: Any) -> None:
    """Each batch is read once; pad repeats, and drop leaves out, less than a round."""
    one = dealt(buckets(), 1, epoch)[0]
    read = stop_and_go(buckets(uneven=uneven), before, after, consumed, epoch)
    counted = [read.count(batch) for batch in one]
    assert sum(counted) == len(read)
    if uneven == "exact":
        assert counted == [1] * 11
    elif uneven == "pad":
        assert min(counted) == 1
        assert len(read) < 11 + max(before, after)
    else:
        assert max(counted) <= 1
        assert len(read) > 11 - max(before, after)


def test_a_sampler_of_the_users_draws_alike_on_all_ranks() -> None:
    """Torch's own batch sampler over a random one, whose generators differ by rank."""

    def make(world_size: int, rank: int) -> DistributedBatchSamplerWrapper:
        sampler = RandomSampler(range(30), generator=torch.Generator().manual_seed(rank))
        return DistributedBatchSamplerWrapper(
            BatchSampler(sampler, 4, drop_last=False), world_size, rank, uneven="exact"
        )

    batches = in_turn(dealt(make, 3))
    assert sorted(sample for batch in batches for sample in batch) == list(range(30))


def test_drawing_leaves_the_generators_of_others_alone() -> None:
    """Between batches, and after them, global generators are where the rest of the program has left them."""
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = [(torch.rand(()).item(), random.random(), np.random.random()) for _ in range(6)]
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    found = [
        (torch.rand(()).item(), random.random(), np.random.random())
        for _ in DistributedBatchSamplerWrapper(Buckets(LENGTHS), 2, 0)
    ]
    assert found == expected


def test_what_others_draw_between_batches_changes_nothing() -> None:
    """A training step that draws from the global generator does not change the batches to come."""
    batches = []
    for batch in buckets()(2, 1):
        batches.append(batch)
        torch.rand(10), random.random()
    assert batches == list(buckets()(2, 1))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_reads_the_batches(num_workers: int) -> None:
    """In place of a batch sampler, with workers too."""
    sampler = buckets()(2, 1)
    loader = DataLoader(range(41), batch_sampler=sampler, num_workers=num_workers)
    assert len(loader) == 6
    assert [batch.tolist() for batch in loader] == list(buckets()(2, 1))


def test_positions_and_states_count_batches() -> None:
    """The state is what the newest iterator has handed out, or what the loader says was used."""
    sampler = buckets()(2, 1)
    whole = list(sampler)
    take(sampler, 2)
    state = sampler.state_dict()
    assert (state["position"], state["length"], state["kind"]) == (4, 11, "batches")
    assert sampler.state_dict(1)["position"] == 2
    resumed = buckets()(2, 1)
    resumed.load_state_dict(state)
    assert (len(resumed), resumed.left, resumed.position) == (6, 4, 4)
    assert list(resumed) == whole[2:]
    resumed.set_epoch(1)
    assert (resumed.position, resumed.left, resumed.state_dict()["position"]) == (0, 6, 0)


def test_batches_that_are_one_list_filled_anew_stay_apart() -> None:
    """A batch sampler may use its list again: what it has yielded before does not change."""

    class Reusing(list[Any]):
        def __iter__(self) -> Iterator[list[int]]:
            batch = [0]
            for batch[0] in range(len(self)):
                yield batch

    assert dealt(lambda w, r: DistributedBatchSamplerWrapper(Reusing([0] * 9), w, r), 2) == [
        [[0], [2], [4], [6], [8]],
        [[1], [3], [5], [7], [0]],
    ]


def test_only_some_batches_are_drawn_ahead() -> None:
    """Batches are drawn as they are asked for: an epoch of any length can be begun."""
    endless = BatchSampler(SequentialSampler(Sized(10**9)), 2, drop_last=False)
    assert take(DistributedBatchSamplerWrapper(endless, 2, 1), 2) == [[2, 3], [6, 7]]


def test_a_batch_sampler_that_yields_too_little_is_named() -> None:
    """Its length is a promise: fewer batches are an error on every rank that misses one, more are left unread."""
    with pytest.raises(SamplerError, match=r"as its length, 13 \(got 11\); correct Buckets.__len__"):
        list(DistributedBatchSamplerWrapper(Buckets(LENGTHS, promised=13), 2, 0))
    assert len(in_turn(dealt(lambda w, r: DistributedBatchSamplerWrapper(Buckets(LENGTHS, 6), w, r), 2))) == 6


def test_no_batches_are_none() -> None:
    """An empty epoch is empty for every policy."""
    for uneven in ("pad", "drop", "exact"):
        assert dealt(lambda w, r: DistributedBatchSamplerWrapper([], w, r, uneven=uneven), 2) == [[], []]  # noqa: B023


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_sampler": iter([])}, r"batch_sampler must have a length \(got list_iterator, which has none\)"),
        ({"num_replicas": 2, "rank": 2}, r"rank must be below num_replicas, 2 \(got 2\)"),
        ({"seed": -1}, r"seed must be .* \(got -1\)"),
        ({"uneven": "x"}, r"uneven must be .* \(got 'x'\)"),
    ],
)
def test_bad_arguments_are_refused(options: dict[str, Any], says: str) -> None:
    """The error names the field, the rule and the value."""
    with pytest.raises(SamplerError, match=says):
        DistributedBatchSamplerWrapper(**{"batch_sampler": [[1]], **options})


def test_the_state_of_another_batch_sampler_is_refused() -> None:
    """Of another number of batches, or another kind of sampler."""
    sampler = DistributedBatchSamplerWrapper([[1], [2]], 1, 0)
    state = DistributedBatchSamplerWrapper([[1]], 1, 0).state_dict()
    with pytest.raises(SamplerError, match=r"length of the state must be the sampler's, 2 \(got 1\)"):
        sampler.load_state_dict(state)
    with pytest.raises(SamplerError, match=r"kind of the state must be the sampler's, 'batches' \(got 'scalable'\)"):
        sampler.load_state_dict({**state, "kind": "scalable"})
