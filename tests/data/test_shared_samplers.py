"""What any sampler or batch sampler yields is drawn alike on every rank, and disturbs nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Sampler, SequentialSampler

from lightning_ddp_ext.data.shared_samplers import DistributedBatchSamplerWrapper, SharedSampler
from lightning_ddp_ext.errors import ConfigurationError
from tests.data.data import dealt, in_turn


class Epochs(Sampler[int]):
    """Draws numbers with every generator there is, its own one among them, and yields its epoch first."""

    def __init__(self, length: int, promised: int | None = None) -> None:
        self.length, self.promised, self.epoch = length, promised, 0
        seed = torch.initial_seed()
        self.torch = self.again = torch.Generator().manual_seed(seed)
        self.numpy, self.old = np.random.default_rng(seed), np.random.RandomState(seed)
        self.python = random.Random(seed)

    def draw(self) -> int:
        """Numbers of the generators of its own."""
        drawn = torch.randint(7, (), generator=self.torch), torch.randint(7, (), generator=self.again)
        return int(sum(drawn)) + self.numpy.integers(7) + self.old.randint(7) + self.python.randrange(7)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length if self.promised is None else self.promised

    def __iter__(self) -> Iterator[int]:
        yield self.epoch
        assert self.torch is self.again
        for _ in range(self.length - 1):
            yield self.draw() + int(torch.randint(7, ())) + int(np.random.randint(7)) + random.randrange(7)


def made(world_size: int, rank: int, *, batches: bool) -> Any:
    """A sampler whose generators, and the global ones, are not those of other ranks."""
    torch.manual_seed(rank), random.seed(rank), np.random.seed(rank)
    if batches:
        return DistributedBatchSamplerWrapper(BatchSampler(Epochs(41), 4, drop_last=False), world_size, rank, seed=3)
    return SharedSampler(Epochs(41), world_size, rank, seed=3)


@pytest.mark.parametrize("batches", [False, True], ids=["samples", "batches"])
def test_ranks_with_different_generators_share_one_list_an_epoch(batches: bool) -> None:
    """Whatever generators a sampler draws from; each epoch, also one that is resumed, has another list."""
    epochs = [in_turn(dealt(lambda w, r: made(w, r, batches=batches), 2, epoch)) for epoch in range(4)]
    for epoch, read in enumerate(epochs):
        [alone] = dealt(lambda w, r: made(w, r, batches=batches), 1, epoch)
        assert read == [*alone, alone[0]][: len(read)]
        assert np.ravel(read[0])[0] == epoch
    assert len({str(read[1:]) for read in epochs}) == 4
    resumed = made(1, 0, batches=batches)
    resumed.resume_at(3, 2)
    assert list(resumed) == epochs[3][2 : len(resumed)]


def test_drawing_leaves_generators_alone() -> None:
    """Global generators, and the sampler's own, are where the rest of the program has left them."""

    def draw(sampler: Epochs) -> tuple[float, ...]:
        return sampler.draw(), torch.rand(()).item(), random.random(), float(np.random.random())

    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    unread, read = Epochs(41), Epochs(41)
    expected = [draw(unread) for _ in range(21)]
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    assert [draw(read) for _ in SharedSampler(read, 2, 0)] == expected


def test_batches_reach_the_loader_unchanged() -> None:
    """Where the batch sampler fills one list again and again, and where a sampler yields batches."""

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
    """Its length is a promise; more than that is left unread."""
    with pytest.raises(ConfigurationError, match=r"its length, 9 \(got 7\); correct Epochs.__len__"):
        list(SharedSampler(Epochs(7, promised=9), 2, 0))
    assert len(in_turn(dealt(lambda w, r: SharedSampler(Epochs(7, promised=6), w, r), 2))) == 6
