"""Each rank reads the right samples in the right order, as training sees them. Loaders,
samplers and batch samplers of the user's own are divided among ranks, and keep their classes
and attributes.
"""

import copy
import itertools
import os
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
)

from tests.harness import training
from tests.harness.ranks import run_ranks
from tests.integration import continuing

ORDERS: dict[str, Any] = {
    "padded": continuing.loader(11, shuffle=True),
    "in order": continuing.loader(11, batch_size=3),
    "dropping": continuing.loader(10, batch_size=4, shuffle=True, drop_last=True),
    "one sample": continuing.loader(1, batch_size=1, shuffle=True),
    "no batches": continuing.loader(5, batch_size=None),
    "two loaders": lambda: [
        continuing.loader(7, shuffle=True)(),
        continuing.loader(5, shuffle=True)(),
    ],
}


def read_in_order(kind: training.Kind, directory: Path) -> dict[str, continuing.Batches]:
    """Return the batches of each loader, of one with the option ``overfit_batches``, and of
    a generator.
    """
    batches = {name: continuing.read(kind, directory, make) for name, make in ORDERS.items()}
    overfit = continuing.read(
        kind, directory, continuing.loader(11, shuffle=True), overfit_batches=3
    )
    generator = (torch.tensor([[float(number)]]) for number in range(9))
    generated = continuing.read(kind, directory, lambda: generator, limit_train_batches=3)
    return {**batches, "overfit": overfit, "generator": generated}


def test_the_default_order_is_stock_lightnings(tmp_path: Path) -> None:
    """Every batch of every epoch is stock's, for any length and batch size. A generator
    continues in the next epoch.
    """
    ours, stock = training.on_both(read_in_order, tmp_path)
    assert ours == stock
    assert ours[0]["generator"] == {0: [[0], [1], [2]], 1: [[3], [4], [5]]}


# Samplers that draw, while the seed differs on each rank.

DRAWN = 40
SOME = 36


class Even(RandomSampler):
    """A user's sampler that draws each even sample twice."""

    def __iter__(self) -> Any:
        return iter([index - index % 2 for index in super().__iter__()])


class Pairs(BatchSampler):
    """Takes other arguments than torch's batch sampler, and draws batches of pairs."""

    def __init__(self, samples: int, *, by: int) -> None:
        super().__init__(RandomSampler(range(samples // by)), 1, drop_last=False)
        self.by = by

    def __iter__(self) -> Iterator[list[int]]:
        return ([by * self.by, by * self.by + 1] for [by] in super().__iter__())


EACH_EVEN_TWICE = sorted([*range(0, DRAWN, 2)] * 2)
# Options of loaders, and the samples that their samplers draw, in ascending order.
KNOWN = {
    "shuffled": ({"shuffle": True}, [*range(DRAWN)]),
    "items by index": ({"sampler": Subset(range(DRAWN), range(SOME))}, [*range(SOME)]),
    "even": ({"sampler": Even(range(DRAWN))}, EACH_EVEN_TWICE),
    "even, in a batch sampler": (
        {"batch_sampler": BatchSampler(Even(range(DRAWN)), 2, drop_last=False)},
        EACH_EVEN_TWICE,
    ),
    "own batches": ({"batch_sampler": Pairs(DRAWN, by=2)}, [*range(DRAWN)]),
    "a list": ({"batch_sampler": np.arange(DRAWN).reshape(-1, 2).tolist()}, [*range(DRAWN)]),
}
REPEATING = RandomSampler(range(DRAWN), replacement=True, num_samples=SOME)
REPEATED = {
    "with replacement": {"sampler": REPEATING},
    "in a batch sampler": {
        "batch_sampler": continuing.Backwards(REPEATING, batch_size=2, drop_last=False)
    },
}
WITHOUT_WEIGHT = DRAWN - 1
UNREPEATED = {
    "some": {"sampler": RandomSampler(range(WITHOUT_WEIGHT), num_samples=SOME)},
    "weighted": {
        "sampler": WeightedRandomSampler([1.0] * WITHOUT_WEIGHT + [0.0], SOME, replacement=False)
    },
}


def read_drawn(kind: training.Kind, directory: Path) -> dict[str, continuing.Batches]:
    """Return what this rank, which has its own seed, reads by each sampler."""
    options: dict[str, Any] = {name: options for name, (options, _) in KNOWN.items()}
    options |= {**REPEATED, **UNREPEATED}
    L.seed_everything(100 + int(os.environ["RANK"]), verbose=False)
    return {
        name: continuing.read(kind, directory, continuing.loader(DRAWN, **each))
        for name, each in options.items()
    }


def together(by_rank: list[continuing.Batches]) -> list[list[int]]:
    """Return the samples that the ranks together read in each of two epochs."""
    epochs = [[batches[epoch] for batches in by_rank] for epoch in (0, 1)]
    return [[*itertools.chain(*itertools.chain(*epoch))] for epoch in epochs]


def test_ranks_divide_one_draw_of_a_sampler_per_epoch(tmp_path: Path) -> None:
    """Together they read what the sampler draws, also where it is in a batch sampler, and
    as many samples.
    """
    by_rank = training.on_ranks("ours", read_drawn, tmp_path)
    drawn = {name: together([batches[name] for batches in by_rank]) for name in by_rank[0]}
    for name, (_, samples) in KNOWN.items():
        assert [sorted(epoch) for epoch in drawn[name]] == [samples, samples], name
    for name in REPEATED:
        assert [len(epoch) for epoch in drawn[name]] == [SOME, SOME], name
        assert len(set(drawn[name][0])) < SOME, name
    for name in UNREPEATED:
        assert [len(set(epoch)) for epoch in drawn[name]] == [SOME, SOME], name
        assert WITHOUT_WEIGHT not in drawn[name][0], name
        assert drawn[name][0] != drawn[name][1], name


# Loaders that the strategy does not divide.


class PartOfOrder(Sampler[int]):
    """Takes this rank's part of an order that every rank draws from a global generator."""

    def __len__(self) -> int:
        return DRAWN // dist.get_world_size()

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.permutation(DRAWN)[dist.get_rank() :: dist.get_world_size()])


def weighted() -> Any:
    return continuing.loader(DRAWN, sampler=WeightedRandomSampler([1.0] * DRAWN, DRAWN))()


def read_undivided(kind: training.Kind, directory: Path) -> dict[str, continuing.Batches]:
    """Train with equal states of all generators but torch's."""
    L.seed_everything(7, verbose=False)
    own = torch.Generator().manual_seed(int(os.environ["RANK"]))
    loaders: dict[str, Any] = {
        "parts": continuing.loader(DRAWN, sampler=PartOfOrder()),
        "own generator": continuing.loader(DRAWN, shuffle=True, generator=own),
        "two loaders": lambda: [weighted(), weighted()],
    }
    return {
        name: continuing.read(kind, directory, make, use_distributed_sampler=False)
        for name, make in loaders.items()
    }


def test_loaders_that_are_not_divided_draw_by_their_generators(tmp_path: Path) -> None:
    """Ranks with equal generators draw equal orders, another one in each epoch. Other seeds
    of a loader's generator and two loaders have different orders.
    """
    by_rank = training.on_ranks("ours", read_undivided, tmp_path)
    epochs = together([batches["parts"] for batches in by_rank])
    assert [sorted(samples) for samples in epochs] == [[*range(DRAWN)]] * 2
    assert epochs[0] != epochs[1]
    first, second = (batches["own generator"] for batches in by_rank)
    assert first[0] != second[0]
    assert first[0] != first[1]
    for batches in by_rank:
        steps = batches["two loaders"][0]
        assert [step[:2] for step in steps] != [step[2:] for step in steps]


# Loaders of the user's own.


SAMPLES = 16


class Batched(BatchSampler):
    """A subclass of torch's batch sampler that changes nothing."""


class OwnLoader(DataLoader[Any]):
    """A loader of the user's own, with arguments like those of torch_geometric's."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        own: Any = None,
        **options: Any,
    ) -> None:
        self.own = own
        super().__init__(dataset, batch_size, shuffle, **options)


def batched(batch_sampler: Any, samples: int = SAMPLES) -> DataLoader[Any]:
    return DataLoader(continuing.Numbers(samples), batch_sampler=batch_sampler)


def given(loader: Any) -> Callable[[], Any]:
    """Return a ``train_dataloader`` that returns a loader from before the run."""
    return lambda: loader


# Loaders that are read as with stock.


class ReadsOwnBatchSampler(DataLoader[Any]):
    """Keeps its batch sampler under another name, and reads that."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.order = self.batch_sampler

    def __iter__(self) -> Any:
        for indices in self.order:
            yield self.collate_fn([self.dataset[index] for index in indices])


class Unpicklable(DataLoader[Any]):
    """Refuses to be sent to another process, and keeps one attribute in a slot."""

    __slots__ = ("factor",)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.factor = 10

    def __reduce__(self) -> Any:
        raise TypeError("a loader cannot be pickled")

    def __iter__(self) -> Any:
        return (batch * self.factor for batch in super().__iter__())


class OwnIterator:
    """A loader that is its own iterator, and shuffles when it starts anew."""

    def __init__(self) -> None:
        self.generator = random.Random(0)
        self.samples = list(range(SAMPLES))
        self.rest = iter(self.samples)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Self:
        self.generator.shuffle(self.samples)
        self.rest = iter(self.samples)
        return self

    def __next__(self) -> Tensor:
        return torch.tensor([[float(next(self.rest))]])


class GoesOn:
    """A loader with a state whose next epoch begins where the one before has ended."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.read += 1
            yield torch.tensor([[float(self.read)]])

    def state_dict(self) -> dict[str, Any]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Unsized:
    """Batches of which there is no number."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0], [1]])


def part_in_batches(rank: int) -> DataLoader[Any]:
    own = DistributedSampler(range(SAMPLES), 2, rank, shuffle=False)
    return batched(Batched(own, 2, drop_last=False))


class Case(NamedTuple):
    """A rank's loader, and whether the strategy divides its samples among the ranks."""

    make: Callable[[int], Any]
    is_divided: bool = True


AS_STOCK = {
    "reads own batch sampler": Case(
        lambda rank: ReadsOwnBatchSampler(continuing.Numbers(SAMPLES), batch_size=2, shuffle=True)
    ),
    "cannot be pickled": Case(
        lambda rank: Unpicklable(continuing.Numbers(SAMPLES), 2), is_divided=False
    ),
    "its own iterator": Case(lambda rank: OwnIterator(), is_divided=False),
    "goes on in the next epoch": Case(lambda rank: GoesOn(), is_divided=False),
    "divided by a sampler": Case(part_in_batches),
    "without a number": Case(lambda rank: batched(Unsized())),
}


class Evaluated(continuing.Net):
    """Records the samples of validation, as its base class does those of training."""

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.happens("validated", *batch.flatten().tolist())


def read_as_stock(kind: training.Kind, directory: Path) -> dict[str, Any]:
    """Train on a loader from before the run, and validate on another one of the same kind;
    return the steps and events, or the error.
    """
    found: dict[str, Any] = {}
    for name, case in AS_STOCK.items():
        rank = int(os.environ["RANK"])
        module = Evaluated(given(case.make(rank)))
        trainer = training.make_trainer(
            training.make_strategy(kind, directory),
            use_distributed_sampler=case.is_divided,
            max_epochs=2,
        )
        try:
            trainer.fit(module, val_dataloaders=case.make(rank))
        except TypeError as error:
            found[name] = str(error)
        else:
            found[name] = (module.steps, module.events)
    return found


def test_unusual_loaders_are_read_as_with_stock(tmp_path: Path) -> None:
    """They yield the batches that they yield with stock; the error of batches without a
    number is Lightning's, which names ``use_distributed_sampler``.
    """
    ours, stock = training.on_both(read_as_stock, tmp_path)
    assert ours == stock
    assert "Trainer(use_distributed_sampler=False)" in ours[0]["without a number"]


# Loaders that stock refuses, or creates again with other arguments.


class FixedOptions(DataLoader[Any]):
    """Chooses all of torch's options itself."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, batch_size=2, shuffle=True)


COPIED: dict[str, Callable[[], DataLoader[Any]]] = {
    "fixed options": lambda: FixedOptions(continuing.Numbers(SAMPLES)),
    "explicit": lambda: batched(BatchSampler(RandomSampler(range(SAMPLES)), 2, False)),
}


def read_copied(kind: training.Kind, directory: Path) -> dict[str, list[continuing.Batches]]:
    """Return the batches of a user's loader from a hook, of one from before, and of a plain
    loader.
    """
    plain = continuing.read(kind, directory, continuing.shuffled(SAMPLES))
    return {
        name: [continuing.read(kind, directory, each) for each in (make, given(make()))] + [plain]
        for name, make in COPIED.items()
    }


def test_a_loader_whose_class_cannot_be_created_again_keeps_its_arguments(tmp_path: Path) -> None:
    """Each rank reads its part through the user's loader and batch sampler."""
    for by_name in training.on_ranks("ours", read_copied, tmp_path):
        for name, (from_hook, from_before, plain) in by_name.items():
            assert from_hook == from_before == plain, name


# Batches of the user's.


def read_whole(kind: training.Kind, directory: Path) -> list[int]:
    """Return the numbers of batches of loaders whose batches are whole."""
    samples = (9, 10, 12, 16)
    loaders = [batched(Batched(range(each), 2, drop_last=True), each) for each in samples]
    return [len(continuing.read(kind, directory, given(each), max_epochs=1)[0]) for each in loaders]


def test_ranks_have_stocks_number_of_whole_batches(tmp_path: Path) -> None:
    """With ``drop_last=True``, batches that not every rank has are left out."""
    ours, stock = training.on_both(read_whole, tmp_path)
    assert ours == stock


# What a run leaves of the user's objects.


class Reversed(DistributedSampler[Any]):
    """A user's sampler with ranks and epochs."""

    def __iter__(self) -> Iterator[Any]:
        return reversed(list(super().__iter__()))


def sampled(rank: int) -> DataLoader[Any]:
    data = continuing.Numbers(SAMPLES)
    return DataLoader(data, 2, sampler=Reversed(data, 2, rank), **continuing.KEPT)


LOADERS = {
    "shuffled": Case(lambda rank: OwnLoader(continuing.Numbers(SAMPLES), 2, shuffle=True)),
    "a sampler, persistent workers": Case(sampled, is_divided=False),
    "a batch sampler": Case(part_in_batches, is_divided=False),
    "a stream": Case(lambda rank: continuing.stream(8)(rank, 2), is_divided=False),
}


def snapshot(part: Any) -> tuple[int, type, dict[str, int]]:
    """Return the identities of an object and of its attributes, and its class, without
    what each epoch changes: epochs and torch's workers.
    """
    names = vars(part).keys() - {"epoch", "_iterator"}
    return id(part), type(part), {name: id(vars(part)[name]) for name in names}


def snapshots(loader: Any) -> list[Any]:
    parts = (loader, loader.dataset, loader.sampler, loader.batch_sampler)
    return [snapshot(part) for part in parts]


def train_and_fail(rank: int, world_size: int, directory: Path, name: str) -> list[list[Any]]:
    """Return the loader's parts before a run, after it, and after one that resumed and
    failed.
    """
    case = LOADERS[name]
    loader = case.make(rank)
    options = {"max_epochs": 2, "use_distributed_sampler": case.is_divided}
    command = continuing.Training(given(loader), directory, world_size, options)
    parts = [snapshots(loader)]
    point = "train_batch_end-2"
    path = command.run(point).saved[point]
    parts.append(snapshots(loader))
    command.run(ckpt_path=path, fail_at=(0, 3))
    return [*parts, snapshots(loader)]


@pytest.mark.parametrize("name", LOADERS)
def test_the_users_objects_are_as_they_were(name: str, tmp_path: Path) -> None:
    """Loader, sampler, batch sampler and dataset keep their classes and attributes."""
    for before, after_training, after_failure in run_ranks(train_and_fail, 2, tmp_path, name):
        assert after_training == before
        assert after_failure == before


# What user code sees of a loader in a run.


def seen(loader: Any) -> dict[str, Any]:
    """Return what user code sees of a loader."""
    return {
        "type": type(loader).__name__,
        "is the user's": isinstance(loader, OwnLoader),
        "length": len(loader),
        "attributes": {*vars(loader)},
    }


def copy_loaders(kind: training.Kind, directory: Path) -> list[dict[str, Any]]:
    """Return what a callback sees of a loader and of copies of it, whose samples the
    strategy divides or not.
    """
    copies: list[dict[str, Any]] = []

    def copy_loader(trainer: L.Trainer) -> None:
        loader: Any = trainer.train_dataloader
        created_again = type(loader)(loader.dataset)
        pickled = pickle.loads(pickle.dumps(loader))
        copies.extend(map(seen, (loader, created_again, copy.copy(loader), pickled)))

    for is_divided in (True, False):
        loader = OwnLoader(continuing.Numbers(SAMPLES), batch_size=2, shuffle=True, own="given")
        copying = training.At("on_train_start", copy_loader)
        options = {"use_distributed_sampler": is_divided, "max_epochs": 1}
        continuing.read(kind, directory, given(loader), [copying], **options)
    assert len(copies) == 8
    return copies


def test_copies_of_a_loader_in_a_run_are_as_with_stock(tmp_path: Path) -> None:
    """A loader, and one that is copied, pickled or created again, have the user's class."""
    ours, stock = training.on_both(copy_loaders, tmp_path)
    assert ours == stock
