"""A loader that is entered where another run left it gives the batches that the other run would have read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext.data.epochs import set_epoch
from lightning_ddp_ext.data.generators import restore_random, take_random
from lightning_ddp_ext.data.loader import own_copy
from lightning_ddp_ext.data.loader_kinds import position_of
from lightning_ddp_ext.data.position import LoaderPosition
from lightning_ddp_ext.data.samplers import ScalableDistributedSampler, TorchOrderSampler
from lightning_ddp_ext.data.shared_samplers import DistributedBatchSamplerWrapper
from lightning_ddp_ext.errors import ResumeError

EPOCHS = 3
Read = tuple[int, list[int], float]  # epoch, samples of a batch, and a random number that training drew with it


class Stream(IterableDataset[int]):
    """Numbers in an order that each pass draws from the global generator, without a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length).tolist())


class Reversing(DataLoader[Any]):
    """Iterates in its own way, and so may not read what its sampler says."""

    def __iter__(self) -> Any:
        return iter([*super().__iter__()][::-1])


def loader(length: int, batch_size: int | None = 1, **options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(length), batch_size, **options)  # type: ignore[arg-type]


def batches(length: int, batch_size: int) -> BatchSampler:
    return BatchSampler(RandomSampler(range(length)), batch_size, drop_last=False)


# By the way in which a loader is entered and a name: (samples, batch size, ranks, rank) to a loader.
LOADERS: dict[tuple[str, str], Callable[[int, int, int, int], Any]] = {
    ("order", "torch's"): lambda n, b, w, r: loader(n, b, sampler=TorchOrderSampler(range(n), w, r)),
    ("order", "exact"): lambda n, b, w, r: loader(
        n, b, sampler=ScalableDistributedSampler(range(n), w, r, uneven="exact")
    ),
    ("order", "last dropped"): lambda n, b, w, r: loader(
        n, b, sampler=TorchOrderSampler(range(n), w, r, seed=3), drop_last=True
    ),
    ("order", "without batches"): lambda n, b, w, r: loader(
        n, None, sampler=ScalableDistributedSampler(range(n), w, r)
    ),
    ("order", "batches"): lambda n, b, w, r: loader(
        n, batch_sampler=DistributedBatchSamplerWrapper(batches(n, b), w, r)
    ),
    ("indices", "global generators"): lambda n, b, w, r: loader(n, b, shuffle=True),
    ("indices", "its own generator"): lambda n, b, w, r: loader(
        n, b, shuffle=True, generator=torch.Generator().manual_seed(r)
    ),
    ("indices", "told the epoch"): lambda n, b, w, r: loader(n, b, sampler=DistributedSampler(range(n), w, r, seed=1)),
    ("indices", "batches"): lambda n, b, w, r: loader(n, batch_sampler=batches(n, b)),
    ("batches", "list"): lambda n, b, w, r: [*torch.arange(r, n + r).split(b)],
    ("batches", "stream"): lambda n, b, w, r: DataLoader(Stream(n), b),
    ("batches", "own iteration"): lambda n, b, w, r: Reversing(torch.arange(n), b, shuffle=True),
    ("state", "torchdata's"): lambda n, b, w, r: StatefulDataLoader(torch.arange(n), b, shuffle=True),
}


@dataclass
class Saved:
    """What a checkpoint has of one rank."""

    epoch: int
    done: int
    state: dict[str, Any]
    random: dict[str, Any]

    @property
    def common(self) -> dict[str, Any]:
        """What is the same on every rank."""
        return {**self.state, "random": None, "own": None}


class Rank:
    """What a Trainer does with one loader on one rank: it reads batches, draws random numbers, saves, and resumes."""

    def __init__(self, loader: Any, world_size: int = 1) -> None:
        self.position: LoaderPosition = position_of(own_copy(loader), world_size=world_size, remembered=5)
        self.read: list[Read] = []
        self._batches: Iterator[Any] = iter(())
        self._ahead: list[Any] = []

    def begin(self, epoch: int) -> None:
        set_epoch(self.position.loader, epoch)
        self.position.start_epoch(epoch)
        self._batches = self.position.give(self.position.begin())

    def resume(self, saved: Saved) -> None:
        set_epoch(self.position.loader, saved.epoch)
        self.position.check(saved.state)
        self.position.start_epoch(saved.epoch, done=saved.done, state=saved.state)
        self._batches = self.position.give(self.position.begin())
        restore_random(saved.random)

    def train(self, batches: float = inf) -> None:
        """Train on so many batches, or on all that are left."""
        while batches > 0 and (self._ahead or self.draw_ahead(1)):
            self.read.append((self.position.epoch, as_list(self._ahead.pop(0)), float(torch.rand(()))))
            batches -= 1

    def draw_ahead(self, batches: int) -> list[Any]:
        """Have so many batches, unless the epoch ends, that are trained on later."""
        self._ahead += islice(self._batches, max(0, batches - len(self._ahead)))
        return self._ahead

    def save(self) -> Saved:
        """Save what is trained, as a checkpoint does it."""
        done = self.position.given - len(self._ahead)
        return Saved(self.position.epoch, done, self.position.state_dict(done), take_random())


def as_list(batch: Any) -> list[int]:
    return [int(number) for number in (batch.flatten() if isinstance(batch, Tensor) else batch)]


@dataclass
class Case:
    """A run of some ranks, saved and perhaps resumed after (epoch, batches, batches drawn ahead, whether resumed)."""

    way: tuple[str, str]
    length: int
    batch_size: int
    world_size: int
    stops: list[tuple[int, int, int, bool]]

    def rank(self, rank: int) -> Rank:
        return Rank(LOADERS[self.way](self.length, self.batch_size, self.world_size, rank), self.world_size)

    def run(self, rank: int, stops: list[tuple[int, int, int, bool]]) -> tuple[list[Read], list[dict[str, Any]]]:
        """All that one rank reads, and what its states have in common with those of other ranks."""
        torch.manual_seed(1000 + rank)
        here = self.rank(rank)
        assert here.position.kind == self.way[0]  # the quickest way into such a loader
        read: list[Read] = []
        common = []
        for epoch in range(EPOCHS):
            here.begin(epoch)
            trained = 0
            for _, done, ahead, is_resumed in (stop for stop in stops if stop[0] == epoch):
                here.train(done - trained)
                here.draw_ahead(ahead)
                saved, trained = here.save(), done
                common.append(saved.common)
                if is_resumed:
                    read += here.read
                    torch.manual_seed(2000 + rank)
                    here = self.rank(rank)
                    here.resume(saved)
            here.train()
        return read + here.read, common


@st.composite
def cases(draw: st.DrawFn, kind: str) -> Case:
    way = draw(st.sampled_from([way for way in LOADERS if way[0] == kind]))
    world_size, batch_size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    length = draw(st.integers(world_size * batch_size, world_size * batch_size + 16))
    shortest = len([*LOADERS[way](length, batch_size, world_size, world_size - 1)])
    places = st.tuples(st.integers(0, 1), st.integers(1, shortest), st.integers(0, 2), st.booleans())
    drawn = draw(st.lists(places, max_size=3, unique_by=lambda place: place[:2]))
    stops = [(epoch, done, min(ahead, shortest - done), is_resumed) for epoch, done, ahead, is_resumed in sorted(drawn)]
    return Case(way, length, batch_size, world_size, stops)


@pytest.mark.parametrize("kind", ["order", "indices", "batches", "state"])
def test_a_resumed_run_reads_what_one_without_a_stop_reads(kind: str) -> None:
    """On each rank, after any number of batches, with some drawn ahead, and in a run that was itself resumed."""

    @settings(max_examples=30, deadline=None)
    @given(case=cases(kind))
    def check(case: Case) -> None:
        commons = []
        for rank in range(case.world_size):
            read, common = case.run(rank, case.stops)
            assert read == case.run(rank, [])[0]
            commons.append(common)
        assert commons == commons[:1] * case.world_size

    check()


def test_a_stream_that_ends_before_the_batches_that_were_done_is_refused() -> None:
    """The error says how many there were, and how many were done."""
    here = Rank(DataLoader(Stream(20), 2))
    here.begin(0)
    here.train(7)
    with pytest.raises(ResumeError, match="Stream ends after 5 batches, and 7 were done"):
        Rank(DataLoader(Stream(10), 2)).resume(here.save())
