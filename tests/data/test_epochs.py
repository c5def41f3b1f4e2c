"""Which objects below a loader get no epoch, and how a loader's workers start."""

import os
from collections.abc import Iterator

import pytest
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from lightning_ddp_ext.data.epochs import prepare_workers, set_epoch
from lightning_ddp_ext.data.loader import samplers_set_by_lightning


class Holder(Dataset[int]):
    """A dataset that may hold anything."""

    def __init__(self, held: object) -> None:
        self._held = held


class Refusing(Dataset[int]):
    """A dataset that must not get an epoch."""

    def set_epoch(self, epoch: int) -> None:
        pytest.fail("got an epoch")


class Module(LightningModule):
    set_epoch = Refusing.set_epoch


class NotCallable(Dataset[int]):
    set_epoch = None


class Answering(Dataset[int]):
    """Claims to have any method."""

    def __getattr__(self, name: str) -> object:
        return lambda *_: pytest.fail(f"{name} was called")


def test_other_objects_get_no_epoch() -> None:
    """Modules, Trainers, objects inside them and false claims of a method get none."""
    module = Module()
    trainer = Trainer(barebones=True)
    data = LightningDataModule()
    for outer in (module, trainer, data):
        outer.held = Refusing()
    set_epoch(DataLoader(Holder([module, trainer, data, Module])), 0)
    set_epoch([module, trainer, data, Module], 0)
    set_epoch([DataLoader(NotCallable()), DataLoader(Answering())], 0)


class Processes(Dataset[int]):
    """Has the process that reads a sample."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return os.getpid()


class Curriculum(Sampler[int]):
    """Wraps a sampler, and keeps the epoch to itself."""

    def __init__(self, inner: DistributedSampler[int]) -> None:
        self.inner = inner
        self.level = 0

    def set_epoch(self, epoch: int) -> None:
        self.level = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)


def test_a_sampler_inside_one_that_lightning_sets_gets_the_epoch() -> None:
    """A user's sampler may not pass it on; the one outside keeps its own number."""
    inner = DistributedSampler(range(4), 2, 0)
    loader = DataLoader(range(4), sampler=Curriculum(inner))  # type: ignore[arg-type]
    set_epoch(loader, 3, except_for=samplers_set_by_lightning(loader))
    assert (loader.sampler.level, inner.epoch) == (0, 3)  # type: ignore[attr-defined]


def test_persistent_workers_stay_in_each_epoch() -> None:
    """They start again only if the epoch could change what they read."""
    loader = DataLoader(
        Processes(), num_workers=1, persistent_workers=True, multiprocessing_context="fork"
    )
    read = []
    for epoch in range(2):
        prepare_workers(loader, epoch, rank=0)
        read += [int(process) for process in loader]
    assert read == [read[0]] * 16
