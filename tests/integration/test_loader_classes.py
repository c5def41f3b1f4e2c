"""Loaders and batch samplers of the user's own classes are divided among ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from lightning_ddp_ext.errors import ConfigurationError
from tests.harness.training import Kind, on_both, on_ranks
from tests.integration.continuing import Numbers
from tests.integration.reading import Batches, read


class Scaled(DataLoader[Any]):
    """Keeps its argument under another name."""

    def __init__(self, dataset: Any, factor: int = 1, **options: Any) -> None:
        super().__init__(dataset, **options)
        self._by = factor

    def __iter__(self) -> Any:
        return (batch * self._by for batch in super().__iter__())


class Fixed(DataLoader[Any]):
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


class Drawn(BatchSampler):
    """Draws its batches in its constructor."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        super().__init__(sampler, batch_size, drop_last)
        self.batches = list(super().__iter__())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)


class DrawnPairs(Drawn):
    """Draws its batches in a constructor that takes other arguments."""

    def __init__(self, samples: int) -> None:
        super().__init__(SequentialSampler(range(samples)), 2, False)


class Known(DataLoader[Any]):
    """Reads an iterator that its constructor starts."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.reader = super().__iter__()

    def __iter__(self) -> Any:
        return self.reader


def batched(batch_sampler: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(8), batch_sampler=batch_sampler)


class Ordered(DataLoader[Any]):
    """Keeps its batch sampler under another name, and reads that."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.order = self.batch_sampler

    def __iter__(self) -> Any:
        for indices in self.order:
            yield self.collate_fn([self.dataset[index] for index in indices])


REMADE: dict[str, Callable[[], DataLoader[Any]]] = {
    "plain": lambda: DataLoader(Numbers(8), batch_size=2, shuffle=True),
    "drawn": lambda: batched(Drawn(RandomSampler(range(8)), 2, False)),
    "ordered": lambda: Ordered(Numbers(8), batch_size=2, shuffle=True),
    "begun": lambda: Known(Numbers(8), batch_size=2, shuffle=True),
}


def repeated() -> DataLoader[Any]:
    return batched(Repeated(RandomSampler(range(8)), 2, False, times=2))


def read_remade(kind: Kind, directory: Path) -> dict[str, Batches]:
    """Return the batches of loaders that exist before the run, and of one that is
    created in the module's hook, for one epoch.
    """
    found = {"repeated, in a hook": read(kind, directory, repeated, max_epochs=1)}
    for name, make in REMADE.items():
        exists = make()
        found[name] = read(kind, directory, lambda exists=exists: exists, max_epochs=1)
    return found


def test_loaders_whose_classes_can_be_created_again_read_what_they_read_with_stock(
    tmp_path: Path,
) -> None:
    """Lightning creates their batch samplers anew, with a sampler for the rank.

    It knows the arguments of those that are created in a hook.
    """
    ours, stock = on_both(read_remade, tmp_path)
    assert ours == stock


class Copied(NamedTuple):
    """A loader that stock refuses, or creates again with other arguments; and what it
    makes of a plain loader's batch.
    """

    make: Callable[[], DataLoader[Any]]
    change: Callable[[list[int]], list[int]] = list


COPIED = {
    "scaled": Copied(
        lambda: Scaled(Numbers(8), 10, batch_size=2, shuffle=True),
        lambda batch: [10 * sample for sample in batch],
    ),
    "fixed": Copied(lambda: Fixed(Numbers(8))),
    "explicit": Copied(lambda: batched(BatchSampler(RandomSampler(range(8)), 2, False))),
}


def read_copied(kind: Kind, directory: Path, name: str) -> list[Batches]:
    """Return the batches of a plain loader, of one that is created in the module's hook,
    and of one that exists before the run.
    """
    make = COPIED[name].make
    exists = make()
    ways = (REMADE["plain"], make, lambda: exists)
    return [read(kind, directory, way) for way in ways]


@pytest.mark.parametrize("name", COPIED)
def test_a_loader_whose_class_cannot_be_created_again_keeps_its_arguments(
    name: str, tmp_path: Path
) -> None:
    """Each rank reads its part through the user's loader and batch sampler."""
    for plain, made_in_hook, made_before in on_ranks("ours", read_copied, tmp_path, name):
        change = COPIED[name].change
        expected = {epoch: [change(batch) for batch in plain[epoch]] for epoch in plain}
        assert made_in_hook == expected
        assert made_before == expected


def refuse_batches(kind: Kind, directory: Path) -> list[str]:
    messages = []
    twice = Repeated(SequentialSampler(range(8)), 2, False, times=2)
    for batch_sampler in (DrawnPairs(8), twice, [[0, 1], [2, 3]]):
        made = batched(batch_sampler)
        with pytest.raises(ConfigurationError) as raised:
            read(kind, directory, lambda made=made: made)
        messages.append(str(raised.value))
    return messages


def test_batches_that_cannot_be_divided_are_refused_with_a_remedy(tmp_path: Path) -> None:
    """Every rank's error names the class and the remedies.

    The constructor takes other arguments, or another one that is unknown, or the
    batches are in a list.
    """
    for drawn, twice, listed in on_ranks("ours", refuse_batches, tmp_path):
        assert drawn.startswith("DrawnPairs over SequentialSampler takes no distributed sampler")
        assert twice.startswith(
            "batch_sampler Repeated must have no arguments besides torch's (got times), or be"
            " created in a hook such as train_dataloader"
        )
        assert listed.startswith("list takes no distributed sampler")
        for message in (drawn, twice, listed):
            assert "batch_sampler=DistributedBatchSamplerWrapper(...)" in message
            assert "Trainer(use_distributed_sampler=False)" in message
