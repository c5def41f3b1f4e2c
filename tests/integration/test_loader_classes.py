"""Loaders and batch samplers of the user's own classes are divided among ranks."""

import os
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler

from tests.harness.training import Kind, on_both, on_ranks
from tests.integration.continuing import Batches, Numbers, read


def batched(batch_sampler: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(8), batch_sampler=batch_sampler)


class FixedOptions(DataLoader[Any]):
    """Chooses all of torch's options itself."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, batch_size=2, shuffle=True)


class Pairs(BatchSampler):
    """Takes other arguments than torch's batch sampler, and draws batches of pairs."""

    def __init__(self, samples: int, *, by: int) -> None:
        super().__init__(RandomSampler(range(samples // by)), 1, drop_last=False)
        self.by = by

    def __iter__(self) -> Iterator[list[int]]:
        return ([by * self.by, by * self.by + 1] for [by] in super().__iter__())


class Batched(BatchSampler):
    """A subclass of torch's batch sampler that changes nothing."""


class Unsized:
    """Batches of a rank, of which there is no number."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[self.rank], [self.rank + 2]])


class IteratorInConstructor(DataLoader[Any]):
    """Reads an iterator that its constructor starts."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.reader = super().__iter__()

    def __iter__(self) -> Any:
        return self.reader


class ReadsOwnBatchSampler(DataLoader[Any]):
    """Keeps its batch sampler under another name, and reads that."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.order = self.batch_sampler

    def __iter__(self) -> Any:
        for indices in self.order:
            yield self.collate_fn([self.dataset[index] for index in indices])


CREATED_AGAIN: dict[str, Callable[[], DataLoader[Any]]] = {
    "plain": lambda: DataLoader(Numbers(8), batch_size=2, shuffle=True),
    "reads own batch sampler": lambda: ReadsOwnBatchSampler(Numbers(8), batch_size=2, shuffle=True),
    "iterator in constructor": lambda: IteratorInConstructor(
        Numbers(8), batch_size=2, shuffle=True
    ),
}


def given(loader: DataLoader[Any]) -> Callable[[], DataLoader[Any]]:
    """Return a ``train_dataloader`` that returns a loader from before the run."""
    return lambda: loader


def read_created_again(kind: Kind, directory: Path) -> dict[str, Batches]:
    """Return one epoch of loaders from before the run."""
    return {
        name: read(kind, directory, given(make()), max_epochs=1)
        for name, make in CREATED_AGAIN.items()
    }


def test_loaders_that_can_be_created_again_are_as_with_stock(tmp_path: Path) -> None:
    """Lightning creates them anew, with a sampler for the rank."""
    ours, stock = on_both(read_created_again, tmp_path)
    assert ours == stock


# Loaders that stock refuses, or creates again with other arguments.
COPIED: dict[str, Callable[[], DataLoader[Any]]] = {
    "fixed options": lambda: FixedOptions(Numbers(8)),
    "explicit": lambda: batched(BatchSampler(RandomSampler(range(8)), 2, False)),
}


def read_copied(kind: Kind, directory: Path, name: str) -> list[Batches]:
    """Return the batches of a plain loader, and of a user's from a hook and from before."""
    make = COPIED[name]
    loaders = [CREATED_AGAIN["plain"], make, given(make())]
    return [read(kind, directory, each) for each in loaders]


@pytest.mark.parametrize("name", COPIED)
def test_a_loader_whose_class_cannot_be_created_again_keeps_its_arguments(
    name: str, tmp_path: Path
) -> None:
    """Each rank reads its part through the user's loader and batch sampler."""
    for plain, from_hook, from_before in on_ranks("ours", read_copied, tmp_path, name):
        assert from_hook == plain
        assert from_before == plain


BATCHES: dict[str, Callable[[], Any]] = {
    "other arguments": lambda: Pairs(10, by=2),
    "a list": lambda: [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]],
    "torch's subclass": lambda: Batched(RandomSampler(range(10)), 2, drop_last=False),
}


def read_batches(kind: Kind, directory: Path, name: str) -> list[Batches]:
    """Return the batches of a loader from a hook, and of one from before the run."""
    torch.manual_seed(int(os.environ["RANK"]))
    loader = DataLoader(Numbers(10), batch_sampler=BATCHES[name]())
    return [read(kind, directory, make) for make in (lambda: loader, given(loader))]


@pytest.mark.parametrize("name", BATCHES)
def test_ranks_divide_the_users_batches(name: str, tmp_path: Path) -> None:
    """In each epoch, the ranks together read one draw, and repeat its first batch to have
    equally many, which are as many as with stock.
    """
    by_rank = on_ranks("ours", read_batches, tmp_path, name)
    for first, second in zip(*by_rank, strict=True):
        for epoch in (0, 1):
            own, others = first[epoch], second[epoch]
            assert len(own) == len(others) == 3
            assert others[-1] == own[0]
            assert sorted(chain(*own, *others[:-1])) == [*range(10)]
        is_drawn = name != "a list"
        assert (first[0] != first[1]) == is_drawn


def read_whole(kind: Kind, directory: Path) -> list[int]:
    """Return the numbers of batches of loaders whose batches are whole."""
    samples = (9, 10, 12, 16)
    loaders = [
        DataLoader(Numbers(each), batch_sampler=Batched(range(each), 2, drop_last=True))
        for each in samples
    ]
    return [len(read(kind, directory, given(each), max_epochs=1)[0]) for each in loaders]


def test_ranks_have_stocks_number_of_whole_batches(tmp_path: Path) -> None:
    """With ``drop_last=True``, batches that not every rank has are left out."""
    ours, stock = on_both(read_whole, tmp_path)
    assert ours == stock


def read_divided(kind: Kind, directory: Path) -> Batches:
    """Return the batches of a batch sampler whose sampler divides the samples."""
    own = DistributedSampler(range(8), 2, int(os.environ["RANK"]), shuffle=False)
    loader = DataLoader(Numbers(8), batch_sampler=Batched(own, 2, drop_last=False))
    return read(kind, directory, given(loader))


def test_batches_of_a_distributed_sampler_are_stocks(tmp_path: Path) -> None:
    """They are not divided a second time."""
    ours, stock = on_both(read_divided, tmp_path)
    assert ours == stock


def refuse_unsized(kind: Kind, directory: Path) -> str:
    """Return the error of a run on batches without a number."""
    loader = DataLoader(Numbers(8), batch_sampler=Unsized(int(os.environ["RANK"])))
    with pytest.raises(TypeError) as raised:
        read(kind, directory, given(loader))
    return str(raised.value)


def test_batches_without_a_number_are_refused_as_with_stock(tmp_path: Path) -> None:
    """The error is Lightning's, which names ``use_distributed_sampler``."""
    ours, stock = on_both(refuse_unsized, tmp_path)
    assert ours == stock
    assert "Trainer(use_distributed_sampler=False)" in ours[0]
