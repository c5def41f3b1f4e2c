"""What the tests of samplers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Sized:
    """A dataset of which only the length is known."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


def dealt(make: Callable[[int, int], Any], world_size: int, epoch: int = 0) -> list[list[Any]]:
    """What each rank reads of an epoch from samplers that ``make(world_size, rank)`` makes."""
    samplers = [make(world_size, rank) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(sampler) for sampler in samplers]


def in_turn(parts: list[list[Any]]) -> list[Any]:
    """What ranks read, in the global order."""
    longest = max(map(len, parts))
    return [part[number] for number in range(longest) for part in parts if number < len(part)]


def take(sampler: Any, count: int) -> list[Any]:
    """The first ``count`` that a new iterator hands out."""
    iterator = iter(sampler)
    return [next(iterator) for _ in range(min(count, len(sampler)))]


def stop_and_go(make: Callable[[int, int], Any], before: int, after: int, consumed: int, epoch: int = 0) -> list[Any]:
    """All that is read when ``before`` ranks read ``consumed`` each, and ``after`` others go on from rank 0's state."""
    samplers = [make(before, rank) for rank in range(before)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    read = [each for sampler in samplers for each in take(sampler, consumed)]
    state = samplers[0].state_dict(consumed)
    for rank in range(after):
        sampler = make(after, rank)
        sampler.load_state_dict(state)
        read += list(sampler)
    return read
