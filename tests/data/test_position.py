"""A loader that is entered where another run left it gives the batches that the other run would have read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext.data.epochs import set_epoch
from lightning_ddp_ext.data.loader import own_copy
from lightning_ddp_ext.data.loader_kinds import position_of
from lightning_ddp_ext.data.position import LoaderPosition
from lightning_ddp_ext.data.samplers import ScalableDistributedSampler


class Reversing(DataLoader[Any]):
    """Iterates in its own way, and so may not read what its sampler says."""

    def __iter__(self) -> Any:
        return iter([*super().__iter__()][::-1])


# (samples, batch size, ranks, rank) to a loader.
LOADERS: dict[str, Callable[[int, int, int, int], Any]] = {
    "a sampler of ours": lambda n, b, w, r: DataLoader(
        range(n), b, sampler=ScalableDistributedSampler(range(n), w, r, uneven="exact")
    ),
    "drawn": lambda n, b, w, r: DataLoader(range(n), b, shuffle=True),
    "a list": lambda n, b, w, r: [*torch.arange(r, n + r).split(b)],
    "own iteration": lambda n, b, w, r: Reversing(range(n), b, shuffle=True),
    "torchdata's": lambda n, b, w, r: StatefulDataLoader(range(n), b, shuffle=True),
}


def begin(loader: Any, world_size: int, state: Any = None, done: int = 0) -> tuple[LoaderPosition, Iterator[Any]]:
    """Begin the second epoch, or go on in it."""
    position = position_of(own_copy(loader), world_size=world_size, remembered=5)
    set_epoch(position.loader, 1)
    position.start_epoch(1, done=done, state=state)
    return position, position.give(position.start_iterator())


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    kind=st.sampled_from([*LOADERS]),
    world_size=st.integers(1, 4),
    batch_size=st.integers(1, 4),
    done=st.integers(1, 4),
    ahead=st.integers(0, 2),
    more=st.integers(0, 16),
)
def test_what_is_left_is_read(kind: str, world_size: int, batch_size: int, done: int, ahead: int, more: int) -> None:
    """Also where batches were drawn ahead; and what a state does not say of one rank alone is the same on all ranks."""
    length = world_size * batch_size * done + more
    states = []
    for rank in range(world_size):
        torch.manual_seed(rank)
        position, batches = begin(LOADERS[kind](length, batch_size, world_size, rank), world_size)
        drawn = list(islice(batches, done + ahead))
        state = position.state_dict(done)
        torch.manual_seed(1000 + rank)
        _, resumed = begin(LOADERS[kind](length, batch_size, world_size, rank), world_size, state, done)
        assert repr([*resumed]) == repr([*drawn[done:], *batches])
        states.append({**state, "random": None, "own": None})
    assert states == states[:1] * world_size
