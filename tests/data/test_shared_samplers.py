"""What any sampler or batch sampler yields is the same on every number of ranks, and can be gone on with."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler, SubsetRandomSampler

from lightning_ddp_ext.data.shared_samplers import DistributedBatchSamplerWrapper, SharedSampler
from lightning_ddp_ext.errors import SamplerError
from tests.data.data import dealt, in_turn, stop_and_go, take


class Epochs(Sampler[int]):
    """Draws numbers with every generator there is, its own one among them, and yields its epoch first."""

    def __init__(self, length: int, promised: int | None = None) -> None:
        self.length, self.promised, self.epoch = length, promised, 0
        self.random = torch.Generator().manual_seed(torch.initial_seed())

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length if self.promised is None else self.promised

    def __iter__(self) -> Iterator[int]:
        yield self.epoch
        for _ in range(self.length - 1):
            drawn = int(torch.randint(1000, (), generator=self.random)) + 1000 * int(torch.randint(1000, ()))
            yield drawn + int(np.random.randint(7)) + random.randrange(7)


Make = Callable[[int, int], Any]
SAMPLERS: dict[str, Callable[[torch.Generator], Any]] = {
    "random": lambda generator: RandomSampler(range(41), generator=generator),
    "subset": lambda generator: SubsetRandomSampler(range(41), generator=generator),
    "the user's": lambda generator: Epochs(41),
    "pairs": lambda generator: [(number, 0) for number in range(41)],
}


def made(name: str, *, batches: bool, **options: Any) -> Make:
    """A sampler for each rank, whose generators need not agree."""

    def make(world_size: int, rank: int) -> Any:
        torch.manual_seed(rank)
        sampler = SAMPLERS[name](torch.Generator().manual_seed(rank))
        if batches:
            sampler = BatchSampler(sampler, 4, drop_last=False)
            return DistributedBatchSamplerWrapper(sampler, world_size, rank, seed=3, **options)
        return SharedSampler(sampler, world_size, rank, seed=3, **options)

    return make


@pytest.mark.parametrize("batches", [False, True], ids=["samples", "batches"])
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("world_size", [2, 5, 12])
def test_ranks_with_different_generators_share_one_list(name: str, world_size: int, batches: bool) -> None:
    """Dealt out in turn it is one process's; padding repeats the first ones, dropping leaves the last ones out."""
    make = made(name, batches=batches)
    one = dealt(make, 1, 2)[0]
    assert len(one) == (11 if batches else 41)
    padded = in_turn(dealt(make, world_size, 2))
    assert padded == [one[number % len(one)] for number in range(len(padded))]
    assert len(one) <= len(padded) < len(one) + world_size
    assert in_turn(dealt(made(name, batches=batches, uneven="exact"), world_size, 2)) == one
    dropped = in_turn(dealt(made(name, batches=batches, uneven="drop"), world_size, 2))
    assert dropped == one[: len(one) // world_size * world_size]


@pytest.mark.parametrize("batches", [False, True], ids=["samples", "batches"])
def test_every_epoch_has_a_list_of_its_own(batches: bool) -> None:
    """Setting the epoch reseeds what the sampler draws from, and reaches what is wrapped, also when it is resumed."""
    lists = [str(dealt(made("random", batches=batches), 1, epoch)) for epoch in range(10)]
    assert len(set(lists)) == 10
    sampler = made("the user's", batches=batches)(1, 0)
    sampler.set_epoch(4)
    assert np.ravel(next(iter(sampler)))[0] == 4
    sampler.resume_at(7, 0)
    assert np.ravel(next(iter(sampler)))[0] == 7


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    batches=st.booleans(),
    before=st.integers(1, 5),
    after=st.integers(1, 13),
    consumed=st.integers(0, 12),
    epoch=st.integers(0, 2),
    uneven=st.sampled_from(["pad", "drop", "exact"]),
)
def test_another_number_of_ranks_gets_the_rest(
    batches: bool, before: int, after: int, consumed: int, epoch: int, uneven: Any
) -> None:
    """Each item is read once; pad repeats, and drop leaves out, less than a round."""
    one = dealt(made("random", batches=batches), 1, epoch)[0]
    read = stop_and_go(made("random", batches=batches, uneven=uneven), before, after, consumed, epoch)
    counted = [read.count(item) for item in one]
    assert sum(counted) == len(read)
    if uneven == "exact":
        assert set(counted) == {1}
    elif uneven == "pad":
        assert min(counted) == 1
        assert len(read) < len(one) + max(before, after)
    else:
        assert max(counted) <= 1
        assert len(read) > len(one) - max(before, after)


def test_drawing_leaves_generators_alone() -> None:
    """Global generators, and the sampler's own, are where the rest of the program has left them."""

    def draw() -> tuple[float, ...]:
        return torch.rand(()).item(), random.random(), float(np.random.random())

    sampler = Epochs(41)
    before = sampler.random.get_state()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = [draw() for _ in range(21)]
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    assert [draw() for _ in SharedSampler(sampler, 2, 0)] == expected
    assert torch.equal(sampler.random.get_state(), before)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_reads_the_batches(num_workers: int) -> None:
    """In place of a batch sampler, with workers too."""
    make = made("random", batches=True)
    loader = DataLoader(range(41), batch_sampler=make(2, 1), num_workers=num_workers)
    assert len(loader) == 6
    assert [batch.tolist() for batch in loader] == list(make(2, 1))


def test_positions_and_states_count_batches() -> None:
    """The state is what the newest iterator has handed out, or what the loader says was used."""
    make = made("random", batches=True)
    sampler, resumed = make(2, 1), make(2, 1)
    whole = list(sampler)
    take(sampler, 2)
    state = sampler.state_dict()
    assert (state["position"], state["length"], state["kind"]) == (4, 11, "batches")
    assert sampler.state_dict(1)["position"] == 2
    resumed.load_state_dict(state)
    assert (len(resumed), resumed.left, resumed.position) == (6, 4, 4)
    assert list(resumed) == whole[2:]


def test_batches_that_are_one_list_filled_anew_stay_apart() -> None:
    """A batch sampler may use its list again: what it has yielded before does not change."""

    class Reusing(list[Any]):
        def __iter__(self) -> Iterator[list[int]]:
            batch = [0]
            for batch[0] in range(len(self)):
                yield batch

    parts = dealt(lambda w, r: DistributedBatchSamplerWrapper(Reusing([0] * 5), w, r), 2)
    assert parts == [[[0], [2], [4]], [[1], [3], [0]]]


def test_a_sampler_that_yields_too_little_is_named() -> None:
    """Its length is a promise; more than that is left unread."""
    with pytest.raises(SamplerError, match=r"its length, 9 \(got 7\); correct Epochs.__len__"):
        list(SharedSampler(Epochs(7, promised=9), 2, 0))
    assert len(in_turn(dealt(lambda w, r: SharedSampler(Epochs(7, promised=6), w, r), 2))) == 6
    with pytest.raises(SamplerError, match=r"batch_sampler must yield as many items as its length, 9 \(got 7\)"):
        list(DistributedBatchSamplerWrapper(Epochs(7, promised=9), 2, 0))


def test_batches_of_batches_are_items_like_others() -> None:
    """A sampler may yield lists: they reach the loader unchanged."""
    batches = BatchSampler(SequentialSampler(range(4)), 2, drop_last=False)
    assert dealt(lambda w, r: SharedSampler(batches, w, r), 2) == [[[0, 1]], [[2, 3]]]
