"""Which objects below a loader are told the epoch, and which are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
)

from lightning_ddp_ext.data.epochs import all_below, has_set_epoch, set_epoch


def epoch_takers(loaders: object) -> list[object]:
    return [each for each in all_below(loaders) if has_set_epoch(each)]


class Taker:
    """Takes epochs, and remembers them; may hold anything."""

    def __init__(self, held: object = None) -> None:
        self._held = held
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


class MapDataset(Taker, Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class Stream(Taker, IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class TakingSampler(Taker, Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))

    def __len__(self) -> int:
        return 4


class Wrapper(Dataset[int]):
    """A dataset of the user's own, around anything, under a private name."""

    def __init__(self, held: object) -> None:
        self.__inner = held

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class Broken:
    """A loader whose properties all fail."""

    def __init__(self, inside: object) -> None:
        self.inside = inside

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))

    def _fail(self) -> object:
        raise RuntimeError("not ready")

    dataset = property(_fail)
    sampler = property(_fail)
    batch_sampler = property(_fail)
    iterables = property(_fail)
    set_epoch = property(_fail)
    shuffle = property(_fail)


class CountingList(list[Any]):
    """Counts how many of its elements were looked at."""

    looked_at = 0

    def __iter__(self) -> Iterator[Any]:
        for element in super().__iter__():
            self.looked_at += 1
            yield element


TAKER_IN = {
    "sampler": lambda taker: DataLoader(range(4), sampler=taker),
    "sampler of the batch sampler": lambda taker: DataLoader(range(4), batch_sampler=BatchSampler(taker, 2, False)),
    "batch sampler": lambda taker: DataLoader(range(4), batch_sampler=taker),
    "wrapped twice": lambda taker: DataLoader(
        range(4), batch_sampler=BatchSampler(BatchSampler(taker, 2, False), 2, False)
    ),
    "dataset": lambda taker: DataLoader(taker),
    "subset": lambda taker: DataLoader(Subset(Subset(taker, range(3)), range(2))),
    "wrapper": lambda taker: DataLoader(Wrapper(Wrapper(taker))),
    "dict of lists in a wrapper": lambda taker: DataLoader(Wrapper({"name": "a", "parts": [1, (None, taker)]})),
    "list": lambda taker: [DataLoader(range(4)), DataLoader(taker)],
    "nested": lambda taker: {"a": [DataLoader(range(4)), (DataLoader(taker),)]},
    "combined": lambda taker: CombinedLoader({"a": DataLoader(range(4)), "b": [DataLoader(taker)]}),
    "chain of datasets": lambda taker: DataLoader(ConcatDataset([MapDataset(), taker])),
    "loader of which all else fails": lambda taker: Broken(taker),
    "the loader itself": lambda taker: taker,
    "no dataset at all": lambda taker: DataLoader(Wrapper(Taker(taker))),
}


@pytest.mark.parametrize("place", TAKER_IN)
def test_what_takes_epochs_is_found_wherever_it_is(place: str) -> None:
    """An object with set_epoch gets the epoch exactly once, wherever below the loaders it is."""
    taker = TakingSampler()
    set_epoch(TAKER_IN[place](taker), 7)
    assert taker.epochs == [7]


def test_many_concatenated_datasets_are_all_told() -> None:
    """A long list is followed to its end if its first element is a dataset."""
    parts = [MapDataset() for _ in range(100)]
    assert len(epoch_takers(DataLoader(ConcatDataset(parts)))) == 100


def test_inside_of_takers_is_told_too_and_first() -> None:
    """What a taker holds gets the epoch before the taker does, also where it is reached in another way before."""
    inner = TakingSampler()
    middle = MapDataset(inner)
    outer = MapDataset([inner, middle])
    assert epoch_takers([inner, DataLoader(outer)]) == [inner, middle, outer]
    assert epoch_takers([DataLoader(outer), inner]) == [inner, middle, outer]


def test_long_chains_of_wrappers_are_followed() -> None:
    """Wrappers may be nested deeper than Python's recursion goes."""
    taker = MapDataset()
    dataset: Dataset[int] = taker
    for _ in range(3000):
        dataset = Wrapper(dataset)
    assert epoch_takers(DataLoader(dataset)) == [taker]


def test_modules_and_trainers_are_not_followed() -> None:
    """Modules and trainers that a dataset holds are told nothing, nor is anything below them."""

    class Module(Taker, LightningModule):
        def __init__(self, held: object) -> None:
            LightningModule.__init__(self)
            Taker.__init__(self, held)

    beyond = MapDataset()
    trainer, data = Trainer(barebones=True), LightningDataModule()
    trainer.held = data.held = beyond
    strangers = [Module(beyond), trainer, data, Module]
    assert epoch_takers(DataLoader(Wrapper(strangers))) == []
    assert epoch_takers(strangers) == []
    assert epoch_takers(strangers[0]) == []


def test_what_only_promises_set_epoch_is_not_asked() -> None:
    """An object that answers to any name, and one whose set_epoch is no function, are not among the takers."""

    class Anything(Dataset[int]):
        set_epoch = None

    class Answering(Dataset[int]):
        def __getattr__(self, name: str) -> object:
            return lambda *_: pytest.fail("was asked")

    set_epoch([DataLoader(Anything()), DataLoader(Answering())], 0)


def test_data_is_not_walked_through() -> None:
    """Of lists of a million values and of big object graphs in a dataset, next to nothing is looked at."""
    numbers = CountingList([0] * 1_000_000)
    records = CountingList({"image": [index], "box": (1, 2)} for index in range(100_000))
    lists = CountingList([numbers] * 1000)
    module = torch.nn.Sequential(torch.nn.Linear(1, 1))
    module.inside = CountingList([MapDataset()])
    taker = MapDataset([numbers, {"records": records}, lists, module, torch.zeros(9)])
    assert epoch_takers(DataLoader(taker)) == [taker]
    assert 0 < numbers.looked_at + records.looked_at + lists.looked_at <= 10
    assert module.inside.looked_at == 0
