"""A training loader continues at its place, which can be saved again before it is read."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any
from weakref import WeakSet

import pytest
from torch.utils.data import DataLoader, Dataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext.data.loader import TrainingLoader
from lightning_ddp_ext.data.position import OrderOfRank
from lightning_ddp_ext.data.samplers import TorchOrderSampler

SAMPLES = range(12)
LOADERS: dict[str, Callable[[], Any]] = {
    "our sampler": lambda: DataLoader(SAMPLES, 2, sampler=TorchOrderSampler(SAMPLES, 1, 0)),
    "another sampler": lambda: DataLoader(SAMPLES, 2, shuffle=True),
    "a state": lambda: StatefulDataLoader(SAMPLES, 2),
}


def training_loader(make: Callable[[], Any]) -> TrainingLoader:
    loader = TrainingLoader(make(), lambda loader, iterator: iter(()))
    loader.make_position(read_ahead=0)
    loader.position.ranks = OrderOfRank(1, [], rank=0, world_size=1, loader=0)
    return loader


@pytest.mark.parametrize("name", LOADERS)
def test_a_place_can_be_saved_again_before_the_first_batch(name: str) -> None:
    """The next run then continues there as well."""
    first = training_loader(LOADERS[name])
    first.start_epoch(1)
    batches = first.iterate()
    list(islice(batches, 2))
    place = first.state_after(2)
    rest = [batch.tolist() for batch in batches]
    second = training_loader(LOADERS[name])
    continue_at(second, place, first.position.checksum)
    third = training_loader(LOADERS[name])
    continue_at(third, second.state_after(2), second.position.checksum)
    assert [batch.tolist() for batch in third.iterate()] == rest


def continue_at(loader: TrainingLoader, place: dict[str, Any], checksum: int | None) -> None:
    """Continue after two batches of epoch 1."""
    assert loader.continue_epoch(1, place, [checksum]) is None
    loader.done = 2


@dataclass(eq=False)
class Key:
    """The key of a sample, which is counted while it is in memory."""

    number: int

    def __post_init__(self) -> None:
        IN_MEMORY.add(self)


IN_MEMORY = WeakSet[Key]()


class ByKey(Dataset[int]):
    def __getitem__(self, key: Key) -> int:
        return key.number


class Keys:
    """A sampler without a length."""

    def __iter__(self) -> Iterator[Key]:
        return map(Key, range(4000))


def test_a_resumed_run_keeps_no_part_of_the_order_that_is_read() -> None:
    """It draws the order of the epoch again, but keeps only the rest of it."""

    def load() -> DataLoader[int]:
        return DataLoader(ByKey(), 2, sampler=Keys())

    first = training_loader(load)
    first.start_epoch(1)
    read = len(list(islice(first.iterate(), 1500)))
    place = first.state_after(read)
    second = training_loader(load)
    continue_at(second, place, first.position.checksum)
    gc.collect()
    batches = second.iterate()
    assert next(batches).tolist() == [3000, 3001]
    assert len(IN_MEMORY) < 500
