"""End an iterator on all ranks together, when the first of them has no more batches, or when the last one has none."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


def until_shortest(
    items: Iterator[T], group: dist.ProcessGroup | None = None, *, on_last: Callable[[], object] = lambda: None
) -> Iterator[T]:
    """Yield equally many items on all ranks: as many as the shortest iterator has.

    One item is drawn ahead, and given up if some rank has none. Before each item the ranks find out whether all of them
    have another one.

    Collective: every rank must ask for items equally often. A rank whose iterator raises leaves the others waiting in a
    collective, from which the failure of a rank releases them.

    Args:
        items: this rank's own iterator; not asked again after the end.
        group: all ranks, with a backend that reduces CPU tensors; ``None`` for the default group.
        on_last: called before the last item is yielded.

    Example, on one rank of one:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> list(until_shortest(iter("abc")))
        ['a', 'b', 'c']
        >>> dist.destroy_process_group()
    """
    ahead = list(islice(items, 1))
    found = _found_by_rank(ahead, [], group)
    while min(found) == _HAS_NEXT:
        item = ahead[0]
        ahead = list(islice(items, 1))
        found = _found_by_rank(ahead, [], group)
        if min(found) != _HAS_NEXT:
            on_last()
        yield item


def until_longest(
    items: Iterator[T],
    group: dist.ProcessGroup | None = None,
    *,
    on_item: Callable[[list[int]], object] = lambda idle_ranks: None,
    on_last: Callable[[], object] = lambda: None,
) -> Iterator[T]:
    """Yield equally many items on all ranks: as many as the longest iterator has.

    A rank that has no more items repeats its last one. If it has had none, it gets one from another rank, pickled. One
    item is drawn ahead, and the ranks find out before each item which of them have another one.

    Collective, as :func:`until_shortest`.

    Args:
        items: this rank's own iterator; not asked again after the end.
        group: as in :func:`until_shortest`.
        on_item: called before each item is yielded, with the ranks that repeat one, ascending.
        on_last: called before the last item is yielded.

    Example, on one rank of one:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> list(until_longest(iter("abc")))
        ['a', 'b', 'c']
        >>> dist.destroy_process_group()
    """
    current: list[T] = []
    ahead = list(islice(items, 1))
    found = _found_by_rank(ahead, current, group)
    while _HAS_NEXT in found:
        current = ahead or current
        if _HAS_NOTHING in found:
            lent = [current[0] if current else None]
            dist.broadcast_object_list(lent, src=found.index(_HAS_NEXT), group=group)
            current = current or lent  # type: ignore[assignment]
        idle_ranks = [rank for rank, state in enumerate(found) if state != _HAS_NEXT]
        ahead = list(islice(items, 1)) if ahead else []
        found = _found_by_rank(ahead, current, group)
        if _HAS_NEXT not in found:
            on_last()
        on_item(idle_ranks)
        # What is to be repeated is copied, because a step may change its batch.
        yield current[0] if ahead else copy.deepcopy(current[0])


_HAS_NOTHING, _CAN_REPEAT, _HAS_NEXT = range(3)


def _found_by_rank(ahead: list[T], current: list[T], group: dist.ProcessGroup | None) -> list[int]:
    """Return by rank whether it has another item, can repeat one, or has never had any. Collective."""
    states = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    states[dist.get_rank(group)] = _HAS_NEXT if ahead else _CAN_REPEAT if current else _HAS_NOTHING
    dist.all_reduce(states, group=group)
    return states.tolist()
