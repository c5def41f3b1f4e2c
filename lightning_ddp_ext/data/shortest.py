"""End an iterator on all ranks together, when the first of them has no more batches."""

from __future__ import annotations

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
    ahead = _next_everywhere(items, group)
    while ahead:
        (item,) = ahead
        ahead = _next_everywhere(items, group)
        if not ahead:
            on_last()
        yield item


def _next_everywhere(items: Iterator[T], group: dist.ProcessGroup | None) -> list[T]:
    """Return the next item, if every rank has one. Collective."""
    drawn = list(islice(items, 1))
    fewest = torch.tensor(len(drawn))
    dist.all_reduce(fewest, dist.ReduceOp.MIN, group=group)
    return drawn if fewest else []
