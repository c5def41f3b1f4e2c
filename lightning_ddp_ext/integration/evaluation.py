"""Evaluate each sample once; a rank that has no batch for a step is idle during that step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch.distributed as dist

from lightning_ddp_ext.data.loader import DistributedLoader, batches_of, index_sampler_of, make_permanent, own_copy
from lightning_ddp_ext.errors import SamplingError

from .compat import active_loop_of, combined_loader_of, mode_of
from .idle_steps import IdleSteps
from .lightning_tree import RunningStage
from .named_calls import refuse

EVALUATED = (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING, RunningStage.PREDICTING)


class Evaluation(IdleSteps):
    """Evaluation and prediction on a strategy's ranks.

    In validation and testing, a rank without a batch for a step that other ranks run is idle. It runs the step with a
    batch that does not count: the state of ``self.log`` and torchmetrics is restored after the step, and reductions
    leave the rank out. State that user code keeps itself, or counts in hooks around the step, cannot be restored.
    """

    def __init__(self, strategy: Any, *, is_exact: bool) -> None:
        super().__init__(strategy)
        self._is_exact = is_exact

    def balance(self, loader: DistributedLoader, stage: RunningStage) -> None:
        """Pad a loader of an exact validation or test, so that all ranks run the same number of steps. Collective."""
        if stage == RunningStage.PREDICTING:
            if batches_of(loader) == 0:
                loader.length = 1  # Lightning refuses a rank without batches; its iterator ends before the first one
        elif self._is_exact and dist.is_initialized() and self._strategy.world_size > 1:
            self._pad(loader)

    def _pad(self, loader: DistributedLoader) -> None:
        """Make a loader repeat its last batch until it has as many as the rank with the most, or raise. Collective."""
        sampler = index_sampler_of(loader.loader)
        batches = self._by_rank(batches_of(loader.loader if sampler is None else sampler))
        has_length = math.inf not in batches
        if len(set(batches)) == 1 and (has_length or sampler is None):
            return
        if sampler is None or not has_length:
            name = type(loader.loader).__name__
            where = f"{name} has no sampler with a length"
            refuse(self._strategy, _idle_rank_error(batches, where))
        spare = None
        if min(batches) == 0:  # such a rank reads another rank's first batch, whose indices are valid on all ranks
            spare = self._strategy.broadcast(list(islice(sampler, 1)), src=batches.index(max(batches)))[0]
        loader.balance, loader.length = batches, max(batches)
        loader.loader = own_copy(loader.loader)  # a stateful loader has not been copied yet
        make_permanent(loader.loader, padded_to=max(batches), spare=spare)

    def read(self, loader: DistributedLoader, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield a loader's batches and count the steps; raise if idle ranks cannot be determined."""
        combined = combined_loader_of(active_loop_of(self._strategy.current_trainer))
        if loader.balance is not None and (
            self._is_in_step or mode_of(combined) != "sequential" or batches_of(combined) == math.inf
        ):
            where = (
                "a step takes dataloader_iter, loaders are combined in a mode other than 'sequential', or one of them "
                "has no length"
            )
            refuse(self._strategy, _idle_rank_error(loader.balance, where))
        self._batches = dict(enumerate(loader.balance or ()))
        for self._step, batch in enumerate(batches):
            yield batch

    def end(self) -> None:
        """End the evaluation, after which no rank is idle."""
        self._batches = {}


def _idle_rank_error(batches: tuple[int, ...], where: str) -> SamplingError:
    unknown = "; inf means no length" if math.inf in batches else ""
    return SamplingError(
        f"every rank needs its own batch in every step if {where} (batches by rank: {batches}{unknown}); choose a "
        "batch_size that gives every rank the same number of batches, or set exact_evaluation=False"
    )
