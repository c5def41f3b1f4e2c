"""A loader that is entered where another run left it gives the batches that the other run would have read."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from re import escape
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
from lightning_ddp_ext.data.loader import forget_workers, own_copy
from lightning_ddp_ext.data.loader_kinds import position_of
from lightning_ddp_ext.data.position import FROM_THE_EPOCHS_START, LoaderPosition
from lightning_ddp_ext.data.samplers import ScalableDistributedSampler, TorchOrderSampler
from lightning_ddp_ext.data.shared_samplers import DistributedBatchSamplerWrapper, SharedSampler
from lightning_ddp_ext.errors import ResumeError

EPOCHS = 3
Read = tuple[int, list[int], float]  # epoch, samples of a batch, and a random number that training drew with it
Make = Callable[[int, int, int, int], Any]  # (samples, batch size, ranks, rank) to a loader


class Stream(IterableDataset[int]):
    """Numbers in an order that each pass draws from the global generator, without a length."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.length).tolist())


class Counter(Iterator[int]):
    """Numbers in their order, and a state for torchdata."""

    def __init__(self, length: int) -> None:
        self.length, self.given = length, 0

    def __next__(self) -> int:
        if self.given == self.length:
            raise StopIteration
        self.given += 1
        return self.given - 1

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


class StatefulStream(Stream):
    """Gives a new counter to each pass."""

    def __iter__(self) -> Iterator[int]:
        return Counter(self.length)


class Reversing(DataLoader[Any]):
    """Iterates in its own way, and so may not read what its sampler says."""

    def __iter__(self) -> Any:
        return iter([*super().__iter__()][::-1])


class Remembering:
    """A loader of anybody's own that takes epochs and keeps a state: which pass, and how many batches of it."""

    def __init__(self, length: int, batch_size: int) -> None:
        self.length, self.batch_size = length, batch_size
        self.epoch = self.passes = self.given = 0
        self.is_loaded = False

    def set_epoch(self, epoch: int) -> None:
        self.passes = self.passes if epoch == self.epoch else 0
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "passes": self.passes, "given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.passes, self.given = state["epoch"], state["passes"], state["given"]
        self.is_loaded = True

    def __iter__(self) -> Iterator[list[int]]:
        if not self.is_loaded:
            self.passes, self.given = self.passes + 1, 0
        self.is_loaded = False
        return self._batches(random.Random(10 * self.epoch + self.passes).sample(range(self.length), self.length))

    def _batches(self, order: list[int]) -> Iterator[list[int]]:
        while self.given * self.batch_size < self.length:
            self.given += 1
            yield order[(self.given - 1) * self.batch_size : self.given * self.batch_size]


def shuffled(rank: int) -> RandomSampler:
    return RandomSampler(range(20), num_samples=20, generator=torch.Generator().manual_seed(rank))


WAYS: dict[str, dict[str, Make]] = {
    "order": {
        "torch's": lambda n, b, w, r: DataLoader(torch.arange(n), b, sampler=TorchOrderSampler(range(n), w, r)),
        "exact": lambda n, b, w, r: DataLoader(
            torch.arange(n), b, sampler=ScalableDistributedSampler(range(n), w, r, uneven="exact")
        ),
        "last dropped": lambda n, b, w, r: DataLoader(
            torch.arange(n), b, sampler=TorchOrderSampler(range(n), w, r, seed=3), drop_last=True
        ),
        "without batches": lambda n, b, w, r: DataLoader(
            torch.arange(n), None, sampler=ScalableDistributedSampler(range(n), w, r)
        ),
        "batches": lambda n, b, w, r: DataLoader(
            torch.arange(n),
            batch_sampler=DistributedBatchSamplerWrapper(BatchSampler(RandomSampler(range(n)), b, False), w, r),
        ),
        "another sampler's": lambda n, b, w, r: DataLoader(
            torch.arange(n), b, sampler=SharedSampler(RandomSampler(range(n)), w, r)
        ),
    },
    "indices": {
        "global generators": lambda n, b, w, r: DataLoader(torch.arange(n), b, shuffle=True),
        "generators of its own": lambda n, b, w, r: DataLoader(
            torch.arange(20), b, sampler=shuffled(r), generator=torch.Generator().manual_seed(5 + r)
        ),
        "one generator": lambda n, b, w, r: DataLoader(
            torch.arange(n), b, shuffle=True, generator=torch.Generator().manual_seed(r)
        ),
        "told the epoch": lambda n, b, w, r: DataLoader(
            torch.arange(n), b, sampler=DistributedSampler(range(n), w, r, seed=1)
        ),
        "without batches": lambda n, b, w, r: DataLoader(torch.arange(n), None, sampler=RandomSampler(range(n))),
        "batches": lambda n, b, w, r: DataLoader(
            torch.arange(n), batch_sampler=BatchSampler(RandomSampler(range(n)), b, drop_last=False)
        ),
    },
    "batches": {
        "list": lambda n, b, w, r: [*torch.arange(r, n + r).split(b)],
        "stream": lambda n, b, w, r: DataLoader(Stream(n), b),
        "own iteration": lambda n, b, w, r: Reversing(torch.arange(n), b, shuffle=True),
    },
    "state": {
        "torchdata's": lambda n, b, w, r: StatefulDataLoader(torch.arange(n), b, shuffle=True),
        "torchdata's stream": lambda n, b, w, r: StatefulDataLoader(StatefulStream(n), b),
        "anybody's": lambda n, b, w, r: Remembering(n, b),
    },
}
KIND_OF = {(kind, name): make for kind, makes in WAYS.items() for name, make in makes.items()}


@dataclass
class Saved:
    """What a checkpoint has of one rank."""

    epoch: int
    done: int
    state: dict[str, Any]
    random: dict[str, Any]


class Rank:
    """What a Trainer does with one loader on one rank: it reads batches, draws random numbers, saves, and resumes."""

    def __init__(self, loader: Any, world_size: int = 1) -> None:
        self.position: LoaderPosition = position_of(own_copy(loader), world_size=world_size, remembered=5)
        self.read: list[Read] = []
        self._batches: Iterator[Any] = iter(())
        self._ahead: list[Any] = []

    def begin(self, epoch: int) -> None:
        set_epoch(self.position.loader, epoch)
        if epoch != self.position.epoch:
            self.position.start_epoch(epoch)
        self._batches = self.position.give(self.position.begin())

    def resume(self, saved: Saved) -> None:
        set_epoch(self.position.loader, saved.epoch)
        self.position.check(saved.state)
        self.position.start_epoch(saved.epoch, done=saved.done, state=saved.state)
        self._batches = self.position.give(self.position.begin())
        restore_random(saved.random)
        if saved.state["number"]:  # Lightning has to see that the first pass is over, and makes another iterator
            assert [*self._batches] == []
            self._batches = self.position.give(self.position.begin())

    def train(self, batches: int | None = None, *, cycles: bool = False) -> None:
        """Train on so many batches, or on all that are left; a loader that cycles begins again at its end."""
        while batches is None or batches > 0:
            found = self._ahead or self._drawn(1, cycles)
            if not found:
                return
            self.read.append((self.position.epoch, as_list(found.pop(0)), float(torch.rand(()))))
            batches = None if batches is None else batches - 1

    def draw_ahead(self, batches: int, *, cycles: bool = False) -> None:
        """Have so many batches, unless the pass ends, that are trained on later."""
        self._ahead += self._drawn(batches - len(self._ahead), cycles)

    def _drawn(self, number: int, cycles: bool) -> list[Any]:
        drawn: list[Any] = []
        while len(drawn) < number:
            batch = next(self._batches, None)
            if batch is not None:
                drawn.append(batch)
            elif cycles:
                self.begin(self.position.epoch)
            else:
                break
        return drawn

    def save(self) -> Saved:
        """Save what is trained, as a checkpoint does it."""
        done = self.position.given - len(self._ahead)
        return Saved(self.position.epoch, done, self.position.state_dict(done), take_random())


def as_list(batch: Any) -> list[int]:
    return [int(number) for number in (batch.flatten() if isinstance(batch, Tensor) else batch)]


def in_common(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "random": None, "own": None}


@dataclass
class Stop:
    """Where a checkpoint is saved, with how many batches drawn ahead, and whether it is resumed."""

    epoch: int
    done: int
    ahead: int = 0
    is_resumed: bool = True


@dataclass
class Case:
    """A run of some ranks, and where it is stopped and resumed.

    Args:
        batches: of an epoch over a loader that cycles; ``None`` for one pass.
    """

    make: Make
    length: int
    batch_size: int
    world_size: int
    stops: list[Stop]
    batches: int | None = None

    def loader(self, rank: int) -> Any:
        return self.make(self.length, self.batch_size, self.world_size, rank)

    def run(self, rank: int, stops: list[Stop], common: list[dict[str, Any]]) -> list[Read]:
        """All that one rank reads; the first rank's states go into ``common``, and all ranks have the same."""
        cycles = self.batches is not None
        torch.manual_seed(1000 + rank)
        here = Rank(self.loader(rank), self.world_size)
        read: list[Read] = []
        for epoch in range(EPOCHS):
            here.begin(epoch)
            done = 0
            for number, stop in enumerate(stops):
                if stop.epoch == epoch:
                    here.train(stop.done - done, cycles=cycles)
                    here.draw_ahead(stop.ahead, cycles=cycles)
                    saved, done = here.save(), stop.done
                    if rank == 0:
                        common.append(in_common(saved.state))
                    assert in_common(saved.state) == common[number]
                    if stop.is_resumed:
                        read += here.read
                        torch.manual_seed(2000 + rank)
                        here = Rank(self.loader(rank), self.world_size)
                        here.resume(saved)
            here.train(None if self.batches is None else self.batches - done, cycles=cycles)
        return read + here.read

    def check(self) -> None:
        common: list[dict[str, Any]] = []
        for rank in range(self.world_size):
            assert self.run(rank, self.stops, common) == self.run(rank, [], common)


@st.composite
def cases(draw: st.DrawFn, kind: str, *, cycles: bool = False, most_ahead: int = 2) -> Case:
    names = [name for name in WAYS[kind] if not (cycles and name == "exact")]  # its ranks cycle at different batches
    make = WAYS[kind][draw(st.sampled_from(names))]
    world_size, batch_size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    length = draw(st.integers(world_size * batch_size, world_size * batch_size + 16))
    shortest = len([*make(length, batch_size, world_size, world_size - 1)])
    batches = draw(st.integers(2, 3 * shortest + 1)) if cycles else None
    most = shortest if batches is None else batches - 1
    places = st.tuples(st.integers(0, 1), st.integers(1, most), st.integers(0, most_ahead), st.booleans())
    drawn = draw(st.lists(places, max_size=3, unique_by=lambda place: place[:2]))
    stops = [Stop(epoch, done, min(ahead, most - done), resumed) for epoch, done, ahead, resumed in drawn]
    return Case(make, length, batch_size, world_size, sorted(stops, key=lambda stop: (stop.epoch, stop.done)), batches)


@pytest.mark.parametrize("kind", WAYS)
def test_the_rest_of_an_epoch_and_later_epochs_are_those_of_a_run_without_a_stop(kind: str) -> None:
    """On each rank, after any number of batches, with batches drawn ahead, and in a run that was itself resumed."""

    @settings(max_examples=20, deadline=None)
    @given(case=cases(kind))
    def check(case: Case) -> None:
        case.check()

    check()


@pytest.mark.parametrize("kind", WAYS)
def test_a_loader_that_cycles_goes_on_in_the_pass_that_was_left(kind: str) -> None:
    """A loader that begins again within an epoch, because it is combined with a longer one, is in the same pass."""

    @settings(max_examples=20, deadline=None)
    @given(case=cases(kind, cycles=True, most_ahead=0))
    def check(case: Case) -> None:
        case.check()

    check()


@pytest.mark.parametrize("way", KIND_OF, ids=" ".join)
def test_a_loader_is_entered_in_the_quickest_way(way: tuple[str, str]) -> None:
    """By a position of a sampler of ours, by indices, by its own state, or else by batches that are dropped."""
    position = position_of(own_copy(KIND_OF[way](20, 2, 2, 0)), world_size=2, remembered=5)
    assert position.kind == way[0]


def saved_after(loader: Any, done: int, world_size: int = 1) -> tuple[Saved, list[int]]:
    """What a run saves in the middle of its first epoch, and the samples that it has read."""
    here = Rank(loader, world_size)
    here.begin(0)
    here.train(done)
    return here.save(), samples_of(here)


def left_of(loader: Any, saved: Saved, world_size: int = 1) -> list[int]:
    """The samples of the epoch that a run on so many ranks reads which goes on there."""
    there = Rank(loader, world_size)
    there.resume(saved)
    there.train()
    return samples_of(there)


def samples_of(rank: Rank) -> list[int]:
    return [sample for _, samples, _ in rank.read for sample in samples]


@pytest.mark.parametrize("name", [name for name in WAYS["order"] if name != "last dropped"])
def test_another_number_of_ranks_shares_out_the_rest(name: str) -> None:
    """Together they read every sample that was not read, and at most as many others as make their shares even."""
    make = WAYS["order"][name]

    @settings(max_examples=10, deadline=None)
    @given(before=st.integers(1, 4), after=st.integers(1, 4), length=st.integers(16, 40), done=st.integers(1, 4))
    def check(before: int, after: int, length: int, done: int) -> None:
        firsts = [saved_after(make(length, 1, before, rank), done, before) for rank in range(before)]
        read = [sample for _, samples in firsts for sample in samples]
        rests = [left_of(make(length, 1, after, rank), firsts[0][0], after) for rank in range(after)]
        rest = [sample for each in rests for sample in each]
        assert (len(set(read)), {*read, *rest}) == (len(read), {*range(length)})
        assert len(rest) == length - len(read) if name == "exact" else 0 <= len(rest) - (length - len(read)) < after

    check()


UNKNOWN = ("list", "stream", "torchdata's stream", "anybody's")
KNOWN = [way for way in KIND_OF if way[1] not in UNKNOWN]


@pytest.mark.parametrize("way", KNOWN, ids=" ".join)
def test_data_that_have_grown_are_refused(way: tuple[str, str]) -> None:
    """The error says what there was and is, and how to go on nevertheless."""
    saved, _ = saved_after(KIND_OF[way](20, 2, 1, 0), 3)
    there = Rank(KIND_OF[way](24, 2, 1, 0))
    if way[1] == "generators of its own":  # always of 20 samples
        there.resume(saved)
        return
    with pytest.raises(ResumeError, match=r"had .*\b(20|10|24|12)\b.*" + escape(FROM_THE_EPOCHS_START)):
        there.resume(saved)


@pytest.mark.parametrize(("kind", "other"), [("order", "indices"), ("indices", "batches"), ("state", "order")])
def test_a_state_of_another_kind_of_loader_is_refused(kind: str, other: str) -> None:
    """The error names what there is now."""
    saved, _ = saved_after(next(iter(WAYS[kind].values()))(20, 2, 1, 0), 3)
    there = Rank(next(iter(WAYS[other].values()))(20, 2, 1, 0))
    with pytest.raises(
        ResumeError, match=f"{escape(there.position.name)} had loader='{kind}' when .*, and has '{other}'; "
    ):
        there.resume(saved)


def test_a_stream_that_ends_before_the_batches_that_were_done_is_refused() -> None:
    """The error says how many there were, and how many were done."""
    saved, _ = saved_after(DataLoader(Stream(20), 2), 7)
    with pytest.raises(ResumeError, match="Stream ends after 5 batches, and 7 were done"):
        Rank(DataLoader(Stream(10), 2)).resume(saved)


@pytest.mark.parametrize("way", [way for way in KIND_OF if way[0] == "state"], ids=" ".join)
def test_a_loader_with_a_state_that_had_ended_stays_ended(way: tuple[str, str]) -> None:
    """Saved after its end, beside a longer loader, it has nothing left, and the next epoch is a whole one."""
    here = Rank(KIND_OF[way](20, 2, 1, 0))
    here.begin(0)
    here.train()
    for _ in range(2):
        saved = here.save()
        here = Rank(KIND_OF[way](20, 2, 1, 0))
        here.resume(saved)
        here.train()
        assert here.read == []
    here.begin(1)
    here.train()
    assert sorted(samples_of(here)) == [*range(20)]


def test_without_this_ranks_own_state_the_loader_goes_on_where_lightning_has_put_it() -> None:
    """A checkpoint of stock Lightning has one state for all ranks, which Lightning gives to the loader."""
    saved, read = saved_after(Remembering(12, 2), 2)
    loader = Remembering(12, 2)
    loader.load_state_dict({"epoch": 0, "passes": 1, "given": 2})
    saved.state = in_common(saved.state)
    assert sorted(read + left_of(loader, saved)) == [*range(12)]


@pytest.mark.parametrize("name", ["order", "indices"])
def test_persistent_workers_go_on_with_whole_epochs(name: str) -> None:
    """They keep the sampler of the first pass, which was entered in its middle; later epochs begin at their start."""
    torch.manual_seed(3)
    sampler = TorchOrderSampler(range(8), 1, 0) if name == "order" else None
    loaders = [
        DataLoader(torch.arange(8), 2, sampler=sampler, shuffle=not sampler, num_workers=1, persistent_workers=True)
        for _ in range(2)
    ]
    here, there = (Rank(loader) for loader in loaders)
    here.begin(0)
    here.train(3)
    saved = here.save()
    here.train()
    there.resume(saved)
    there.train()
    for each in (here, there):
        each.begin(1)
        each.train()
        each.begin(2)
        each.train()
    for each in (here, there):
        forget_workers(each.position.loader)
        each._batches = iter(())
    assert [len(samples) for _, samples, _ in there.read] == [2] * 9
    assert there.read[0][1] == here.read[3][1]
    assert sorted(samples_of(there)[2:10]) == sorted(samples_of(there)[10:]) == [*range(8)]
