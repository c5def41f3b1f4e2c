"""Data that draw random numbers draw those of an uninterrupted run after a resume."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext import SamplerEpochSeeding
from tests.harness.ranks import run_ranks
from tests.integration import continuing
from tests.integration.continuing import Numbers, Training

# Global generators.


def augmented(number: float) -> Tensor:
    """Return a sample with a part that all three global generators draw."""
    drawn = random.random() + np.random.random() + torch.rand(())
    return torch.tensor([float(number) + 0.1 * float(drawn)])


class Augmented(Numbers):
    """Samples that are augmented when they are read."""

    def __getitem__(self, index: int) -> Tensor:
        return augmented(index)


class AugmentedTogether(Augmented):
    """The same, if the loader asks for all samples of a batch together."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


class AugmentedStream(continuing.Stream):
    """The same, without a length."""

    def __iter__(self) -> Iterator[Tensor]:
        return (augmented(float(number)) for number in super().__iter__())


def resume_augmented_stream(
    rank: int, world_size: int, directory: Path, loader: type[DataLoader[Any]], accumulated: int
) -> dict[str, str]:
    """Return the differences of resumed runs."""
    options = {"model": continuing.WITHOUT_DROPOUT, "accumulate_grad_batches": accumulated}
    loaders = partial(loader, AugmentedStream(12, rank), batch_size=2)
    training = Training(loaders, directory, options=options)
    points = ["train_batch_end-3", "train_epoch_end-6", "train_batch_end-8"]
    return continuing.generations(training, points, ["train_batch_end-10"])


@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_augmentation_of_a_stream_is_that_of_an_uninterrupted_run(
    loader: type[DataLoader[Any]], accumulated: int, tmp_path: Path
) -> None:
    """Lightning reads a batch of a stream ahead, which a resumed run augments in the same way."""
    differences = run_ranks(resume_augmented_stream, 2, tmp_path, loader, accumulated)
    assert differences == [{}, {}]


class Differences(NamedTuple):
    """How runs differ from an uninterrupted run with two workers.

    Attributes:
        resumed: those of resumed runs, by where they were saved.
        with_one_worker: that of an uninterrupted run with another number of workers.
    """

    resumed: dict[str, str]
    with_one_worker: str


def resume_augmented(
    rank: int, world_size: int, directory: Path, dataset: type[Augmented]
) -> Differences:
    """Augment in workers with ``each_sample=True``, and compare runs."""
    two_workers: Any = partial(DataLoader, dataset(24), 2, shuffle=True, **continuing.workers(2))
    seeding = SamplerEpochSeeding(seed=3, each_sample=True)
    training = Training(two_workers, directory, options={"callbacks": [seeding]})
    resumed = continuing.generations(training, ["train_batch_end-3"], ["train_batch_end-7"])
    whole = training.run()
    training.loaders = partial(two_workers, num_workers=1)
    return Differences(resumed, continuing.difference(training, whole, 0, training.run()))


@pytest.mark.parametrize("dataset", [Augmented, AugmentedTogether])
def test_augmentation_in_workers_is_that_of_an_uninterrupted_run(
    dataset: type[Augmented], tmp_path: Path
) -> None:
    """With ``each_sample=True``, resumed runs end with the same weights to the last bit.

    So does a run with another number of workers.
    """
    none = Differences(resumed={}, with_one_worker="")
    assert run_ranks(resume_augmented, 2, tmp_path, dataset) == [none, none]


class DrawingSampler(continuing.Turning):
    """Draws a number whenever Lightning sets its epoch."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        torch.rand(())


def resume_with_drawing_sampler(rank: int, world_size: int, directory: Path) -> dict[str, str]:
    """Return the differences of resumed runs of a model with dropout."""
    sampler = DrawingSampler(24, rank, world_size)
    options = {"use_distributed_sampler": False}
    training = Training(continuing.loader(24, sampler=sampler), directory, options=options)
    return continuing.generations(training, ["train_batch_end-3"], ["train_batch_end-8"])


def test_a_sampler_that_draws_when_its_epoch_is_set(tmp_path: Path) -> None:
    """Setting the epoch of a resumed run again does not change later random numbers."""
    assert run_ranks(resume_with_drawing_sampler, 2, tmp_path) == [{}, {}]


# Generators that are attributes of the user's objects.


class OwnGenerator(Numbers):
    """Samples with a part that the dataset's own generator draws."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.rng = np.random.default_rng(5)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index + 0.1 * self.rng.random()], dtype=torch.float32)


class Collator:
    """Adds a part to a batch that its own generator draws."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(5)

    def __call__(self, samples: list[Tensor]) -> Tensor:
        return torch.stack(samples) + 0.1 * torch.rand((), generator=self.generator)

    def collate(self, samples: list[Tensor]) -> Tensor:
        return self(samples)


OWN_GENERATORS: dict[str, Callable[[], DataLoader[Any]]] = {
    "dataset": lambda: DataLoader(OwnGenerator(24), 2, shuffle=True),
    "datasets inside it": lambda: DataLoader(
        ConcatDataset([OwnGenerator(12), Subset(OwnGenerator(12), range(12))]), 2
    ),
    "collate_fn": lambda: DataLoader(Numbers(24), 2, shuffle=True, collate_fn=Collator()),
    "object of collate_fn": lambda: DataLoader(Numbers(24), 2, collate_fn=Collator().collate),
}


def resume_own_generator(rank: int, world_size: int, directory: Path, owner: str) -> dict[str, str]:
    """Return the differences of resumed runs."""
    training = Training(OWN_GENERATORS[owner], directory)
    return continuing.generations(training, ["train_batch_end-3"], ["train_batch_end-7"])


@pytest.mark.parametrize("owner", OWN_GENERATORS)
def test_a_generator_of_the_data_continues(owner: str, tmp_path: Path) -> None:
    """Without workers, an attribute of a dataset or ``collate_fn`` draws the same numbers."""
    assert run_ranks(resume_own_generator, 2, tmp_path, owner) == [{}, {}]
