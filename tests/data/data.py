"""What the tests of samplers share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any


class Sized:
    """A dataset of which only the length is known."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


Make = Callable[[int, int], Any]  # (ranks, rank) to a sampler


def dealt(make: Make, world_size: int, epoch: int = 0) -> list[list[Any]]:
    """What each rank reads of an epoch."""
    samplers = [make(world_size, rank) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


def in_turn(parts: list[list[Any]]) -> list[Any]:
    """What ranks read, in the global order."""
    longest = max(map(len, parts))
    return [part[number] for number in range(longest) for part in parts if number < len(part)]


def with_stops(make: Make, stops: list[tuple[int, int]], last: int, epoch: int = 0) -> list[Any]:
    """All that is read where so many ranks read so many items each, one after another, and ``last`` ranks the rest."""
    read: list[Any] = []
    state: Any = None
    for world_size, consumed in [*stops, (last, None)]:
        samplers = [make(world_size, rank) for rank in range(world_size)]
        for sampler in samplers:
            sampler.set_epoch(epoch)
            if state is not None:
                sampler.load_state_dict(state)
            read += islice(sampler, consumed)
        states = [sampler.state_dict(consumed or 0) for sampler in samplers]
        state = states[0]
        assert states == [state] * world_size
    return read


def assert_read_once(read: list[Any], order: list[Any], uneven: str, most_ranks: int) -> None:
    """Each item of the order was read once; "pad" repeats, and "drop" leaves out at the end, less than a round."""
    counted, expected = Counter(map(str, read)), Counter(map(str, order))
    if uneven == "exact":
        assert counted == expected
    elif uneven == "pad":
        assert set(counted) == set(expected)
        assert len(read) < len(order) + most_ranks
    else:
        assert counted == Counter(map(str, order[: len(read)]))
        assert len(read) > len(order) - most_ranks
