"""A user's loader, samplers and dataset keep their classes and attributes."""

import copy
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import lightning as L
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from tests.harness import training
from tests.harness.ranks import run_ranks
from tests.integration import continuing
from tests.integration.continuing import Numbers

SAMPLES = 16
POINT = "train_batch_end-2"
FAILS_AT = (0, 3)  # epoch and batch, after the point


class Reversed(DistributedSampler[Any]):
    """A user's sampler with ranks and epochs."""

    def __iter__(self) -> Iterator[Any]:
        return reversed(list(super().__iter__()))


class InTwos(BatchSampler):
    """A batch sampler of the user's own."""


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


def shuffled(rank: int, world_size: int) -> OwnLoader:
    return OwnLoader(Numbers(SAMPLES), 2, shuffle=True)


def sampled(rank: int, world_size: int) -> DataLoader[Any]:
    data = Numbers(SAMPLES)
    return DataLoader(data, 2, sampler=Reversed(data, world_size, rank), **continuing.KEPT)


def batched(rank: int, world_size: int) -> DataLoader[Any]:
    own = continuing.Turning(SAMPLES, rank, world_size)
    return DataLoader(Numbers(SAMPLES), batch_sampler=InTwos(own, 2, drop_last=False))


class Case(NamedTuple):
    """A loader, and how it is read.

    Attributes:
        make: makes the loader, in ``LOADERS`` from the rank and the number of ranks.
        is_divided: whether the strategy divides its samples among the ranks.
    """

    make: Callable[..., Any]
    is_divided: bool = False


LOADERS = {
    "shuffled": Case(shuffled, is_divided=True),
    "a sampler, persistent workers": Case(sampled),
    "a batch sampler": Case(batched),
    "a stream": Case(continuing.stream(8)),
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


def train_and_fail(rank: int, world_size: int, directory: Path, name: str) -> list[Any]:
    """Return the loader's parts before a run, after it, and after one that resumed and
    failed.
    """
    case = LOADERS[name]
    loader = case.make(rank, world_size)
    options = {
        "max_epochs": 2,
        "model": continuing.WITHOUT_DROPOUT,
        "use_distributed_sampler": case.is_divided,
    }
    runs = continuing.Training(lambda: loader, directory, world_size, options)
    before = snapshots(loader)
    path = runs.run(POINT).saved[POINT]
    trained = snapshots(loader)
    runs.run(ckpt_path=path, fail_at=FAILS_AT)
    return [before, trained, snapshots(loader)]


@pytest.mark.parametrize("name", LOADERS)
def test_the_users_objects_are_as_they_were(name: str, tmp_path: Path) -> None:
    """Loader, sampler, batch sampler and dataset keep their classes and attributes."""
    for before, trained, failed in run_ranks(train_and_fail, 2, tmp_path, name):
        assert trained == before
        assert failed == before


def seen(loader: Any) -> dict[str, Any]:
    """Return what user code sees of a loader."""
    return {
        "type": type(loader).__name__,
        "is the user's": isinstance(loader, OwnLoader),
        "length": len(loader),
        "attributes": {*vars(loader)},
    }


def copy_loaders(kind: training.Kind, directory: Path, is_injected: bool) -> dict[str, Any]:
    """Return the loader and copies of it, as a callback sees them."""
    copies: dict[str, Any] = {}

    def copy_loader(trainer: L.Trainer) -> None:
        loader: Any = trainer.train_dataloader
        copies["itself"] = seen(loader)
        copies["created again"] = seen(type(loader)(loader.dataset))
        copies["copied"] = seen(copy.copy(loader))
        copies["pickled"] = seen(pickle.loads(pickle.dumps(loader)))

    loader = OwnLoader(training.data(SAMPLES), batch_size=2, shuffle=True, own="given")
    trainer = training.make_trainer(
        training.make_strategy(kind, directory),
        callbacks=[training.At("on_train_start", copy_loader)],
        use_distributed_sampler=is_injected,
        max_epochs=1,
    )
    trainer.fit(training.Net(), loader)
    return copies


@pytest.mark.parametrize("is_injected", [True, False])
def test_copies_of_a_loader_in_a_run_are_as_with_stock(is_injected: bool, tmp_path: Path) -> None:
    """A loader, and one that is copied, pickled or created again, have the user's class."""
    ours, stock = training.on_both(copy_loaders, tmp_path, is_injected)
    assert ours == stock


class Locked(DataLoader[Any]):
    """Leaves its lock out when it is sent to another process."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "lock"}

    def __iter__(self) -> Any:
        with self.lock:
            return super().__iter__()


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
        self.given = 0

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Self:
        self.generator.shuffle(self.samples)
        self.given = 0
        return self

    def __next__(self) -> torch.Tensor:
        if self.given == len(self):
            raise StopIteration
        self.given += 1
        return torch.tensor([[float(self.samples[self.given])]])


UNUSUAL = {
    "leaves a lock out": Case(
        lambda: Locked(Numbers(SAMPLES), batch_size=2, shuffle=True), is_divided=True
    ),
    "cannot be pickled": Case(lambda: Unpicklable(Numbers(SAMPLES), batch_size=2)),
    "its own iterator": Case(OwnIterator),
}


class Evaluated(continuing.Net):
    """Records the samples of training and validation."""

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.happens("validated", *batch.flatten().tolist())


def read_unusual(kind: training.Kind, directory: Path, name: str) -> dict[str, Any]:
    """Train on a loader, and validate on another one of the same kind."""
    case = UNUSUAL[name]
    module = Evaluated(case.make)
    trainer = training.make_trainer(
        training.make_strategy(kind, directory), use_distributed_sampler=case.is_divided
    )
    trainer.fit(module, val_dataloaders=case.make())
    return {"trained": module.steps, "events": module.events}


@pytest.mark.parametrize("name", UNUSUAL)
def test_an_unusual_loader_is_read_as_with_stock(name: str, tmp_path: Path) -> None:
    """A loader that cannot be sent whole to another process, or that shuffles at each
    start, yields the batches that it yields with stock.
    """
    ours, stock = training.on_both(read_unusual, tmp_path, name)
    assert ours == stock


def keep_loader(rank: int, world_size: int, directory: Path) -> list[int]:
    """Return the length of a validation's loader, and its length after another run."""
    trainer = training.make_trainer(training.make_strategy("ours", directory))
    trainer.validate(training.Net(), DataLoader(training.data(7), batch_size=4), verbose=False)
    kept: Any = trainer.val_dataloaders
    length = len(kept)
    trainer.test(training.Net(), verbose=False)
    return [length, len(kept)]


def test_a_kept_loader_has_its_length_after_another_run(tmp_path: Path) -> None:
    """A rank reads three samples in one batch and the fourth one alone, in two batches."""
    for lengths in run_ranks(keep_loader, 2, tmp_path):
        assert lengths == [2, 2]
