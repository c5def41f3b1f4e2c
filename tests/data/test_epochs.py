"""Objects below a loader that get no epoch, and what a loader's workers keep of their
start.
"""

from __future__ import annotations

import os

import pytest
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_ddp_ext.data.epochs import set_epoch, start_epoch


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
    """Modules, Trainers and objects inside them get none, nor do objects that only
    claim to have such a method.
    """
    module = Module()
    trainer = Trainer(barebones=True)
    data = LightningDataModule()
    for outer in (module, trainer, data):
        outer.held = Refusing()
    set_epoch(DataLoader(Holder([module, trainer, data, Module])), 0)
    set_epoch([module, trainer, data, Module], 0)
    set_epoch([DataLoader(NotCallable()), DataLoader(Answering())], 0)


class Reader(Dataset[tuple[int, str | None]]):
    """Each sample has the process that read it, and a variable of that process."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, str | None]:
        return os.getpid(), os.environ.get("STARTED")


def test_workers_start_as_the_user_chose() -> None:
    """A worker_init_fn of the user's still runs, and persistent workers stay where
    nothing takes epochs.
    """
    loader = DataLoader(
        Reader(),
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context="fork",
        worker_init_fn=lambda worker: os.environ.update(STARTED="yes"),
        collate_fn=list,
    )
    samples = []
    for epoch in range(2):
        start_epoch(loader, epoch, rank=0)
        samples += [sample for batch in loader for sample in batch]
    assert len(samples) == 2 * 8
    assert len({process for process, _ in samples}) == 1
    assert {started for _, started in samples} == {"yes"}
