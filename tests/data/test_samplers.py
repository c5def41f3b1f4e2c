"""Samplers deal out one order, whatever the number of ranks, and go on wherever they were stopped."""

from __future__ import annotations

import hashlib
import pickle
import tracemalloc
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    Sampler,
    SequentialSampler,
)

from lightning_ddp_ext.data.samplers import (
    ExactDistributedSampler,
    ScalableDistributedSampler,
    TorchOrderSampler,
)
from lightning_ddp_ext.data.shared_samplers import DistributedBatchSamplerWrapper, SharedSampler
from lightning_ddp_ext.data.weighted import DistributedWeightedSampler
from lightning_ddp_ext.errors import SamplerError
from tests.data.data import Sized, dealt, in_turn, stop_and_go, take
from tests.harness.ranks import run_ranks

POLICIES = st.sampled_from(["pad", "drop", "exact"])
law = settings(max_examples=100, derandomize=True, deadline=None)


def scalable(length: int, **options: Any) -> Any:
    return lambda world_size, rank: ScalableDistributedSampler(Sized(length), world_size, rank, **options)


# The order.


@law
@given(
    length=st.integers(0, 50),
    world_size=st.integers(1, 7),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
)
def test_torch_order_is_torchs(
    length: int, world_size: int, seed: int, epoch: int, shuffle: bool, drop_last: bool
) -> None:
    """Index for index what ``DistributedSampler`` yields, for any length, also below the number of ranks."""
    for rank in range(world_size):
        torchs = DistributedSampler(Sized(length), world_size, rank, shuffle, seed, drop_last)
        ours = TorchOrderSampler(Sized(length), world_size, rank, shuffle, seed, drop_last)
        for each in (torchs, ours):
            each.set_epoch(epoch)
        assert len(ours) == len(torchs)
        assert list(ours) == list(torchs)
        names = ("num_replicas", "rank", "epoch", "drop_last", "num_samples", "total_size", "shuffle", "seed")
        assert [getattr(ours, name) for name in names] == [getattr(torchs, name) for name in names]


def test_long_torch_orders_are_torchs() -> None:
    """Across many blocks, too."""
    torchs, ours = (kind(Sized(100_003), 2, 1, seed=5) for kind in (DistributedSampler, TorchOrderSampler))
    indices = list(ours)
    assert indices == list(torchs)
    assert {type(index) for index in indices} == {int}


@law
@given(length=st.integers(1, 60), world_size=st.integers(1, 7), epoch=st.integers(0, 3), shuffle=st.booleans())
def test_the_order_does_not_depend_on_the_number_of_ranks(
    length: int, world_size: int, epoch: int, shuffle: bool
) -> None:
    """Dealt to any number of ranks, the indices taken in turn are the same permutation."""
    one = in_turn(dealt(scalable(length, seed=3, shuffle=shuffle, uneven="exact"), 1, epoch))
    assert in_turn(dealt(scalable(length, seed=3, shuffle=shuffle, uneven="exact"), world_size, epoch)) == one
    assert in_turn(dealt(scalable(length, seed=3, shuffle=shuffle), world_size, epoch))[:length] == one
    assert sorted(one) == list(range(length))
    if not shuffle:
        assert one == list(range(length))


@pytest.mark.parametrize(
    ("length", "digest"),
    [
        (1000, "0df14c22ea6ace32"),
        (70_001, "0dbb2761ad438328"),
        (10**8, "efa4a869623ed22c"),
        (10**12, "f90792404b2a271d"),
        (2**62, "58228eda3b538ecb"),
    ],
)
def test_an_order_stays_what_it_was(length: int, digest: str) -> None:
    """A seed and an epoch have the same indices in every version, across several blocks."""
    sampler = ScalableDistributedSampler(Sized(length), 3, 1, seed=7)
    sampler.set_epoch(5)
    indices = list(islice(sampler, 40_000))
    assert hashlib.sha256(repr(indices).encode()).hexdigest()[:16] == digest


def test_exact_sampler_deals_each_sample_once() -> None:
    """In the dataset's order unless it is to shuffle, some ranks one more, some none."""
    assert dealt(lambda w, r: ExactDistributedSampler(range(5), w, r), 3) == [[0, 3], [1, 4], [2]]
    assert dealt(lambda w, r: ExactDistributedSampler(range(2), w, r), 4) == [[0], [1], [], []]
    assert dealt(lambda w, r: ExactDistributedSampler([], w, r), 2) == [[], []]
    assert sorted(in_turn(dealt(lambda w, r: ExactDistributedSampler(range(50), w, r, shuffle=True), 4))) == [
        *range(50)
    ]


@pytest.mark.parametrize("length", [10**9, 10**12, 2**62])
def test_huge_orders_need_no_memory(length: int) -> None:
    """Less than a mebibyte, at the beginning and in the middle, for lengths that no list could have."""
    sampler = ScalableDistributedSampler(Sized(length), 8, 3)
    take(sampler, 1)
    tracemalloc.start()
    try:
        deque(islice(sampler, 40_000), maxlen=0)
        sampler.resume_at(1, length // 2)
        deque(islice(sampler, 40_000), maxlen=0)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# Going on.


@law
@given(
    length=st.integers(1, 50),
    before=st.integers(1, 6),
    after=st.integers(1, 6),
    consumed=st.integers(0, 20),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
    uneven=POLICIES,
)
def test_another_number_of_ranks_reads_the_rest(
    length: int, before: int, after: int, consumed: int, epoch: int, shuffle: bool, uneven: Any
) -> None:
    """Before and after a stop each sample is read once; pad repeats, and drop leaves out, less than a round."""
    read = Counter(
        stop_and_go(scalable(length, seed=2, shuffle=shuffle, uneven=uneven), before, after, consumed, epoch)
    )
    if uneven == "exact":
        assert read == Counter(range(length))
    elif uneven == "pad":
        assert set(read) == set(range(length))
        assert read.total() < length + max(before, after)
    else:
        assert set(read.values()) <= {1}
        assert length - max(before, after) < read.total() <= length


@pytest.mark.parametrize("taken", [0, 1, 255, 256, 257, 5_000, 33_000])
def test_state_is_what_the_newest_iterator_has_handed_out(taken: int) -> None:
    """To the sample, wherever in a block, and whatever older iterators have done."""
    sampler = ScalableDistributedSampler(Sized(100_000), 3, 1, seed=4)
    whole = list(sampler)
    take(sampler, 77)
    assert take(sampler, taken) == whole[:taken]
    state = sampler.state_dict()
    assert state["position"] == (3 * taken if taken else 3 * 77)
    resumed = ScalableDistributedSampler(Sized(100_000), 3, 1, seed=4)
    resumed.load_state_dict(state)
    if taken:
        assert list(resumed) == whole[taken:]


def test_state_is_plain_and_whole() -> None:
    """Numbers, booleans and strings, and all that a position depends on."""
    sampler = ScalableDistributedSampler(Sized(100), 4, 1, seed=9, uneven="drop")
    sampler.resume_at(2, 8)
    assert sampler.state_dict() == {
        "version": 1,
        "kind": "scalable",
        "epoch": 2,
        "position": 8,
        "length": 100,
        "seed": 9,
        "shuffle": True,
        "uneven": "drop",
    }


def test_a_position_belongs_to_its_epoch() -> None:
    """Setting the same epoch keeps it, another one begins at its beginning, also after going back."""
    sampler = ScalableDistributedSampler(Sized(100), 1, 0)
    whole = dealt(scalable(100), 1, 5)[0]
    sampler.resume_at(5, 40)
    sampler.set_epoch(5)
    assert sampler.position == 40
    assert (len(sampler), sampler.left) == (100, 60)
    assert list(sampler) == whole[40:]
    sampler.set_epoch(6)
    assert (sampler.position, sampler.left, sampler.state_dict()["position"]) == (0, 100, 0)
    sampler.set_epoch(5)
    assert list(sampler) == whole


def test_an_iterator_keeps_the_epoch_that_it_began_in() -> None:
    """Setting the next epoch while a loader still reads the last one changes nothing for it."""
    sampler = ScalableDistributedSampler(Sized(2000), 1, 0)
    whole = list(sampler)
    iterator = iter(sampler)
    begun = list(islice(iterator, 10))
    sampler.set_epoch(1)
    assert begun + list(iterator) == whole
    assert sampler.state_dict()["position"] == 0


def test_nothing_is_drawn_before_the_first_index() -> None:
    """An iterator that is made early, as loaders with workers do, follows the epoch that is set before it is used."""
    sampler = ScalableDistributedSampler(Sized(100), 1, 0)
    iterator = iter(sampler)
    sampler.set_epoch(3)
    assert list(iterator) == dealt(scalable(100), 1, 3)[0]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_reads_the_sampler(num_workers: int) -> None:
    """Through a ``DataLoader``, with workers too, batches are the sampler's indices, and resume where told."""
    sampler = ScalableDistributedSampler(range(40), 2, 1, seed=1)
    whole = list(sampler)
    loader = DataLoader(range(40), batch_size=4, sampler=sampler, num_workers=num_workers)
    assert torch.cat(list(loader)).tolist() == whole
    sampler.resume_at(0, 16)
    assert len(loader) == 5
    assert torch.cat(list(loader)).tolist() == whole[8:]


def test_a_sampler_can_be_pickled_while_it_is_read() -> None:
    """Spawned processes get a copy that stands where it stood."""
    for sampler in (
        ScalableDistributedSampler(range(100), 2, 1),
        DistributedWeightedSampler(np.arange(100), 100, num_replicas=2, rank=1),
        TorchOrderSampler(range(100), 2, 1),
    ):
        take(sampler, 7)
        copy = pickle.loads(pickle.dumps(sampler))
        assert copy.state_dict() == sampler.state_dict()
        assert list(copy) == list(sampler)


# Ranks.


def built_before_the_group(rank: int, world_size: int, path: str) -> tuple[list[int], list[int], list[int]]:
    sampler, shared = ScalableDistributedSampler(range(10), shuffle=False), SharedSampler(SequentialSampler(range(4)))
    alone = list(sampler)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    together, dealt_out = list(sampler), list(shared)
    dist.destroy_process_group()
    return alone, together, dealt_out


def test_ranks_are_those_of_the_group_at_the_time_of_use(tmp_path: Any) -> None:
    """A sampler that is built before the process group shares out once the group is there."""
    results = run_ranks(built_before_the_group, 2, str(tmp_path / "group"))
    assert results == [
        (list(range(10)), [0, 2, 4, 6, 8], [0, 2]),
        (list(range(10)), [1, 3, 5, 7, 9], [1, 3]),
    ]


# Bad input.


class Unsized(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ScalableDistributedSampler([], 1, 0), r"dataset must not be empty with shuffle=True \(got length 0\)"),
        (lambda: ExactDistributedSampler([], 1, 0, shuffle=True), "dataset must not be empty with shuffle=True"),
        (lambda: ScalableDistributedSampler(iter([1])), r"dataset must have a length \(got list_iterator"),
        (lambda: TorchOrderSampler(iter([1])), r"dataset must have a length \(got list_iterator"),
        (lambda: SharedSampler(Unsized()), r"sampler must have a length \(got Unsized"),
        (lambda: DistributedBatchSamplerWrapper(iter([])), r"batch_sampler must have a length \(got list_iterator"),
        (lambda: ScalableDistributedSampler([1], 2, 2), r"rank must be below num_replicas, 2 \(got 2\)"),
        (lambda: ScalableDistributedSampler([1], 2, -1), r"rank must be .*at least 0 \(got -1\)"),
        (lambda: ScalableDistributedSampler([1], 0, 0), r"num_replicas must be .*at least 1 \(got 0\)"),
        (lambda: ScalableDistributedSampler([1], 2.0, 0), r"num_replicas must be a whole number.* \(got 2.0\)"),
        (lambda: ScalableDistributedSampler([1], seed=-1), r"seed must be .*at least 0 \(got -1\)"),
        (lambda: ScalableDistributedSampler([1], uneven="wrap"), r"uneven must be 'pad', 'drop' or 'exact' \(got 'w"),
        (
            lambda: ScalableDistributedSampler([1], drop_last=True, uneven="exact"),
            r"uneven must be 'drop' with drop_last=True \(got 'exact'\)",
        ),
        (lambda: ScalableDistributedSampler([1]).set_epoch(-1), r"epoch must be .*at least 0 \(got -1\)"),
        (lambda: ScalableDistributedSampler([1]).resume_at(0, 2), r"position must be .*from 0 to 1 \(got 2\)"),
        (lambda: ScalableDistributedSampler([1]).state_dict(-1), r"consumed must be .*at least 0 \(got -1\)"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(make: Any, says: str) -> None:
    """The error, a ValueError, names the field, the rule and the value."""
    with pytest.raises(SamplerError, match=says):
        make()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"length": 99}, r"length of the state must be the sampler's, 100 \(got 99\); build the same sampler"),
        ({"seed": 1}, r"seed of the state must be the sampler's, 0 \(got 1\); build"),
        ({"uneven": "drop"}, r"uneven of the state must be the sampler's, 'pad' \(got 'drop'\)"),
        (
            {"kind": "torch"},
            r"kind of the state must be the sampler's, 'scalable' \(got 'torch'\); build the same sampler",
        ),
        ({"version": 2}, r"version of the state must be the sampler's, 1 \(got 2\); build"),
        ({"position": 101}, r"position must be .*from 0 to 100 \(got 101\)"),
        ({"epoch": -1}, r"epoch must be .*at least 0 \(got -1\)"),
        ({"position": None, "seed": None}, r"state must be a dict with \['version', .*'position'\] \(got \{'version'"),
    ],
)
def test_states_of_others_are_refused(change: dict[str, Any], says: str) -> None:
    """The error names the field, both values and what to do, and the sampler stays where it was."""
    state = {**ScalableDistributedSampler(Sized(100), 1, 0).state_dict(), **change}
    state = {name: value for name, value in state.items() if value is not None}
    sampler = ScalableDistributedSampler(Sized(100), 1, 0)
    sampler.resume_at(3, 7)
    with pytest.raises(SamplerError, match=says):
        sampler.load_state_dict(state)
    assert (sampler.epoch, sampler.position) == (3, 7)
