"""Evaluate with batches of the same sizes on all ranks, and count each sample once.

1. ``prepare`` makes a loader read even batches. Some ranks repeat a sample in the last
   one.
2. When an iterator yields a batch, the ranks that repeat a sample in it are recorded.
3. ``step`` makes these ranks idle in the step of that batch: it does not count there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_ddp_ext.data.even_batches import EvenBatches
from lightning_ddp_ext.data.loader import DistributedLoader
from lightning_ddp_ext.data.loader_properties import (
    each_of,
    index_sampler_of,
    iterates_as_torch,
    length_or_inf,
)
from lightning_ddp_ext.data.position import global_order_of
from lightning_ddp_ext.data.resampled import PermanentBatchSampler, make_permanent

from ..private.compat import active_loop_of, mode_of, results_of, takes_iterator
from ..private.lightning_tree import RunningStage
from ..start.devices import RankDevicesStrategy
from ..strategy_ranks import ranks_of
from .uncounted_step import uncounted

IdleRanks = tuple[int, ...]  # the ranks whose batches do not count in a step

EVALUATED = (
    RunningStage.VALIDATING,
    RunningStage.TESTING,
    RunningStage.SANITY_CHECKING,
    RunningStage.PREDICTING,
)


class Evaluation:
    """Validation, test and prediction on a strategy's ranks.

    As in stock Lightning, every rank reads the same number of samples, in batches of
    the same sizes; some ranks repeat a sample for this. The repeated samples are alone
    in the last step. On an idle rank, logged values and metrics are restored after the
    step, and reductions leave the rank out.

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
        # Lightning may read a batch before the step of an earlier one.
        self._idle_ranks_of_steps: deque[IdleRanks] = deque()
        self.idle_ranks: IdleRanks = ()
        self.is_idle = False

    # Loaders.

    @property
    def _counts_once(self) -> bool:
        """Whether several ranks evaluate together and count each sample once."""
        return self.is_exact and dist.is_initialized() and self._strategy.world_size > 1

    def prepare(self, loader: DistributedLoader, stage: RunningStage) -> None:
        """Prepare a loader for a stage of ``EVALUATED``. Collective."""
        if stage == RunningStage.PREDICTING:
            if length_or_inf(loader) == 0:
                # Lightning refuses a length of 0; the iterator still yields nothing
                loader.length = 1
        elif self._counts_once:
            loader.start_evaluation = self._start
            # A step that takes an iterator may fetch several batches, of which some count.
            if not takes_iterator(self._strategy.lightning_module, stage):
                self._prepare_even_batches(loader)

    def _prepare_even_batches(self, loader: DistributedLoader) -> None:
        """Make a loader read even batches, if all ranks have the same samples."""
        even = self._even_batches(loader)
        samples = None if even is None else even.samples
        samples_by_rank = ranks_of(self._strategy).gather(samples)
        if even is not None and len(set(samples_by_rank)) == 1:
            loader.copy_loader()
            permanent = make_permanent(loader.loader, even)
            loader.start_evaluation = partial(self._start_even, even, permanent)

    def _even_batches(self, loader: DistributedLoader) -> EvenBatches | None:
        """Return even batches for a loader, or ``None`` to keep its own batches."""
        sampler = global_order_of(loader.loader)
        if sampler is None or not can_count_once(loader.loader):
            return None
        is_to_count_once = loader.is_dealt or sampler.uneven == "exact"
        # Idle ranks are the sampler's, and a user may have given it others than ours.
        own_ranks = (self._strategy.world_size, self._strategy.global_rank)
        if not is_to_count_once or (sampler.num_replicas, sampler.rank) != own_ranks:
            return None
        loop = active_loop_of(self._strategy.current_trainer)
        index_sampler = index_sampler_of(loader.loader)
        even = EvenBatches(index_sampler, sampler, partial(_is_sequential, loop))
        return even if even.reads_all_of_its_sampler() else None

    # Iterators over a loader.

    def _start(self, loader: Any) -> Iterator[Any]:
        return self._recorded((batch, ()) for batch in each_of(iter(loader)))

    def _start_even(
        self, even: EvenBatches, permanent: PermanentBatchSampler, loader: Any
    ) -> Iterator[Any]:
        """Start an iterator; a batch does not count on ranks that repeat a sample in it."""
        idle_ranks_by_batch = deque[IdleRanks]()
        # Workers that are spawned get a copy of the sampler, so this can be pickled.
        permanent.draw_next_by(partial(_draw_indices, even, idle_ranks_by_batch))
        batches = iter(loader)
        return self._recorded((batch, idle_ranks_by_batch.popleft()) for batch in batches)

    def _recorded(self, batches: Iterator[tuple[Any, IdleRanks]]) -> Iterator[Any]:
        """Yield batches, and record which ranks are idle in the step of each one."""
        for batch, idle_ranks in batches:
            self._idle_ranks_of_steps.append(idle_ranks)
            yield batch

    # Steps.

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step; on an idle rank, restore logged values and metrics afterwards."""
        steps = self._idle_ranks_of_steps
        self.idle_ranks = steps.popleft() if steps else ()
        self.is_idle = self._strategy.global_rank in self.idle_ranks
        try:
            with self._restoring_if_idle():
                yield
        finally:
            self.idle_ranks = ()

    def _restoring_if_idle(self) -> AbstractContextManager[None]:
        if not self.is_idle:
            return nullcontext()
        trainer = self._strategy.current_trainer
        return uncounted(results_of(trainer), trainer.lightning_module)


def _draw_indices(even: EvenBatches, idle_ranks_by_batch: deque[IdleRanks]) -> Iterator[Any]:
    """Yield the indices of batches, and append the ranks that are idle in each."""
    for indices, idle_ranks in even.draw():
        idle_ranks_by_batch.append(idle_ranks)
        yield indices


def _is_sequential(loop: Any) -> bool:
    """Whether a loop reads its loaders one after another.

    Each step then has a batch of one loader.
    """
    return mode_of(loop) == "sequential"


def can_count_once(loader: DataLoader[Any]) -> bool:
    """Whether the last samples of a loader can be read in a separate batch.

    With ``drop_last=True`` the user wants whole batches only, and a class with another
    ``__iter__`` may not yield one batch for each of its batch sampler. With
    ``in_order=False`` the batches' order is unknown.
    """
    if getattr(index_sampler_of(loader), "drop_last", False):
        return False
    if not getattr(loader, "in_order", True):
        return False
    return iterates_as_torch(loader)
