"""Has every rank one more batch? Asked ahead of time, so that all ranks stop after the same one and none waits long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_ddp_ext.data.continued import index_sampler_name
from lightning_ddp_ext.data.disguise import own_class
from lightning_ddp_ext.data.place import has_place
from lightning_ddp_ext.data.streams import with_wrapped

T = TypeVar("T")

_COUNTED_BY = ("torch.", "lightning_ddp_ext.")


class Smallest:
    """The smallest that any rank says, number by number: asked now, answered later. Collective.

    Args:
        numbers: this rank's; equally many on every rank. ``inf`` may be among them.
        group: of all ranks, with a backend that knows CPU memory; ``None`` for the default one.
    """

    def __init__(self, numbers: Sequence[float], group: dist.ProcessGroup | None = None) -> None:
        self._numbers = torch.tensor(numbers, dtype=torch.float64)
        self._work: Any = dist.all_reduce(self._numbers, dist.ReduceOp.MIN, group=group, async_op=True)

    def wait(self) -> list[float]:
        """The answer, as soon as every rank has asked.

        Raises:
            RuntimeError: a rank has gone away.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None
        numbers: list[float] = self._numbers.tolist()
        return numbers


class InStep(Iterator[T], Generic[T]):
    """Yields on each rank what its own iterator does, and on all ranks equally many: as many as the shortest has.

    One item more is drawn than is given away, and what all ranks have of it is asked when it has been drawn. Whoever
    does a step of work between two items finds the answer there. An item that others do not have is dropped.

    Collective: every rank must ask for items equally often. A rank whose iterator raises asks nobody any more; that
    the others are released is the process group's business.

    Args:
        iterator: this rank's own; not asked again after its end.
        group: of all ranks, see :class:`Smallest`. One that nobody else uses cannot get into anybody's way.
        at_most: so many items are yielded, and no more are drawn; the same on every rank.
        before_draw: called with the number of items drawn so far, before each is drawn.

    Example, on one rank of one:
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> list(InStep(iter("abc"))), list(InStep(iter("abc"), at_most=2))
        (['a', 'b', 'c'], ['a', 'b'])
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        iterator: Iterator[T],
        group: dist.ProcessGroup | None = None,
        *,
        at_most: float = float("inf"),
        before_draw: Callable[[int], None] = lambda drawn: None,
    ) -> None:
        self._iterator = iterator
        self._group = group
        self._at_most = at_most
        self._before_draw = before_draw
        self._ahead: list[T] = []
        self._question: Smallest | None = None
        self.drawn = 0
        self._has_begun = False

    def __next__(self) -> T:
        if not self._has_begun:
            self._has_begun = True
            self._draw()
        if not self._all_have_one():
            self._ahead.clear()
            raise StopIteration
        item = self._ahead.pop()
        self._draw()
        return item

    def settle(self) -> None:
        """Wait for the answer that has not been needed, so that nothing is under way any more. Collective."""
        if self._question is not None:
            self._question.wait()

    def _all_have_one(self) -> bool:
        question, self._question = self._question, None
        return question is not None and question.wait() == [1.0]

    def _draw(self) -> None:
        if self.drawn >= self._at_most:
            return  # and so does every rank
        self._before_draw(self.drawn)
        try:
            self._ahead.append(next(self._iterator))
            self.drawn += 1
        except StopIteration:
            pass
        self._question = Smallest([len(self._ahead)], self._group)


def is_counted(loader: object) -> bool:
    """Whether a loader yields as many batches as it says, by all that can be known: torch or this package counts them.

    What anybody else counts may be an estimate: a batch sampler that fills batches up to a number of tokens, or an
    iterable dataset with a length.

    >>> is_counted(DataLoader(range(4))), is_counted(DataLoader(range(4), sampler=[0, 1])), is_counted([1, 2])
    (True, False, False)
    """
    if not isinstance(loader, DataLoader) or not has_place(loader):
        return False
    counting = with_wrapped(getattr(loader, index_sampler_name(loader)))
    return own_class(loader) is DataLoader and all(type(each).__module__.startswith(_COUNTED_BY) for each in counting)
