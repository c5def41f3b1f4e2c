"""A training loader continues at its place, which can be saved again before it is read."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext.data.position import Position, position_of
from lightning_ddp_ext.data.samplers import TorchOrderSampler

SAMPLES = range(12)
LOADERS: dict[str, Callable[[], Any]] = {
    "our sampler": lambda: DataLoader(SAMPLES, 2, sampler=TorchOrderSampler(SAMPLES, 1, 0)),
    "another sampler": lambda: DataLoader(SAMPLES, 2, shuffle=True),
    "a state": lambda: StatefulDataLoader(SAMPLES, 2),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_place_can_be_saved_again_before_the_first_batch(name: str) -> None:
    """The next run then continues there as well."""
    first = position_of(LOADERS[name](), read_ahead=0)
    first.start_epoch(1)
    batches = first.iterate()
    list(islice(batches, 2))
    place = first.state_after(2)
    rest = [batch.tolist() for batch in batches]
    second = position_of(LOADERS[name](), read_ahead=0)
    continue_at(second, place, first.checksum)
    third = position_of(LOADERS[name](), read_ahead=0)
    continue_at(third, second.state_after(2), second.checksum)
    assert [batch.tolist() for batch in third.iterate()] == rest


def continue_at(position: Position, place: dict[str, Any], checksum: int) -> None:
    """Continue after two batches of epoch 1."""
    assert position.continue_epoch(1, place, [checksum]) is None
    position.done = 2
