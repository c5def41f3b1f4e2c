"""Evaluate with batches of the same sizes on all ranks, and count each sample once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from math import inf
from typing import Any

import torch.distributed as dist
from torch.utils.data import DataLoader

from lightning_ddp_ext.data.even_batches import EvenBatches
from lightning_ddp_ext.data.global_order import GlobalOrderSampler
from lightning_ddp_ext.data.loader import (
    DistributedLoader,
    PermanentBatchSampler,
    batches_of,
    index_sampler_of,
    make_permanent,
    own_copy,
)
from lightning_ddp_ext.ranks import Ranks

from ..host import Host
from ..named_calls import group_of_small_collectives, ranks_of
from ..private.compat import active_loop_of, combined_loader_of, mode_of, results_of, takes_iterator
from ..private.lightning_tree import RunningStage
from .uncounted_step import uncounted

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
    in the last step, and on a rank that repeats one, this step does not count: logged
    values and metrics are restored after the step, and reductions leave the rank out.

    A rank whose own stream has no batch runs one uncounted step with a batch of another
    rank, so that it takes part in the reductions at the end of the epoch.

    Attributes:
        is_idle: whether this rank's batch does not count in the current step, or did
            not in the last one.
        idle_ranks: the ranks whose batches do not count in the current step.
    """

    def __init__(self, strategy: Host, *, is_exact: bool) -> None:
        self._strategy = strategy
        self._is_exact = is_exact
        self.end()

    def end(self) -> None:
        """End the evaluation, after which no rank is idle."""
        # Lightning may read a batch before the step of an earlier one.
        self._idle_ranks_of_steps: deque[tuple[int, ...]] = deque()
        self.idle_ranks: tuple[int, ...] = ()
        self.is_idle = False

    # Loaders.

    @property
    def _is_joint(self) -> bool:
        """Whether several ranks evaluate together and count each sample once."""
        return self._is_exact and dist.is_initialized() and self._strategy.world_size > 1

    def prepare(self, loader: DistributedLoader, stage: RunningStage, *, is_dealt: bool) -> None:
        """Prepare a loader for an evaluation. Collective.

        Args:
            loader: the loader.
            stage: the stage.
            is_dealt: whether the strategy has put its sampler into the loader.
        """
        if stage == RunningStage.PREDICTING:
            if batches_of(loader) == 0:
                # Lightning refuses a length of 0; the iterator still yields nothing
                loader.length = 1
            return
        if not self._is_joint:
            return
        loader.start_evaluation = partial(self._start, loader)
        if takes_iterator(self._strategy.lightning_module, stage):
            return  # such a step may fetch several batches, of which some count
        even = self._even_batches(loader.loader, is_dealt=is_dealt)
        samples = None if even is None else even.samples
        batches, samples_by_rank = zip(
            *ranks_of(self._strategy).gather((batches_of(loader), samples)), strict=True
        )
        if even is not None and len({*samples_by_rank}) == 1:
            loader.loader = own_copy(loader.loader)  # a stateful loader has not been copied yet
            permanent = make_permanent(loader.loader, even)
            loader.start_evaluation = partial(self._start_even, loader, even, permanent)
        elif _may_be_empty(loader, batches):
            if batches_of(loader) == 0 < max(batches):
                loader.length = 1  # Lightning refuses a rank without batches
            loader.start_evaluation = partial(self._start_or_borrow, loader)

    def _even_batches(self, loader: Any, *, is_dealt: bool) -> EvenBatches | None:
        """Return even batches for a loader if each sample is to be read once.

        Otherwise, return ``None``.
        """
        own = index_sampler_of(loader)
        sampler = own if isinstance(own, GlobalOrderSampler) else getattr(own, "sampler", None)
        if not isinstance(sampler, GlobalOrderSampler) or not can_count_once(loader):
            return None
        if not is_dealt and sampler.uneven != "exact":
            return None
        even = EvenBatches(own, sampler, partial(_is_sequential, self._loop))
        return even if even.yields_every_item else None

    @property
    def _loop(self) -> Any:
        return active_loop_of(self._strategy.current_trainer)

    # Iterators over a loader.

    def _start(self, loader: DistributedLoader) -> Iterator[Any]:
        return self._recorded((batch, ()) for batch in iter(loader.loader))

    def _start_even(
        self, loader: DistributedLoader, even: EvenBatches, permanent: PermanentBatchSampler
    ) -> Iterator[Any]:
        """Start an iterator whose last batch may not count on some ranks.

        It does not count on the ranks that repeat a sample.
        """
        filled: list[int] = []
        permanent.draw_next_by(partial(even.draw, filled))
        numbered = enumerate(iter(loader.loader))
        idle_ranks = even.filling_ranks
        return self._recorded(
            (batch, idle_ranks if filled == [number] else ()) for number, batch in numbered
        )

    def _start_or_borrow(self, loader: DistributedLoader) -> Iterator[Any]:
        """Start an iterator that yields a batch of another rank if this rank has none.

        Collective.
        """
        if not _is_sequential(self._loop):
            return self._start(loader)
        return self._recorded(self._borrow(iter(loader.loader)))

    def _borrow(self, batches: Iterator[Any]) -> Iterator[tuple[Any, tuple[int, ...]]]:
        """Yield batches, each with the ranks that are idle with it. Collective."""
        # Another rank may still be in a step that uses the default group.
        group = group_of_small_collectives()
        ranks = Ranks(self._strategy.global_rank, self._strategy.world_size, group=group)
        own = list(islice(batches, 1))
        has_batch = ranks.gather(bool(own))
        if not all(has_batch) and any(has_batch):
            lent = [*own] or [None]
            dist.broadcast_object_list(lent, src=has_batch.index(True), group=group)
            yield (own or lent)[0], tuple(rank for rank, has in enumerate(has_batch) if not has)
        else:
            batches = chain(own, batches)
        for batch in batches:
            yield batch, ()

    def _recorded(self, batches: Iterator[tuple[Any, tuple[int, ...]]]) -> Iterator[Any]:
        """Yield batches, and record which ranks are idle in the step of each batch."""
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
            if not self.is_idle:
                yield
                return
            trainer = self._strategy.current_trainer
            with uncounted(results_of(trainer), trainer.lightning_module):
                yield
        finally:
            self.idle_ranks = ()


def _is_sequential(loop: Any) -> bool:
    """Whether a loop reads its loaders one after another.

    Each step then has a batch of one loader.
    """
    return mode_of(combined_loader_of(loop)) == "sequential"


def _may_be_empty(loader: DistributedLoader, batches: tuple[float, ...]) -> bool:
    """Whether a rank may have no batch of data that the ranks divide themselves."""
    if len({number == inf for number in batches}) > 1:
        # Without a length, Lightning would read the first batch earlier than others do.
        return False
    return min(batches) == 0 < max(batches) or index_sampler_of(loader.loader) is None


def can_count_once(loader: DataLoader[Any]) -> bool:
    """Whether the last samples of a loader can be read in a separate batch.

    With ``drop_last=True`` the user wants whole batches only, and a class with another
    ``__iter__`` may not yield one batch for each of its batch sampler. With
    ``in_order=False`` the batches' order is unknown.
    """
    drops = getattr(index_sampler_of(loader), "drop_last", False) or not getattr(
        loader, "in_order", True
    )
    return not drops and type(loader).__iter__.__module__.partition(".")[0] in (
        "torch",
        "torchdata",
    )
