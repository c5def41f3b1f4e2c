"""Loaders and batch samplers of the user's own are divided among ranks or read as with
stock, and keep their classes and attributes.
"""

import copy
import os
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from tests.harness import training
from tests.harness.ranks import run_ranks
from tests.integration import continuing
from tests.integration.continuing import Numbers

SAMPLES = 16


def batched(batch_sampler: Any, samples: int = SAMPLES) -> DataLoader[Any]:
    return DataLoader(Numbers(samples), batch_sampler=batch_sampler)


def given(loader: Any) -> Callable[[], Any]:
    """Return a ``train_dataloader`` that returns a loader from before the run."""
    return lambda: loader


class Case(NamedTuple):
    """A function that makes a rank's loader, and whether the strategy divides its samples
    among the ranks.
    """

    make: Callable[[int], Any]
    is_divided: bool = True


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


class Batched(BatchSampler):
    """A subclass of torch's batch sampler that changes nothing."""


def part_in_batches(rank: int) -> DataLoader[Any]:
    """Return batches of the rank's part, which the user's sampler divides."""
    part = DistributedSampler(range(SAMPLES), 2, rank, shuffle=False)
    return batched(Batched(part, 2, drop_last=False))


class Evaluated(continuing.Net):
    """Records the samples of validation, as its base class does those of training."""

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.happens("validated", *batch.flatten().tolist())


def read_in_both_loops(kind: training.Kind, directory: Path, case: Case) -> tuple[Any, Any]:
    """Train on a loader from before the run, and validate on another one of the same kind;
    return the steps and events.
    """
    rank = int(os.environ["RANK"])
    module = Evaluated(given(case.make(rank)))
    trainer = training.make_trainer(
        training.make_strategy(kind, directory),
        use_distributed_sampler=case.is_divided,
        max_epochs=2,
    )
    trainer.fit(module, val_dataloaders=case.make(rank))
    return module.steps, module.events


AS_STOCK = {
    "reads own batch sampler": Case(
        lambda rank: ReadsOwnBatchSampler(Numbers(SAMPLES), batch_size=2, shuffle=True)
    ),
    "cannot be pickled": Case(lambda rank: Unpicklable(Numbers(SAMPLES), 2), is_divided=False),
    "its own iterator": Case(lambda rank: OwnIterator(), is_divided=False),
    "goes on in the next epoch": Case(lambda rank: GoesOn(), is_divided=False),
    "divided by a sampler": Case(part_in_batches),
}


def read_as_stock(kind: training.Kind, directory: Path) -> dict[str, Any]:
    return {name: read_in_both_loops(kind, directory, case) for name, case in AS_STOCK.items()}


def test_unusual_loaders_are_read_as_with_stock(tmp_path: Path) -> None:
    """They yield the batches that they yield with stock."""
    ours, stock = training.on_both(read_as_stock, tmp_path)
    assert ours == stock


class Unsized:
    """Batches of which there is no number."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0], [1]])


def refuse_unsized(kind: training.Kind, directory: Path) -> str:
    case = Case(lambda rank: batched(Unsized()))
    return str(training.raised(TypeError, read_in_both_loops, kind, directory, case))


def test_batches_without_a_number_are_refused_as_with_stock(tmp_path: Path) -> None:
    """The error is Lightning's, which names ``use_distributed_sampler``."""
    ours, stock = training.on_both(refuse_unsized, tmp_path)
    assert ours == stock
    assert "Trainer(use_distributed_sampler=False)" in ours[0]


def count_whole_batches(kind: training.Kind, directory: Path) -> list[int]:
    """Return the number of this rank's batches of each loader, whose batches are whole."""
    samples = (9, 10, 12, 16)
    loaders = [batched(Batched(range(each), 2, drop_last=True), each) for each in samples]
    return [len(continuing.read(kind, directory, given(each), max_epochs=1)[0]) for each in loaders]


def test_ranks_have_stocks_number_of_whole_batches(tmp_path: Path) -> None:
    """With ``drop_last=True``, batches that not every rank has are left out."""
    ours, stock = training.on_both(count_whole_batches, tmp_path)
    assert ours == stock


# Loaders that stock refuses, or creates again with other arguments.


class FixedOptions(DataLoader[Any]):
    """Chooses all of torch's options itself."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, batch_size=2, shuffle=True)


COPIED: dict[str, Callable[[], DataLoader[Any]]] = {
    "fixed options": lambda: FixedOptions(Numbers(SAMPLES)),
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


# What a run leaves of the user's objects.


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


class Reversed(DistributedSampler[Any]):
    """A user's sampler with ranks and epochs."""

    def __iter__(self) -> Iterator[Any]:
        return reversed(list(super().__iter__()))


def sampled(rank: int) -> DataLoader[Any]:
    data = Numbers(SAMPLES)
    return DataLoader(data, 2, sampler=Reversed(data, 2, rank), **continuing.KEPT)


LOADERS = {
    "shuffled": Case(lambda rank: OwnLoader(Numbers(SAMPLES), 2, shuffle=True)),
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
    before = snapshots(loader)
    point = "train_batch_end-2"
    path = command.run(point).saved[point]
    after_training = snapshots(loader)
    command.run(ckpt_path=path, fail_at=(0, 3))
    return [before, after_training, snapshots(loader)]


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


def copy_in_run(
    kind: training.Kind, directory: Path, is_divided: bool
) -> dict[str, dict[str, Any]]:
    """Return what a callback sees of a loader and of copies of it."""
    found: dict[str, dict[str, Any]] = {}

    def copy_loader(trainer: L.Trainer) -> None:
        loader: Any = trainer.train_dataloader
        found["loader"] = seen(loader)
        found["created again"] = seen(type(loader)(loader.dataset))
        found["copied"] = seen(copy.copy(loader))
        found["pickled"] = seen(pickle.loads(pickle.dumps(loader)))

    loader = OwnLoader(Numbers(SAMPLES), batch_size=2, shuffle=True, own="given")
    copying = training.At("on_train_start", copy_loader)
    options = {"use_distributed_sampler": is_divided, "max_epochs": 1}
    continuing.read(kind, directory, given(loader), [copying], **options)
    return found


@pytest.mark.parametrize("is_divided", [True, False], ids=["divided", "not divided"])
def test_copies_of_a_loader_in_a_run_are_as_with_stock(is_divided: bool, tmp_path: Path) -> None:
    """A loader, and one that is copied, pickled or created again, have the user's class,
    whether or not the strategy divides its samples.
    """
    ours, stock = training.on_both(copy_in_run, tmp_path, is_divided)
    assert ours == stock
    assert len(ours[0]) == 4
