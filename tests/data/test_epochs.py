"""Which objects below a loader get no epoch."""

import pytest
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_ddp_ext.data.epochs import set_epoch


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
