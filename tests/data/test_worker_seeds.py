"""What a DataLoader's workers know of the epoch, seen in the data that they return."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    get_worker_info,
)

from lightning_ddp_ext.data.epochs import set_epoch
from lightning_ddp_ext.data.worker_seeds import seed_generators, start_epoch
from lightning_ddp_ext.errors import SamplerError
from tests.harness.rank_server import start_server


class Epochs:
    """The part of a dataset that is told the epoch; each sample says which one it was."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class MapEpochs(Epochs, Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return self.epoch


class StreamEpochs(Epochs, IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        for _ in range(4):
            yield self.epoch


class SlottedEpochs:
    """A dataset without a __dict__ that is no Dataset."""

    __slots__ = ("epoch",)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.epoch


class MapDraws(Dataset[Any]):
    """Random numbers of all three generators, and who drew them."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return draws()


class StreamDraws(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for _ in range(4):
            yield draws()


def draws() -> tuple[int, float, float, float]:
    info = get_worker_info()
    return (info.id if info else -1, random.random(), float(np.random.random()), float(torch.rand(())))


def loader_of(dataset: Any, workers: int = 2, *, persistent: bool = True, **options: Any) -> DataLoader[Any]:
    return DataLoader(
        dataset,
        batch_size=2,
        num_workers=workers,
        persistent_workers=persistent,
        collate_fn=list,
        **{"multiprocessing_context": "fork" if workers else None, **options},
    )


def read(
    loader: DataLoader[Any], number: int = 4, *, begin: bool = True, rank: int = 0, seed: int | None = None
) -> list[list[Any]]:
    """Read the epochs 0, 1 … as a Trainer would, and return the samples of each."""
    samples = []
    for epoch in range(number):
        if begin:
            start_epoch(loader, epoch, rank=rank, seed=seed)
        else:
            set_epoch(loader, epoch)
        samples.append(list(itertools.chain.from_iterable(loader)))
    return samples


DATASETS = {
    "map": MapEpochs,
    "slots": SlottedEpochs,
    "subset": lambda: Subset(MapEpochs(), range(4)),
    "concat": lambda: ConcatDataset([Subset(MapEpochs(), range(3)), MapEpochs()]),
    "iterable": StreamEpochs,
}
SETTINGS = [(0, False), (2, False), (2, True)]


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize(("workers", "persistent"), SETTINGS)
def test_each_sample_is_of_its_epoch(dataset: str, workers: int, persistent: bool) -> None:
    """With no, one and two workers, new ones each epoch or the same, each sample read in an epoch is that epoch's."""
    loader = loader_of(DATASETS[dataset](), workers, persistent=persistent)
    seen = read(loader)
    assert [set(samples) for samples in seen] == [{0}, {1}, {2}, {3}]


def test_started_by_a_server_too() -> None:
    """Workers that share nothing with the main process but what they are sent follow the epoch."""
    start_server()  # as all tests do that use it, so that it has imported torch already
    loader = loader_of(MapEpochs(), 1, multiprocessing_context="forkserver")
    assert [set(samples) for samples in read(loader, 3)] == [{0}, {1}, {2}]


def test_the_users_own_start_runs_first() -> None:
    """A worker_init_fn of the user's still runs, in every epoch, and before the generators are seeded."""
    loader = loader_of(MapDraws(), 1, worker_init_fn=random.seed, persistent=False)
    assert read(loader, 2, seed=3) == read(loader_of(MapDraws(), 1), 2, seed=3)
    assert loader.worker_init_fn.own is random.seed  # type: ignore[union-attr]


def test_workers_stay_where_nothing_takes_epochs() -> None:
    """Persistent workers are started anew for those datasets alone that have to be told."""
    loader = loader_of(Workers(), 1)
    first, second = read(loader, 2)
    assert set(first) == set(second)


class Workers(Dataset[int]):
    """Tells which process reads it."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return os.getpid()


@pytest.mark.parametrize("dataset", [MapDraws, StreamDraws])
def test_streams_are_of_seed_epoch_rank_and_worker(dataset: type[Dataset[Any]]) -> None:
    """Two runs draw the same numbers, persistent workers or not; any other epoch, rank, worker or seed other ones."""

    def run(rank: int, seed: int, *, persistent: bool = True) -> list[list[Any]]:
        loader = loader_of(dataset(), persistent=persistent)
        return read(loader, 2, rank=rank, seed=seed)

    first = run(0, 1)
    assert {sample[0] for sample in first[0]} == {0, 1}
    assert run(0, 1, persistent=False) == first
    everything = [first, run(1, 1), run(0, 2)]
    for generator in (1, 2, 3):
        drawn = [sample[generator] for seen in everything for samples in seen for sample in samples]
        assert len(set(drawn)) == len(drawn) == 48


def test_global_generators_repeat() -> None:
    """Seeding twice alike draws alike from all three; the main process is not worker 0."""
    drawn = []
    for worker in (None, None, 0):
        seed_generators(7, epoch=1, rank=2, worker=worker)
        drawn.append(draws()[1:])
    assert drawn[0] == drawn[1]
    assert not set(drawn[0]) & set(drawn[2])


def test_negative_numbers_are_refused() -> None:
    """A negative number is refused with its value."""
    with pytest.raises(SamplerError, match=r"must not be negative \(got \(-7, "):
        seed_generators(-7, epoch=0, rank=0)
