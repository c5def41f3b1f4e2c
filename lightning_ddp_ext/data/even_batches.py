"""Give every rank batches of the same sizes.

The samples that fill up the last ranks are alone in a last batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import BatchSampler

from lightning_ddp_ext.data.epochs import samplers_below
from lightning_ddp_ext.data.global_order import GlobalOrderSampler, Order
from lightning_ddp_ext.data.proxy import copy_attributes
from lightning_ddp_ext.data.random_state import generators_of, preserve_random_state


class EvenBatches:
    """Yields the batches of one rank: first its own samples, then one sample alone.

    If the number of samples is not a multiple of the number of ranks, the first ranks
    read one sample more than the others, and the others repeat one of the first
    samples, as with torch's ``DistributedSampler``. Here this last sample is alone in a
    batch on every rank, so that a step contains either samples that count or a sample
    that is repeated.

    Args:
        batch_sampler: makes batches of the items of ``sampler``, from its attribute
            ``sampler``; or ``sampler`` itself, whose items are then read one by one.
        sampler: one of our samplers.
        separates_last: whether the last sample has a separate batch now; otherwise the
            batches are those of ``batch_sampler``.

    >>> from torch.utils.data import BatchSampler
    >>> from lightning_ddp_ext.data.samplers import ExactDistributedSampler
    >>> samplers = [ExactDistributedSampler(range(7), num_replicas=2, rank=rank) for rank in (0, 1)]
    >>> [list(EvenBatches(BatchSampler(own, 2, drop_last=False), own)) for own in samplers]
    [[[0, 2], [4], [6]], [[1, 3], [5], [0]]]
    """

    def __init__(
        self,
        batch_sampler: Any,
        sampler: GlobalOrderSampler,
        separates_last: Callable[[], bool] = lambda: True,
    ) -> None:
        self._batches = batch_sampler
        self._sampler = sampler
        self._separates_last = separates_last
        self._is_batched = batch_sampler is not sampler
        # These read what is left of the samples if each rank has equally many.
        self._common_sampler = copy_attributes(sampler)
        self._common_sampler.uneven = "drop"
        self._common_batches: Any = self._common_sampler
        if self._is_batched:
            self._common_batches = copy_attributes(batch_sampler)
            self._common_batches.sampler = self._common_sampler

    @property
    def samples(self) -> int:
        """The number of samples of all ranks, without repeated ones."""
        return self._sampler.length

    @property
    def repeating_ranks(self) -> tuple[int, ...]:
        """The ranks whose last sample is a repeated one."""
        world_size = self._sampler.num_replicas
        left_over = self._sampler.length % world_size
        return tuple(range(left_over, world_size)) if left_over else ()

    def reads_all_of_its_sampler(self) -> bool:
        """Read the batches, and return whether they consist of all items of the sampler.

        Some batch samplers drop items or read another sampler.
        """
        is_torchs = type(self._batches) is BatchSampler and not self._batches.drop_last
        if is_torchs or not self._is_batched:
            return True
        with preserve_random_state(generators_of(*samplers_below(self._common_batches))):
            return sum(map(len, self._common_batches)) == len(self._common_sampler)

    def _separates_now(self) -> bool:
        return bool(self.repeating_ranks) and self._separates_last()

    def draw(self) -> Iterator[tuple[Any, tuple[int, ...]]]:
        """Yield the indices of each batch, and the ranks that repeat a sample in it."""
        if not self._separates_now():
            yield from ((batch, ()) for batch in self._batches)
            return
        # The last sample must be of the same order, and each draw may give another one.
        order = self._sampler.compute_order()
        self._common_sampler.resume_at(self._sampler.epoch, 0)
        self._common_sampler.drawn_order = order
        yield from ((batch, ()) for batch in self._common_batches)
        last = self._last_item(order)
        yield [last] if self._is_batched else last, self.repeating_ranks

    def _last_item(self, order: Order) -> Any:
        """Return the item that this rank reads last if all ranks read equally many.

        On the repeating ranks, it is one of the first items of the order.
        """
        padded = replace(self._sampler.shard(0), uneven="pad")
        (item,) = order(padded.positions(len(padded) - 1, len(padded))).tolist()
        return item

    def __iter__(self) -> Iterator[Any]:
        return (indices for indices, _ in self.draw())

    def __len__(self) -> int:
        if self._separates_now():
            return len(self._common_batches) + 1
        return len(self._batches)
