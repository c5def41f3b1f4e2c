"""End an iterator on all ranks together, when the first, or when the last of them has no more batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Literal, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

Mode = Literal["stop_at_shortest", "join"]


def end_together(
    items: Iterator[T],
    mode: Mode,
    group: dist.ProcessGroup | None = None,
    *,
    on_item: Callable[[list[int]], object] = lambda idle_ranks: None,
    on_last: Callable[[], object] = lambda: None,
) -> Iterator[T]:
    """Yield equally many items on all ranks: as many as the shortest iterator has, or with ``"join"`` the longest.

    One item is drawn ahead. Before each item the ranks exchange which of them have another one. With
    ``"stop_at_shortest"`` it is dropped if some rank does not. With ``"join"`` a rank that has no more items repeats
    its last one; if its iterator was empty, it gets one from another rank, pickled.

    Collective: every rank must draw equally many items. A rank whose iterator raises leaves the others waiting in a
    collective, until this rank's failure releases them.

    Args:
        items: this rank's own iterator; not used after its end.
        mode: when to end.
        group: all ranks, with a backend that reduces CPU tensors; ``None`` for the default group.
        on_item: called before each item is yielded, with the ranks that repeat one, ascending.
        on_last: called before the last item is yielded.

    Example, on one rank of one:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> list(end_together(iter("abc"), "join"))
        ['a', 'b', 'c']
        >>> dist.destroy_process_group()
    """
    needed = any if mode == "join" else all
    current: list[T] = []
    ahead = list(islice(items, 1))
    found = _found_by_rank(ahead, current, group)
    while needed(state == _HAS_NEXT for state in found):
        current = ahead or current
        if _HAS_NOTHING in found:
            lent = [current[0] if current else None]
            dist.broadcast_object_list(lent, src=found.index(_HAS_NEXT), group=group)
            current = current or lent  # type: ignore[assignment]
        idle_ranks = [rank for rank, state in enumerate(found) if state != _HAS_NEXT]
        ahead = list(islice(items, 1)) if ahead else []
        found = _found_by_rank(ahead, current, group)
        if not needed(state == _HAS_NEXT for state in found):
            on_last()
        on_item(idle_ranks)
        # An item that is repeated is copied, because a step may change its batch.
        yield copy.deepcopy(current[0]) if mode == "join" and not ahead else current[0]


_HAS_NOTHING, _CAN_REPEAT, _HAS_NEXT = range(3)


def _found_by_rank(ahead: list[T], current: list[T], group: dist.ProcessGroup | None) -> list[int]:
    """Return by rank whether it has another item, can repeat one, or has never had any. Collective."""
    states = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
    states[dist.get_rank(group)] = _HAS_NEXT if ahead else _CAN_REPEAT if current else _HAS_NOTHING
    dist.all_reduce(states, group=group)
    return states.tolist()
