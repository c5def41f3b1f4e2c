"""End an iterator on all ranks together, when the first or the last rank runs out of batches."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Generic, Literal, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
AHEAD = 2  # items that each rank draws ahead

Mode = Literal["stop_at_shortest", "join"]


def end_together(
    items: Iterator[T],
    mode: Mode,
    group: dist.ProcessGroup | None = None,
    *,
    on_item: Callable[[list[int]], object] = lambda idle_ranks: None,
    on_last: Callable[[], object] = lambda: None,
) -> Iterator[T]:
    """Yield the same number of items on all ranks: that of the shortest iterator, or of the longest with ``"join"``.

    ``AHEAD`` items are drawn ahead. For each item, the ranks tell each other whether they have one, and the answers
    arrive while an earlier item is in use. With ``"stop_at_shortest"`` an item is dropped if some rank has none. With
    ``"join"`` a rank that has no more items repeats its last one; if its iterator was empty, another rank sends it a
    pickled item.

    Collective: every rank must take the same number of items from the returned iterator. If a rank's iterator raises,
    the other ranks wait in a collective until that rank's failure is detected.

    Args:
        items: this rank's own iterator, which is not read after its end.
        mode: when to end.
        group: a group of all ranks whose backend reduces CPU tensors; ``None`` for the default group.
        on_item: called before each item is yielded, with the ranks that repeat an item, in ascending order.
        on_last: called before the last item is yielded.

    Example with a single rank:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> list(end_together(iter("abc"), "join"))
        ['a', 'b', 'c']
        >>> dist.destroy_process_group()
    """
    needed = any if mode == "join" else all
    ahead = deque[_Drawn[T]]()

    def draw() -> None:
        is_over = bool(ahead) and not ahead[-1].item
        ahead.append(_Drawn(iter(()) if is_over else items, group))

    for _ in range(AHEAD):
        draw()
    has_item = ahead[0].by_rank()
    current: list[T] = []
    if needed(has_item) and not all(has_item):  # an iterator was empty
        current = [ahead[0].item[0] if ahead[0].item else None]  # type: ignore[list-item]
        dist.broadcast_object_list(current, src=has_item.index(True), group=group)
    while needed(has_item):
        current = ahead.popleft().item or current
        idle_ranks = [rank for rank, has in enumerate(has_item) if not has]
        has_item = ahead[0].by_rank()
        if needed(has_item):
            draw()
        else:
            on_last()
        on_item(idle_ranks)
        # A step may change its batch, so an item that will be repeated is copied.
        yield copy.deepcopy(current[0]) if mode == "join" and not ahead[0].item else current[0]


class _Drawn(Generic[T]):
    """The next item of an iterator, if any, and the ranks that have one. Collective, but does not wait."""

    def __init__(self, items: Iterator[T], group: dist.ProcessGroup | None) -> None:
        self.item = list(islice(items, 1))
        self._found = torch.zeros(dist.get_world_size(group), dtype=torch.int64)
        self._found[dist.get_rank(group)] = len(self.item)
        self._exchange = dist.all_reduce(self._found, group=group, async_op=True)

    def by_rank(self) -> list[bool]:
        """Wait for the other ranks, and return which of them have an item."""
        self._exchange.wait()
        return self._found.bool().tolist()
