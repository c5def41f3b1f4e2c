"""End a pass on all ranks together, when the first of them has no more batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_AHEAD = 2  # with one, a rank would wait for the others before each batch to know whether it is the last


class AsyncMin:
    """The smallest value of any rank, number by number: started now, waited for later. Collective.

    Args:
        numbers: this rank's values; equally many on every rank. ``inf`` may be among them.
        group: all ranks, with a backend that reduces CPU tensors; ``None`` for the default group.
    """

    def __init__(self, numbers: Sequence[float], group: dist.ProcessGroup | None = None) -> None:
        self._numbers = torch.tensor(numbers, dtype=torch.float64)
        self._work: Any = dist.all_reduce(self._numbers, dist.ReduceOp.MIN, group=group, async_op=True)

    def wait(self) -> list[float]:
        """Return the smallest values once every rank has started.

        Raises:
            RuntimeError: a rank has ended.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        numbers: list[float] = self._numbers.tolist()
        return numbers


class StopAtShortest(Iterator[T], Generic[T]):
    """Yields equally many items on all ranks: as many as the shortest iterator has.

    Two items are drawn ahead, and the ranks find out whether all of them have one while the item before is trained on.
    An item that some rank lacks is dropped.

    Collective: every rank must ask for items equally often. A rank whose iterator raises leaves the others waiting in a
    collective, from which the failure of a rank releases them.

    Args:
        items: this rank's own iterator; not asked again after its end.
        group: see :class:`AsyncMin`; a group that nobody else uses.
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
        self._ahead: deque[tuple[list[T], AsyncMin]] = deque()
        self._has_ended = False

    def __next__(self) -> T:
        self._draw_ahead()
        if self._has_ended or not self._all_have_one():
            self._has_ended = True
            raise StopIteration
        (item,), _ = self._ahead.popleft()
        self._draw_ahead()
        if not self._all_have_one():
            self._on_last()
        return item

    def finish(self) -> None:
        """Wait for the answers that nobody has needed, so that no collective is under way. Collective."""
        self._has_ended = True
        for _, smallest in self._ahead:
            smallest.wait()

    def _all_have_one(self) -> bool:
        return self._ahead[0][1].wait() == [1.0]

    def _draw_ahead(self) -> None:
        while len(self._ahead) < _AHEAD and not self._has_ended:
            drawn = list(islice(self._items, 1))
            if not drawn:
                self._items = iter(())
            self._ahead.append((drawn, AsyncMin([len(drawn)], self._group)))
