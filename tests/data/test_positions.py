"""A training loader continues at its place, which can be saved again before it is read."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext.data.loader import TrainingLoader
from lightning_ddp_ext.data.position import OrderOfRank
from lightning_ddp_ext.data.random_state import keys_of
from lightning_ddp_ext.data.samplers import TorchOrderSampler

SAMPLES = range(12)
LOADERS: dict[str, Callable[[], Any]] = {
    "our sampler": lambda: DataLoader(SAMPLES, 2, sampler=TorchOrderSampler(SAMPLES, 1, 0)),
    "another sampler": lambda: DataLoader(SAMPLES, 2, shuffle=True),
    "a state": lambda: StatefulDataLoader(SAMPLES, 2),
}


def training_loader(make: Callable[[], Any]) -> TrainingLoader:
    loader = TrainingLoader(make(), lambda loader, iterator: iter(()))
    loader.make_position(OrderOfRank(1, keys_of(), rank=0, world_size=1, loader=0), 0)
    return loader


@pytest.mark.parametrize("name", LOADERS)
def test_a_place_can_be_saved_again_before_the_first_batch(name: str) -> None:
    """The next run then continues there as well."""
    first = training_loader(LOADERS[name])
    first.start_epoch(1)
    batches = first.iterate()
    list(islice(batches, 2))
    state = first.state_after(2)
    rest = [batch.tolist() for batch in batches]
    second = training_loader(LOADERS[name])
    assert second.continue_epoch(1, state, 2) is None
    third = training_loader(LOADERS[name])
    assert third.continue_epoch(1, second.state_after(2), 2) is None
    assert [batch.tolist() for batch in third.iterate()] == rest
