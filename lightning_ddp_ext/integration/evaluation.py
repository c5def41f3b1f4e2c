"""Evaluate each sample once; ranks without a batch for a step are idle in it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

from lightning_ddp_ext.data.batch_sampler import PermanentBatchSampler
from lightning_ddp_ext.data.loader import (
    DistributedLoader,
    batches_of,
    index_sampler_of,
    own_copy,
    set_index_sampler,
)
from lightning_ddp_ext.data.proxy import show
from lightning_ddp_ext.errors import SamplingError

from .compat import active_loop_of, combined_loader_of, mode_of
from .idle_steps import IdleSteps
from .lightning_tree import RunningStage, rank_zero_warn
from .named_calls import refuse

EVALUATED = (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING, RunningStage.PREDICTING)


class Evaluation(IdleSteps):
    """Evaluation and prediction on a strategy's ranks.

    A rank that has no batch for a step that others make is idle. It runs the step with a batch that does not count:
    the state of ``self.log`` and torchmetrics is restored after the step, and reductions in the step leave it out.
    State that user code keeps by itself, or counts in hooks around the step, cannot be restored.
    """

    def __init__(self, strategy: Any, *, is_exact: bool) -> None:
        super().__init__(strategy)
        self._is_exact = is_exact

    def balance(self, loader: DistributedLoader, stage: RunningStage) -> None:
        """Have all ranks run equally many steps over a loader. Collective: every rank must call it."""
        if self._is_exact:
            _warn_of_repeats(loader.loader)
        if stage == RunningStage.PREDICTING:
            if batches_of(loader) == 0:
                loader.length = 1  # Lightning refuses a rank without batches; its iterator ends before the first one
        elif self._is_exact and dist.is_initialized() and self._strategy.world_size > 1:
            self._pad(loader)

    def _pad(self, loader: DistributedLoader) -> None:
        """Have a loader repeat its last batch until it has as many as the longest rank. Collective."""
        sampler = index_sampler_of(loader.loader)
        batches = self._by_rank(batches_of(loader.loader if sampler is None else sampler))
        has_length = math.inf not in batches
        if len(set(batches)) == 1 and (has_length or sampler is None):
            return
        if sampler is None or not has_length:
            name = type(loader.loader).__name__
            where = f"{name} has no sampler with a length (inf: none)"
            refuse(self._strategy, _idle_rank_error(batches, where))
        spare = None
        if min(batches) == 0:  # it reads the first batch of another rank: any index of the sampler is valid
            spare = self._strategy.broadcast(list(islice(sampler, 1)), src=batches.index(max(batches)))[0]
        loader.balance, loader.length = batches, max(batches)
        loader.loader = own_copy(loader.loader)  # one with a state was not copied before
        permanent = PermanentBatchSampler(sampler, padded_to=max(batches), spare=spare)
        set_index_sampler(loader.loader, show(sampler, permanent))

    def read(self, loader: DistributedLoader, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches of a loader and count the steps; raise if idle ranks cannot be determined."""
        if loader.balance is not None:
            self._refuse_unknown_idle_ranks(loader.balance)
        for step, batch in enumerate(batches):
            self._batches, self._step = dict(enumerate(loader.balance or ())), step
            yield batch

    def _refuse_unknown_idle_ranks(self, batches: tuple[int, ...]) -> None:
        combined = combined_loader_of(active_loop_of(self._strategy.current_trainer))
        if self._is_in_step or mode_of(combined) != "sequential" or batches_of(combined) == math.inf:
            where = (
                "a step takes dataloader_iter, loaders are combined in another mode than 'sequential', or one of them "
                "has no length"
            )
            refuse(self._strategy, _idle_rank_error(batches, where))

    def end(self) -> None:
        """End the evaluation, after which no rank is idle."""
        self._batches = {}


def _warn_of_repeats(loader: Any) -> None:
    """Warn if a sampler that the user chose repeats samples."""
    sampler = getattr(loader, "sampler", None)
    if type(sampler) is DistributedSampler and sampler.total_size > len(cast(Any, sampler.dataset)):
        rank_zero_warn(
            "the loader's own DistributedSampler evaluates some samples twice; leave it out, or use "
            "lightning_ddp_ext.ExactDistributedSampler"
        )


def _idle_rank_error(batches: tuple[int, ...], where: str) -> SamplingError:
    return SamplingError(
        f"every rank needs its own batch in every step if {where} (got {batches} batches, by rank); choose a "
        "batch_size that gives all ranks equally many batches, or set exact_evaluation=False"
    )
