"""Give every rank batches of the same sizes.

The samples that fill up the last ranks are alone in a last batch.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import BatchSampler

from lightning_ddp_ext.data.epochs import samplers_below
from lightning_ddp_ext.data.global_order import GlobalOrderSampler
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
        is_apart: whether the last sample has its own batch now; otherwise the batches
            are those of ``batch_sampler``.

    >>> from torch.utils.data import BatchSampler
    >>> from lightning_ddp_ext.data.samplers import ExactDistributedSampler
    >>> samplers = [ExactDistributedSampler(range(7), num_replicas=2, rank=rank) for rank in (0, 1)]
    >>> [list(EvenBatches(BatchSampler(each, 2, drop_last=False), each)) for each in samplers]
    [[[0, 2], [4], [6]], [[1, 3], [5], [0]]]
    """

    def __init__(
        self,
        batch_sampler: Any,
        sampler: GlobalOrderSampler,
        is_apart: Callable[[], bool] = lambda: True,
    ) -> None:
        self._together = batch_sampler
        self._sampler = sampler
        self._is_apart = is_apart
        self._is_batched = batch_sampler is not sampler
        self._own = copy.copy(sampler)
        self._own.uneven = "drop"
        self._apart: Any = self._own
        if self._is_batched:
            self._apart = copy.copy(batch_sampler)
            self._apart.sampler = self._own

    @property
    def samples(self) -> int:
        """The number of samples of all ranks, without repeated ones."""
        return self._sampler.length

    @property
    def filling_ranks(self) -> tuple[int, ...]:
        """The ranks whose last sample is a repeated one."""
        world_size = self._sampler.num_replicas
        left_over = self._sampler.length % world_size
        return tuple(range(left_over, world_size)) if left_over else ()

    @property
    def yields_every_item(self) -> bool:
        """Whether the batch sampler yields every item that it reads.

        Some batch samplers drop items or read another sampler.
        """
        if not self._is_batched or type(self._together) is BatchSampler:
            return True
        with preserve_random_state(generators_of(*samplers_below(self._apart))):
            return sum(map(len, self._apart)) == len(self._own)

    @property
    def _has_own_batch(self) -> bool:
        return bool(self.filling_ranks) and self._is_apart()

    def draw(self, filled: list[int]) -> Iterator[Any]:
        """Yield the batches.

        When the last sample is drawn alone, append the number of its batch to
        ``filled``.
        """
        if not self._has_own_batch:
            yield from self._together
            return
        self._own.resume_at(self._sampler.epoch, 0)
        batches = 0
        items = 0
        for batch in self._apart:
            batches += 1
            items += len(batch) if self._is_batched else 1
            yield batch
        if items != len(self._own):
            # The user's batch sampler does not read its ``sampler``; it drew everything
            return
        filled.append(batches)
        item = self._last_item()
        yield [item] if self._is_batched else item

    def _last_item(self) -> Any:
        padded = replace(self._sampler.shard(0), uneven="pad")
        (item,) = self._sampler.items(padded.positions(len(padded) - 1, len(padded)))
        return item

    def __iter__(self) -> Iterator[Any]:
        return self.draw([])

    def __len__(self) -> int:
        return len(self._apart) + 1 if self._has_own_batch else len(self._together)
