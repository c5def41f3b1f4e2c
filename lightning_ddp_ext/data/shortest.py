"""End an iterator on all ranks together, when the first rank runs out of batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Generic, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
AHEAD = 2  # items that each rank draws ahead


def end_together(
    items: Iterator[T],
    group: dist.ProcessGroup | None = None,
    *,
    on_last: Callable[[], object] = lambda: None,
) -> Iterator[T]:
    """Yield the same number of items on all ranks: that of the shortest iterator.

    ``AHEAD`` items are drawn ahead. For each item, the ranks tell each other whether
    they have one, and the answers arrive while an earlier item is in use. An item is
    dropped if some rank has none.

    Collective: every rank must take the same number of items from the returned
    iterator. If a rank's iterator raises, the other ranks wait in a collective until
    that rank's failure is detected.

    Args:
        items: this rank's own iterator, which is not read after its end.
        group: a group of all ranks whose backend reduces CPU tensors; ``None`` for the
            default group.
        on_last: called before the last item is yielded.

    Example with a single rank:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> list(end_together(iter("abc")))
        ['a', 'b', 'c']
        >>> dist.destroy_process_group()
    """
    ahead = deque[_Drawn[T]]()

    def draw() -> None:
        is_over = bool(ahead) and not ahead[-1].item
        ahead.append(_Drawn(iter(()) if is_over else items, group))

    for _ in range(AHEAD):
        draw()
    has_next = ahead[0].is_on_all_ranks()
    while has_next:
        current = ahead.popleft().item[0]
        has_next = ahead[0].is_on_all_ranks()
        if has_next:
            draw()
        else:
            on_last()
        yield current


class _Drawn(Generic[T]):
    """The next item of an iterator, and whether all ranks have one.

    Creating it is collective, but does not wait.

    Attributes:
        item: a list with the item; empty after the iterator's end.
    """

    def __init__(self, items: Iterator[T], group: dist.ProcessGroup | None) -> None:
        self.item = list(islice(items, 1))
        self._is_on_all = torch.tensor(len(self.item))  # 0 or 1; reduced when the exchange ends
        self._exchange = dist.all_reduce(
            self._is_on_all, op=dist.ReduceOp.MIN, group=group, async_op=True
        )

    def is_on_all_ranks(self) -> bool:
        """Wait for the other ranks, and return whether each of them has an item."""
        self._exchange.wait()
        return bool(self._is_on_all)
