"""A user's loader, samplers and dataset keep their classes and attributes."""

import copy
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
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
POINT = "train_batch_end-2"  # where the first run saves: after two batches
FAILS_AT = (0, 3)  # the epoch and the batch in which the resumed run fails


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


def sampled(rank: int, world_size: int) -> DataLoader[Any]:
    data = Numbers(SAMPLES)
    sampler = Reversed(data, world_size, rank)
    return DataLoader(data, 2, sampler=sampler, **continuing.workers(persistent_workers=True))


def batched(rank: int, world_size: int) -> DataLoader[Any]:
    own = continuing.Turning(SAMPLES, rank, world_size)  # divides the samples itself
    return DataLoader(Numbers(SAMPLES), batch_sampler=InTwos(own, 2, drop_last=False))


class Case(NamedTuple):
    """A loader of each rank.

    Attributes:
        make: makes the loader from the rank and the number of ranks.
        is_divided: whether the strategy divides its samples among the ranks.
    """

    make: Callable[[int, int], DataLoader[Any]]
    is_divided: bool = False


LOADERS = {
    "shuffled": Case(
        lambda rank, world_size: OwnLoader(Numbers(SAMPLES), 2, shuffle=True), is_divided=True
    ),
    "a sampler, persistent workers": Case(sampled),
    "a batch sampler": Case(batched),
    "a stream": Case(continuing.stream(8)),  # each rank has its own
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


def train_and_fail(rank: int, world_size: int, directory: Path, name: str) -> dict[str, list[Any]]:
    """Return the loader's parts before a run, after it, and after one that resumed and
    failed.
    """
    case = LOADERS[name]
    loader = case.make(rank, world_size)
    options = {"max_epochs": 2, "use_distributed_sampler": case.is_divided}
    command = continuing.Training(lambda: loader, directory, world_size, options)
    parts = {"before": snapshots(loader)}
    path = command.run(POINT).saved[POINT]
    parts["after training"] = snapshots(loader)
    command.run(ckpt_path=path, fail_at=FAILS_AT)
    parts["after failure"] = snapshots(loader)
    return parts


@pytest.mark.parametrize("name", LOADERS)
def test_the_users_objects_are_as_they_were(name: str, tmp_path: Path) -> None:
    """Loader, sampler, batch sampler and dataset keep their classes and attributes."""
    for parts in run_ranks(train_and_fail, 2, tmp_path, name):
        assert parts["after training"] == parts["before"]
        assert parts["after failure"] == parts["before"]


def seen(loader: Any) -> dict[str, Any]:
    """Return what user code sees of a loader."""
    return {
        "type": type(loader).__name__,
        "is the user's": isinstance(loader, OwnLoader),
        "length": len(loader),
        "attributes": {*vars(loader)},
    }


def copy_loaders(kind: training.Kind, directory: Path, is_divided: bool) -> dict[str, Any]:
    """Return what a callback sees of the loader and of copies of it.

    ``is_divided``: whether the strategy divides its samples among the ranks.
    """
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
        use_distributed_sampler=is_divided,
        max_epochs=1,
    )
    trainer.fit(training.Net(), loader)
    return copies


@pytest.mark.parametrize("is_divided", [True, False])
def test_copies_of_a_loader_in_a_run_are_as_with_stock(is_divided: bool, tmp_path: Path) -> None:
    """A loader, and one that is copied, pickled or created again, have the user's class."""
    ours, stock = training.on_both(copy_loaders, tmp_path, is_divided)
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
        return 4  # of the samples, in batches of one

    def __iter__(self) -> Self:
        self.generator.shuffle(self.samples)
        self.given = 0
        return self

    def __next__(self) -> torch.Tensor:
        if self.given == len(self):
            raise StopIteration
        sample = self.samples[self.given]
        self.given += 1
        return torch.tensor([[float(sample)]])


class Evaluated(continuing.Net):
    """Records the samples of validation, as its base class does those of training."""

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.happens("validated", *batch.flatten().tolist())


def read_unusual(
    kind: training.Kind, directory: Path, make: Callable[[], Any], is_divided: bool
) -> dict[str, Any]:
    """Train on a loader, and validate on another one of the same kind."""
    module = Evaluated(make)
    trainer = training.make_trainer(
        training.make_strategy(kind, directory), use_distributed_sampler=is_divided
    )
    trainer.fit(module, val_dataloaders=make())
    return {"trained": module.steps, "events": module.events}


@pytest.mark.parametrize(
    ("make", "is_divided"),
    [
        pytest.param(
            partial(Locked, Numbers(SAMPLES), batch_size=2, shuffle=True),
            True,
            id="leaves a lock out",
        ),
        pytest.param(
            partial(Unpicklable, Numbers(SAMPLES), batch_size=2), False, id="cannot be pickled"
        ),
        pytest.param(OwnIterator, False, id="its own iterator"),
    ],
)
def test_an_unusual_loader_is_read_as_with_stock(
    make: Callable[[], Any], is_divided: bool, tmp_path: Path
) -> None:
    """A loader that cannot be sent whole to another process, or that shuffles at each
    start, yields the batches that it yields with stock.
    """
    ours, stock = training.on_both(read_unusual, tmp_path, make, is_divided)
    assert ours == stock


def keep_loader(rank: int, world_size: int, directory: Path) -> dict[str, int]:
    """Return the length of a validation's loader, and its length after a test on another."""
    trainer = training.make_trainer(training.make_strategy("ours", directory))
    trainer.validate(training.Net(), DataLoader(training.data(7), batch_size=4), verbose=False)
    kept: Any = trainer.val_dataloaders
    after_validation = len(kept)
    trainer.test(training.Net(), verbose=False)
    return {"after validation": after_validation, "after test": len(kept)}


def test_a_kept_loader_has_its_length_after_another_run(tmp_path: Path) -> None:
    """A rank reads three samples in one batch and the fourth one alone, in two batches."""
    expected = {"after validation": 2, "after test": 2}
    assert run_ranks(keep_loader, 2, tmp_path) == [expected, expected]
