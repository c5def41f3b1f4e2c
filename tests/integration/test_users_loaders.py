"""Loaders and batch samplers of users' classes are read as with stock; those that stock
refuses to create again are divided among the ranks.

``test_kept_loaders`` shows that their objects do not change.
"""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from tests.harness import training
from tests.integration import continuing

SAMPLES = 16


def batched(batch_sampler: Any, samples: int = SAMPLES) -> DataLoader[Any]:
    return DataLoader(continuing.Numbers(samples), batch_sampler=batch_sampler)


def returning(loader: Any) -> Callable[[], Any]:
    """Return a ``train_dataloader`` that returns this loader, which is older than the run."""
    return lambda: loader


class Evaluated(continuing.Net):
    """Records the samples of validation, as its base class does those of training."""

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.happens("validated", *batch.flatten().tolist())


class UsersLoader(NamedTuple):
    """A function that makes a rank's loader, and an option of the Trainer with which it is
    read.
    """

    make: Callable[[int], Any]
    use_distributed_sampler: bool = True


def read_in_both_loops(
    kind: training.Kind, directory: Path, loader: UsersLoader
) -> dict[str, list[Any]]:
    """Train on a loader from before the run, and validate on another one of the same kind."""
    rank = int(os.environ["RANK"])
    module = Evaluated(returning(loader.make(rank)))
    training.make_trainer(
        training.make_strategy(kind, directory),
        use_distributed_sampler=loader.use_distributed_sampler,
        max_epochs=2,
    ).fit(module, val_dataloaders=loader.make(rank))
    return {"steps": module.steps, "events": module.events}


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


def part_in_batches(rank: int) -> DataLoader[Any]:
    """Return batches of the rank's part, which the user's sampler divides, and therefore the
    strategy does not.
    """
    part = DistributedSampler(range(SAMPLES), 2, rank, shuffle=False)
    return batched(continuing.Backwards(part, 2, drop_last=False))


# One start of the ranks reads all of these loaders.
AS_STOCK = {
    # Its class is created again for each rank, with another batch sampler.
    "reads own batch sampler": UsersLoader(
        lambda rank: ReadsOwnBatchSampler(continuing.Numbers(SAMPLES), batch_size=2, shuffle=True)
    ),
    # Each rank reads the user's object itself.
    "cannot be pickled": UsersLoader(
        lambda rank: Unpicklable(continuing.Numbers(SAMPLES), 2), use_distributed_sampler=False
    ),
    "its own iterator": UsersLoader(lambda rank: OwnIterator(), use_distributed_sampler=False),
    "goes on in the next epoch": UsersLoader(lambda rank: GoesOn(), use_distributed_sampler=False),
    # The user has divided the samples, so the strategy does not.
    "divided by a sampler": UsersLoader(part_in_batches),
}


def read_as_stock(kind: training.Kind, directory: Path) -> dict[str, Any]:
    return {
        f"{what} of {name}": result
        for name, loader in AS_STOCK.items()
        for what, result in read_in_both_loops(kind, directory, loader).items()
    }


def test_unusual_loaders_are_read_as_with_stock(tmp_path: Path) -> None:
    """They yield the batches that they yield with stock."""
    for ours, stock in zip(*training.on_both(read_as_stock, tmp_path), strict=True):
        assert ours == stock


class Unsized:
    """Batches without a length."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0], [1]])


def refuse_unsized(kind: training.Kind, directory: Path) -> str:
    return str(
        training.raised(
            TypeError,
            read_in_both_loops,
            kind,
            directory,
            UsersLoader(lambda rank: batched(Unsized())),
        )
    )


def test_batches_without_a_number_are_refused_as_with_stock(tmp_path: Path) -> None:
    """The error is Lightning's, which names ``use_distributed_sampler``."""
    ours, stock = training.on_both(refuse_unsized, tmp_path)
    assert ours == stock
    assert "Trainer(use_distributed_sampler=False)" in ours[0]


def count_whole_batches(kind: training.Kind, directory: Path) -> dict[int, int]:
    """Return the number of this rank's batches, all of them whole, by the number of samples."""
    loaders = {
        samples: batched(continuing.Backwards(range(samples), 2, drop_last=True), samples)
        for samples in (9, 10, 12, 16)
    }
    return {
        samples: len(continuing.read(kind, directory, returning(loader), max_epochs=1)[0])
        for samples, loader in loaders.items()
    }


def test_ranks_have_stocks_number_of_whole_batches(tmp_path: Path) -> None:
    """With ``drop_last=True``, batches that not every rank has are left out."""
    ours, stock = training.on_both(count_whole_batches, tmp_path)
    assert ours == stock


# Loaders of which Lightning cannot create another one.


class FixedOptions(DataLoader[Any]):
    """Chooses all of torch's options itself."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, batch_size=2, shuffle=True)


COPIED: dict[str, Callable[[], DataLoader[Any]]] = {
    "fixed options": lambda: FixedOptions(continuing.Numbers(SAMPLES)),
    "explicit batch sampler": lambda: batched(
        BatchSampler(RandomSampler(range(SAMPLES)), 2, False)
    ),
}


def read_copied(kind: training.Kind, directory: Path) -> dict[str, continuing.Batches]:
    """Return the batches of a plain loader, and those of each loader if a hook makes it, and
    if it is made before the run.
    """
    batches = {"plain": continuing.read(kind, directory, continuing.shuffled(SAMPLES))}
    for name, make in COPIED.items():
        batches[f"{name}, from hook"] = continuing.read(kind, directory, make)
        batches[f"{name}, made before"] = continuing.read(kind, directory, returning(make()))
    return batches


def test_a_loader_whose_class_cannot_be_created_again_keeps_its_arguments(tmp_path: Path) -> None:
    """Each rank reads its part through the user's loader and batch sampler."""
    for batches in training.on_ranks("ours", read_copied, tmp_path):
        assert batches == dict.fromkeys(batches, batches["plain"])
