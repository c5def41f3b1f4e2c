"""Loaders and batch samplers of the user's own classes are divided among ranks."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from lightning_ddp_ext.errors import ConfigurationError
from tests.harness.training import Kind, on_both, on_ranks
from tests.integration.continuing import Batches, Numbers, read


def batched(batch_sampler: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(8), batch_sampler=batch_sampler)


class Scaled(DataLoader[Any]):
    """Keeps its argument under another name."""

    def __init__(self, dataset: Any, factor: int = 1, **options: Any) -> None:
        super().__init__(dataset, **options)
        self._by = factor

    def __iter__(self) -> Any:
        return (batch * self._by for batch in super().__iter__())


class FixedOptions(DataLoader[Any]):
    """Chooses all of torch's options itself."""

    def __init__(self, dataset: Any) -> None:
        super().__init__(dataset, batch_size=2, shuffle=True)


class Repeated(BatchSampler):
    """Takes one more argument than torch's batch sampler."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool, times: int = 1) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.times = times

    def __iter__(self) -> Iterator[list[int]]:
        return (batch * self.times for batch in super().__iter__())


class DrawsInConstructor(BatchSampler):
    """Draws its batches in its constructor."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.batches = list(super().__iter__())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class DrawnPairs(DrawsInConstructor):
    """Draws its batches in a constructor that takes other arguments."""

    def __init__(self, samples: int) -> None:
        super().__init__(SequentialSampler(range(samples)), 2, False)


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
    "draws in constructor": lambda: batched(DrawsInConstructor(RandomSampler(range(8)), 2, False)),
    "reads own batch sampler": lambda: ReadsOwnBatchSampler(Numbers(8), batch_size=2, shuffle=True),
    "iterator in constructor": lambda: IteratorInConstructor(
        Numbers(8), batch_size=2, shuffle=True
    ),
}


def repeated() -> DataLoader[Any]:
    return batched(Repeated(RandomSampler(range(8)), 2, False, times=2))


def given(loader: DataLoader[Any]) -> Callable[[], DataLoader[Any]]:
    """Return a ``train_dataloader`` that returns a loader from before the run."""
    return lambda: loader


def read_created_again(kind: Kind, directory: Path) -> dict[str, Batches]:
    """Return one epoch of loaders from before the run, and of one from a hook."""
    batches = {
        name: read(kind, directory, given(make()), max_epochs=1)
        for name, make in CREATED_AGAIN.items()
    }
    batches["repeated, in a hook"] = read(kind, directory, repeated, max_epochs=1)
    return batches


def test_batch_samplers_that_can_be_created_again_are_as_with_stock(tmp_path: Path) -> None:
    """Lightning creates them anew, with a sampler for the rank.

    It knows the arguments of those that are created in a hook.
    """
    ours, stock = on_both(read_created_again, tmp_path)
    assert ours == stock


class Copied(NamedTuple):
    """A loader that stock refuses, or creates again with other arguments.

    Attributes:
        change: returns what the loader makes of a plain loader's batch.
    """

    make: Callable[[], DataLoader[Any]]
    change: Callable[[list[int]], list[int]] = list


COPIED = {
    "scaled": Copied(
        lambda: Scaled(Numbers(8), 10, batch_size=2, shuffle=True),
        lambda batch: [10 * sample for sample in batch],
    ),
    "fixed options": Copied(lambda: FixedOptions(Numbers(8))),
    "explicit": Copied(lambda: batched(BatchSampler(RandomSampler(range(8)), 2, False))),
}


def read_copied(kind: Kind, directory: Path, name: str) -> list[Batches]:
    """Return the batches of a plain loader, and of a user's from a hook and from before."""
    make = COPIED[name].make
    loaders = [CREATED_AGAIN["plain"], make, given(make())]
    return [read(kind, directory, each) for each in loaders]


@pytest.mark.parametrize("name", COPIED)
def test_a_loader_whose_class_cannot_be_created_again_keeps_its_arguments(
    name: str, tmp_path: Path
) -> None:
    """Each rank reads its part through the user's loader and batch sampler."""
    change = COPIED[name].change
    for plain, from_hook, from_before in on_ranks("ours", read_copied, tmp_path, name):
        expected = {epoch: list(map(change, batches)) for epoch, batches in plain.items()}
        assert from_hook == expected
        assert from_before == expected


def refuse_batches(kind: Kind, directory: Path, batch_sampler: Any) -> str:
    """Return the error of a run on batches that exist before it."""
    with pytest.raises(ConfigurationError) as raised:
        read(kind, directory, given(batched(batch_sampler)))
    return str(raised.value)


@pytest.mark.parametrize(
    ("batch_sampler", "beginning"),
    [
        pytest.param(
            DrawnPairs(8),
            "DrawnPairs over SequentialSampler takes no distributed sampler",
            id="other arguments",
        ),
        pytest.param(
            Repeated(SequentialSampler(range(8)), 2, False, times=2),
            "batch_sampler Repeated must have no arguments besides torch's (got times), or be"
            " created in a hook such as train_dataloader",
            id="an unknown argument",
        ),
        pytest.param([[0, 1], [2, 3]], "list takes no distributed sampler", id="a list"),
    ],
)
def test_batches_that_cannot_be_divided_are_refused_with_a_remedy(
    batch_sampler: Any, beginning: str, tmp_path: Path
) -> None:
    """Every rank's error names the class and the remedies."""
    for message in on_ranks("ours", refuse_batches, tmp_path, batch_sampler):
        assert message.startswith(beginning)
        assert "batch_sampler=DistributedBatchSamplerWrapper(...)" in message
        assert "Trainer(use_distributed_sampler=False)" in message
