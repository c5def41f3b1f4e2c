"""End a pass on all ranks together, when the first of them has no more batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

_AHEAD = 2  # with one, a rank would wait for the others before each batch to know whether it is the last


class StopAtShortest(Iterator[T], Generic[T]):
    """Yields equally many items on all ranks: as many as the shortest iterator has.

    Two items are drawn ahead, and the ranks find out whether all of them have one while the item before is trained on.
    An item that some rank lacks is dropped.

    Collective: every rank must ask for items equally often. A rank whose iterator raises leaves the others waiting in a
    collective, from which the failure of a rank releases them.

    Args:
        items: this rank's own iterator; not asked again after its end.
        group: all ranks, with a backend that reduces CPU tensors, for nobody else; ``None`` for the default group.
        on_last: called before the last item is yielded.

    Example, on one rank of one:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> list(StopAtShortest(iter("abc")))
        ['a', 'b', 'c']
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        items: Iterator[T],
        group: dist.ProcessGroup | None = None,
        *,
        on_last: Callable[[], object] = lambda: None,
    ) -> None:
        self._items = items
        self._group = group
        self._on_last = on_last
        self._ahead: deque[tuple[list[T], Tensor, Any]] = deque()  # with the answer, under way, whether all have one
        self._has_ended = False

    def __next__(self) -> T:
        self._draw_ahead()
        if self._has_ended or not self._all_have_next():
            self._has_ended = True
            raise StopIteration
        (item,), _, _ = self._ahead.popleft()
        self._draw_ahead()
        if not self._all_have_next():
            self._on_last()
        return item

    def finish(self) -> None:
        """Wait for the answers that nobody has needed, so that no collective is under way. Collective."""
        self._has_ended = True
        for _, _, work in self._ahead:
            work.wait()

    def _draw_ahead(self) -> None:
        while len(self._ahead) < _AHEAD and not self._has_ended:
            item = list(islice(self._items, 1))
            if not item:
                self._items = iter(())
            smallest = torch.tensor(len(item))
            work = dist.all_reduce(smallest, dist.ReduceOp.MIN, group=self._group, async_op=True)
            self._ahead.append((item, smallest, work))

    def _all_have_next(self) -> bool:
        _, smallest, work = self._ahead[0]
        work.wait()
        return bool(smallest)
