"""Evaluate with batches of the same sizes on all ranks, and count each sample once.

1. :meth:`Evaluation.prepare` makes a loader read :class:`EvenBatches`. If the samples do
   not divide evenly, some ranks repeat a sample in the last batch.
2. When an iterator from :meth:`Evaluation.start` yields a batch, the ranks for which it
   does not count are recorded.
3. :meth:`Evaluation.step` makes these ranks **idle** in the step of that batch.

An idle rank runs the same step as the other ranks, which wait for it in collectives.
Afterwards its logged values and metrics are restored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import ceil
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler

from lightning_ddp_ext.data.division import can_count_once
from lightning_ddp_ext.data.inspection import each_of, index_sampler_of
from lightning_ddp_ext.data.loader import DistributedLoader
from lightning_ddp_ext.data.position import global_order_of
from lightning_ddp_ext.data.proxy import iterable_of
from lightning_ddp_ext.data.samplers import GlobalOrderSampler

from ..private.compat import active_loop_of, mode_of, takes_iterator
from ..private.lightning_tree import RunningStage
from ..start.devices import RankDevicesStrategy
from ..strategy_ranks import ranks_of
from .metric_states import restoring_metrics


class Evaluation:
    """Validation and test on a strategy's ranks.

    As in stock Lightning, every rank reads the same number of samples, in batches of
    the same sizes; some ranks repeat a sample for this. The repeated samples are alone
    in the last step. On an idle rank, logged values and metrics are restored after the
    step, and the reduction of these values leaves the rank out.

    Args:
        strategy: our strategy.
        is_exact: the argument ``exact_evaluation`` of ``DDPExtStrategy``.

    Attributes:
        is_exact: the argument.
        idle_ranks: the ranks whose batches do not count in the current step; empty
            outside of steps.
        is_idle: whether this rank's batch does not count in the step. It is kept for
            the hooks after the step, until the next one.
    """

    def __init__(self, strategy: RankDevicesStrategy, *, is_exact: bool) -> None:
        self._strategy = strategy
        self.is_exact = is_exact
        self.end()

    def end(self) -> None:
        """End the evaluation, after which no rank is idle."""
        # Of each batch that was read and had no step yet, since Lightning may read ahead. A
        # step that a user calls by hand has no batch here, unless one was read ahead.
        self._idle_ranks_of_batches: deque[tuple[int, ...]] = deque()
        self.idle_ranks: tuple[int, ...] = ()
        self.is_idle = False

    def prepare(self, loader: DistributedLoader, stage: RunningStage) -> None:
        """Make a loader read even batches, if all ranks can and have equally many samples.

        With different numbers, each rank has its own data. Collective.
        """
        is_alone = self._strategy.world_size == 1 or not dist.is_initialized()
        # A step that takes an iterator may fetch several batches, of which some count.
        if not self.is_exact or is_alone or takes_iterator(self._strategy.lightning_module, stage):
            return
        even = self._make_even(loader)
        own_samples = None if even is None else even.sampler.length
        samples_by_rank = ranks_of(self._strategy).gather(own_samples)
        if even is not None and len(set(samples_by_rank)) == 1:
            loader.read_indices(even)

    def _make_even(self, loader: DistributedLoader) -> EvenBatches | None:
        """Return even batches for a loader, or ``None`` to keep its own batches."""
        sampler = global_order_of(loader.loader)
        if sampler is None or not can_count_once(loader.loader):
            return None
        should_count_once = loader.is_divided or sampler.uneven == "exact"
        # Idle ranks are the sampler's, and a user may have given it others than ours.
        own_place = (self._strategy.world_size, self._strategy.global_rank)
        if not should_count_once or (sampler.num_replicas, sampler.rank) != own_place:
            return None
        loop = active_loop_of(self._strategy.current_trainer)
        return EvenBatches(
            index_sampler_of(loader.loader),
            sampler,
            # In another mode, a step has batches of several loaders.
            has_own_steps=lambda: mode_of(loop) == "sequential",
        )

    def start(self, loader: DistributedLoader) -> Iterator[Any]:
        """Start an iterator now, while the caller has set the seed of its workers."""
        even = iterable_of(index_sampler_of(loader.loader))
        idle_ranks = even.repeating_ranks() if isinstance(even, EvenBatches) else ()
        last = len(even) - 1 if idle_ranks else None  # the batch in whose step they are idle
        return self._record(iter(loader.loader), last, idle_ranks)

    def _record(
        self, batches: Iterator[Any], last: int | None, idle_ranks: tuple[int, ...]
    ) -> Iterator[Any]:
        """Yield batches, and record for each which ranks are idle in its step."""
        for number, batch in enumerate(each_of(batches)):
            self._idle_ranks_of_batches.append(idle_ranks if number == last else ())
            yield batch

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step in the block; on an idle rank, restore logged values and metrics after it."""
        trainer = self._strategy.current_trainer
        batches = self._idle_ranks_of_batches
        self.idle_ranks = batches.popleft() if batches else ()
        self.is_idle = self._strategy.global_rank in self.idle_ranks
        try:
            with restoring_metrics(trainer) if self.is_idle else nullcontext():
                yield
        finally:
            self.idle_ranks = ()


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
        has_own_steps: called at each use: whether each batch has a step of its own.
            Otherwise the batches are those of ``index_sampler``. Lightning decides this
            after it has prepared the loaders.

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
        *,
        has_own_steps: Callable[[], bool] = lambda: True,
    ) -> None:
        self._index_sampler = index_sampler
        self.sampler = sampler
        self._has_own_steps = has_own_steps
        self._batch_size: int | None = getattr(index_sampler, "batch_size", None)

    def repeating_ranks(self) -> tuple[int, ...]:
        """Return the ranks that repeat a sample in the last batch."""
        world_size = self.sampler.num_replicas
        left_over = self.sampler.length % world_size
        if left_over == 0 or not self._has_own_steps():
            return ()
        return tuple(range(left_over, world_size))

    def __iter__(self) -> Iterator[Any]:
        if not self.repeating_ranks():
            yield from self._index_sampler
            return
        shard = replace(self.sampler.shard(0), uneven="pad")
        # On the repeating ranks, the last item is one of the first of the order.
        order = self.sampler.compute_order()
        items = order.items_at(shard.positions(0, len(shard))).tolist()
        if self._batch_size is None:
            yield from items
        else:
            yield from BatchSampler(items[:-1], self._batch_size, drop_last=False)
            yield items[-1:]

    def __len__(self) -> int:
        if not self.repeating_ranks():
            return len(self._index_sampler)
        whole = self.sampler.length // self.sampler.num_replicas
        return ceil(whole / (self._batch_size or 1)) + 1
