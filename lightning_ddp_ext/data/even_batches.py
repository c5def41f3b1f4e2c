"""Give every rank equally many batches.

In evaluation, :class:`EvenBatches` have the same sizes on all ranks. In training,
:func:`end_together` ends the ranks' iterators when the first one ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from math import ceil
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler

from lightning_ddp_ext.data.samplers import GlobalOrderSampler

T = TypeVar("T")
AHEAD = 2  # items that `end_together` draws ahead on each rank


class EvenBatches:
    """Yields the batches of one rank: first its own samples, then one sample alone.

    If the number of samples is not a multiple of the number of ranks, the first ranks
    read one sample more than the others, and the others repeat one of the first
    samples, as with torch's ``DistributedSampler``. Here this last sample is alone in a
    batch on every rank, so that a step contains either samples that count or a sample
    that is repeated.

    Args:
        index_sampler: the loader's own: a ``BatchSampler`` over ``sampler``, or
            ``sampler`` itself, whose items are then read one by one.
        sampler: one of our samplers.
        separates_last: whether the last sample has a separate batch now; otherwise the
            batches are those of ``index_sampler``.

    >>> from torch.utils.data import BatchSampler
    >>> from lightning_ddp_ext.data.samplers import ExactDistributedSampler
    >>> samplers = [ExactDistributedSampler(range(7), num_replicas=2, rank=rank) for rank in (0, 1)]
    >>> [list(EvenBatches(BatchSampler(own, 2, drop_last=False), own)) for own in samplers]
    [[[0, 2], [4], [6]], [[1, 3], [5], [0]]]
    """

    def __init__(
        self,
        index_sampler: BatchSampler | GlobalOrderSampler,
        sampler: GlobalOrderSampler,
        separates_last: Callable[[], bool] = lambda: True,
    ) -> None:
        self._index_sampler = index_sampler
        self._sampler = sampler
        self._separates_last = separates_last
        self._batch_size: int | None = getattr(index_sampler, "batch_size", None)

    @property
    def samples(self) -> int:
        """The number of samples of all ranks, without repeated ones."""
        return self._sampler.length

    def repeating_ranks(self) -> tuple[int, ...]:
        """Return the ranks that repeat a sample in the last batch now."""
        world_size = self._sampler.num_replicas
        left_over = self._sampler.length % world_size
        is_separate = left_over > 0 and self._separates_last()
        return tuple(range(left_over, world_size)) if is_separate else ()

    def __iter__(self) -> Iterator[Any]:
        if not self.repeating_ranks():
            yield from self._index_sampler
            return
        order = self._sampler.compute_order()
        # The repeating ranks read one of the first items of the order last.
        shard = replace(self._sampler.shard(0), uneven="pad")
        items = order(shard.positions(0, len(shard))).tolist()
        if self._batch_size is None:
            yield from items
            return
        yield from BatchSampler(items[:-1], self._batch_size, drop_last=False)
        yield items[-1:]

    def __len__(self) -> int:
        if not self.repeating_ranks():
            return len(self._index_sampler)
        whole = self._sampler.length // self._sampler.num_replicas
        return ceil(whole / (self._batch_size or 1)) + 1


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
