"""Which objects below a loader get the epoch, and what a DataLoader's workers see of
it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_ddp_ext.data.epochs import set_epoch, start_epoch
from lightning_ddp_ext.data.seeding import WorkerSeeding


class Taker(Dataset[int]):
    """A dataset and sampler that records its epochs; may hold anything.

    Each looks the same to the search, whether it is a dataset, a sampler or a loader of
    one's own.
    """

    def __init__(self, held: object = None) -> None:
        self._held = held
        self.log: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.log.append(epoch)

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))

    def __getitem__(self, index: int) -> int:
        return index


class Wrapper(Dataset[int]):
    """A dataset of the user's own, around anything, under a private name."""

    def __init__(self, held: object) -> None:
        self.__inner = held

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class CountingList(list[Any]):
    """Counts how many of its elements were looked at."""

    looked_at = 0

    def __iter__(self) -> Iterator[Any]:
        for element in super().__iter__():
            self.looked_at += 1
            yield element


class Module(LightningModule):
    def set_epoch(self, epoch: int) -> None:
        pytest.fail("was told")


class Anything(Dataset[int]):
    set_epoch = None


class Answering(Dataset[int]):
    def __getattr__(self, name: str) -> object:
        return lambda *_: pytest.fail("was asked")


def test_other_objects_get_no_epoch() -> None:
    """Modules, Trainers and objects inside them get none, nor do objects that only
    claim to have such a method.
    """
    beyond = Taker()
    trainer = Trainer(barebones=True)
    data = LightningDataModule()
    module = Module()
    trainer.held = data.held = module.held = beyond
    others = [module, trainer, data, Module]
    for loaders in (
        DataLoader(Wrapper(others)),
        others,
        module,
        [DataLoader(Anything()), DataLoader(Answering())],
    ):
        set_epoch(loaders, 0)
    assert beyond.log == []


def test_data_is_not_walked_through() -> None:
    """The search skips nearly all of a list of a million values, and of a large object
    graph in a dataset.
    """
    numbers = CountingList([0] * 1_000_000)
    records = CountingList({"image": [index], "box": (1, 2)} for index in range(100_000))
    lists = CountingList([numbers] * 1000)
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    module.inside = CountingList([Taker()])
    set_epoch(DataLoader(Taker([numbers, {"records": records}, lists, module, torch.zeros(9)])), 0)
    assert 0 < numbers.looked_at + records.looked_at + lists.looked_at <= 10
    assert module.inside.looked_at == 0


class Mapped(Dataset[Any]):
    """What ``make`` returns in the process that reads the sample."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.make()


def draws() -> tuple[float, float, float]:
    """Random numbers of all three generators."""
    return random.random(), float(np.random.random()), float(torch.rand(()))


def read(make: Callable[[], Any], *, persistent: bool = True, **options: Any) -> list[list[Any]]:
    """Read two epochs with a worker, as a Trainer would, and return the samples of
    each.
    """
    options = {
        "multiprocessing_context": "fork",
        "persistent_workers": persistent,
        "collate_fn": list,
        **options,
    }
    loader = DataLoader(Mapped(make), num_workers=1, **options)
    samples = []
    for epoch in range(2):
        start_epoch(loader, epoch, rank=0, seeding=WorkerSeeding(3) if make is draws else None)
        samples.append([sample for batch in loader for sample in batch])
    return samples


def test_the_users_own_start_runs_first() -> None:
    """A worker_init_fn of the user's still runs, in every epoch, and before the
    generators are seeded.
    """

    def start(worker: int) -> None:
        random.seed(worker)
        os.environ["STARTED"] = "yes"

    assert (
        read(lambda: os.environ["STARTED"], worker_init_fn=start, persistent=False)
        == [["yes"] * 8] * 2
    )
    assert read(draws, worker_init_fn=start, persistent=False) == read(draws)


def test_workers_stay_where_nothing_takes_epochs() -> None:
    """Persistent workers start anew only for datasets that take epochs."""
    first, second = read(os.getpid)
    assert set(first) == set(second)
