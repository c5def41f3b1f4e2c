"""Evaluate with batches of the same sizes on all ranks, and count each sample once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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
from lightning_ddp_ext.rendezvous.process_context import current

from .compat import active_loop_of, combined_loader_of, mode_of, results_of, takes_iterator
from .lightning_tree import RunningStage
from .named_calls import ranks_of
from .uncounted_step import uncounted

EVALUATED = (
    RunningStage.VALIDATING,
    RunningStage.TESTING,
    RunningStage.SANITY_CHECKING,
    RunningStage.PREDICTING,
)


@dataclass
class EvaluatedLoader:
    """How the ranks read a loader of a validation or test.

    Args:
        even: the batches, if one of our samplers distributes the samples; otherwise ``None``.
        permanent: the loader's batch sampler, if there are even batches.
        may_be_empty: whether some ranks may have no batch at all.
    """

    even: EvenBatches | None = None
    permanent: PermanentBatchSampler | None = None
    may_be_empty: bool = False


class Evaluation:
    """Validation, test and prediction on a strategy's ranks.

    As in stock Lightning, every rank reads the same number of samples, in batches of the same sizes; some
    ranks repeat a sample for this. The repeated samples are alone in the last step, and on a rank that
    repeats one, this step does not count: logged values and metrics are restored after the step, and
    reductions leave the rank out.

    A rank whose own stream has no batch runs one uncounted step with a batch of another rank, so that it
    takes part in the reductions at the end of the epoch.

    Attributes:
        is_idle: whether this rank's batch does not count in the current step, or did not in the last one.
        idle_ranks: the ranks whose batches do not count in the current step.
    """

    def __init__(self, strategy: Any, *, is_exact: bool) -> None:
        self._strategy = strategy
        self._is_exact = is_exact
        self.end()

    def end(self) -> None:
        """End the evaluation, after which no rank is idle."""
        self._read: deque[tuple[int, ...]] = deque()  # of each batch that was read: the ranks that it is idle on
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
                loader.length = 1  # Lightning refuses a rank without batches; its iterator ends before the first one
            return
        if not self._is_joint:
            return
        # A step that fetches its batches itself may fetch several, of which some count.
        has_own_steps = not takes_iterator(self._strategy.lightning_module, stage)
        even = self._even_out(loader, is_dealt=is_dealt) if has_own_steps else None
        loader.evaluated = even or EvaluatedLoader(may_be_empty=has_own_steps and self._may_be_empty(loader))

    def _even_out(self, loader: DistributedLoader, *, is_dealt: bool) -> EvaluatedLoader | None:
        """Make a loader read even batches, if one of our samplers distributes each sample once."""
        own = index_sampler_of(loader.loader)
        sampler = own if isinstance(own, GlobalOrderSampler) else getattr(own, "sampler", None)
        if not isinstance(sampler, GlobalOrderSampler) or not can_count_once(loader.loader):
            return None
        if not is_dealt and sampler.uneven != "exact":
            return None  # the user's own sampler repeats samples or leaves some out
        even = EvenBatches(own, sampler, partial(_is_sequential, self._loop))
        loader.loader = own_copy(loader.loader)  # a stateful loader has not been copied yet
        return EvaluatedLoader(even, make_permanent(loader.loader, even))

    def _may_be_empty(self, loader: DistributedLoader) -> bool:
        """Whether some rank may have no batch of a loader whose data the ranks divide themselves. Collective."""
        lengths = ranks_of(self._strategy).gather(batches_of(loader))
        has_length = {length < inf for length in lengths}
        if len(has_length) > 1:
            return False  # where Lightning knows no length, it reads the first batch earlier
        if min(lengths) == 0 < max(lengths):
            loader.length = max(1, lengths[self._strategy.global_rank])
            return True
        return index_sampler_of(loader.loader) is None

    @property
    def _loop(self) -> Any:
        return active_loop_of(self._strategy.current_trainer)

    # Steps.

    def start_iterator(self, loader: DistributedLoader) -> Iterator[Any]:
        """Start an iterator over a loader of the running evaluation. Collective if it may be empty."""
        evaluated: EvaluatedLoader | None = loader.evaluated
        if evaluated is None:
            return iter(loader.loader)
        filled: list[int] = []
        if evaluated.even is not None and evaluated.permanent is not None:
            evaluated.permanent.draw_next_by(partial(evaluated.even.draw, filled))
        batches = iter(loader.loader)
        if evaluated.may_be_empty and _is_sequential(self._loop):
            return self._read_or_borrow(batches)
        return self._read_until_filled(evaluated, batches, filled)

    def _read_until_filled(
        self, evaluated: EvaluatedLoader, batches: Iterator[Any], filled: list[int]
    ) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            is_repeated = evaluated.even is not None and filled == [number]
            self._read.append(evaluated.even.filling_ranks if is_repeated else ())  # type: ignore[union-attr]
            yield batch

    def _read_or_borrow(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield a rank's own batches, or one batch of another rank if this rank has none. Collective."""
        context = current()
        group = None if context is None else context.new_group(backend="gloo", purpose="small collectives")
        ranks = Ranks(self._strategy.global_rank, self._strategy.world_size, group=group)
        first = list(islice(batches, 1))
        has_batch = ranks.gather(bool(first))
        idle_ranks: tuple[int, ...] = ()
        if any(has_batch) and not all(has_batch):
            idle_ranks = tuple(rank for rank, has in enumerate(has_batch) if not has)
            shared = first or [None]
            dist.broadcast_object_list(shared, src=has_batch.index(True), group=group)
            first = first or shared
        for batch in chain(first, batches):
            self._read.append(idle_ranks)
            idle_ranks = ()
            yield batch

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a step; on an idle rank, restore logged values and metrics afterwards."""
        # Lightning may read batches before the steps that they belong to.
        self.idle_ranks = self._read.popleft() if self._read else ()
        self.is_idle = self._strategy.global_rank in self.idle_ranks
        try:
            if not self.is_idle:
                yield
                return
            module = self._strategy.lightning_module
            with uncounted(results_of(module.trainer), module):
                yield
        finally:
            self.idle_ranks = ()


def _is_sequential(loop: Any) -> bool:
    """Whether a loop reads its loaders one after another, so that each step has a batch of one loader."""
    return mode_of(combined_loader_of(loop)) == "sequential"


def can_count_once(loader: DataLoader[Any]) -> bool:
    """Whether the last samples of a loader can be read in a batch of their own.

    With ``drop_last=True`` the user wants whole batches only, and a class with another ``__iter__`` may
    not yield one batch for each of its batch sampler.
    """
    drops = getattr(index_sampler_of(loader), "drop_last", False)
    return not drops and type(loader).__iter__.__module__.partition(".")[0] in ("torch", "torchdata")
