"""Evaluate each sample once: samplers, steps that do not count, and the ranks that are idle in a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_ddp_ext.data.balance import (
    Balance,
    BalancedBatchSampler,
    PaddedBatchSampler,
    PaddedSampler,
    deals_unevenly,
    is_exact,
)
from lightning_ddp_ext.data.default_samplers import SharedSampler
from lightning_ddp_ext.data.loader import DistributedLoader, batches_of, set_index_sampler
from lightning_ddp_ext.data.metric_state import preserve_metric_state
from lightning_ddp_ext.data.samplers import ExactDistributedSampler
from lightning_ddp_ext.errors import ExactEvaluationError, UnevenInputsError
from lightning_ddp_ext.integration.compat import active_loop_of, combined_loader_of, mode_of, results_of
from lightning_ddp_ext.integration.lightning_tree import RunningStage, rank_zero_warn

IdleRanks = Literal["repeat", "skip"]

EVALUATED = (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING, RunningStage.PREDICTING)
_LIMITS = {
    RunningStage.TRAINING: "limit_train_batches",
    RunningStage.TESTING: "limit_test_batches",
    RunningStage.PREDICTING: "limit_predict_batches",
}


class Evaluation:
    """Evaluation and prediction on a strategy's ranks.

    A rank that has no batch for a step that others make is idle. By default it takes part with a sample that does not
    count: what ``self.log`` and torchmetrics hold is put back after the step, and reductions in the step leave it out.
    What the user's code keeps by itself, or counts in hooks around the step, cannot be put back; with
    ``idle_ranks="skip"`` an idle rank makes no step and calls no hook.

    Args:
        strategy: whose ranks.
        is_exact: whether ranks with different numbers of batches take part in equally many steps.
        idle_ranks: what an idle rank does.
    """

    def __init__(self, strategy: Any, *, is_exact: bool, idle_ranks: IdleRanks) -> None:
        self._strategy = strategy
        self._is_exact = is_exact
        self._idle_ranks = idle_ranks
        self._has_warned = False
        self._balance: Balance | None = None  # of the loader that is read
        self._step = 0
        self._is_in_step = False
        self.idle: tuple[int, ...] = ()
        """The ranks that are idle in the step that all ranks are in."""

    @property
    def _trainer(self) -> Any:
        return self._strategy.lightning_module.trainer

    @property
    def _has_others(self) -> bool:
        return dist.is_initialized() and self._strategy.world_size > 1

    # Loaders.

    def sampler_for(self, loader: DataLoader[Any], shuffle: bool, seed: int) -> Sampler[int]:
        """Each sample on one rank, in the order in which the loader would read them all."""
        ranks = {"num_replicas": self._strategy.world_size, "rank": self._strategy.global_rank, "seed": seed}
        if isinstance(loader.sampler, (RandomSampler, SequentialSampler)):
            shuffle = shuffle and len(cast(Any, loader.dataset)) > 0
            return ExactDistributedSampler(loader.dataset, shuffle=shuffle, **ranks)
        return SharedSampler(loader.sampler, uneven="exact", **ranks)

    def balance(self, loader: DistributedLoader, stage: RunningStage) -> None:
        """Have all ranks make equally many steps over a loader.

        Collective for loaders that may have different numbers of batches on the ranks: every rank must call it.

        Raises:
            ExactEvaluationError: a batch sampler has no length, or a rank has no batch to repeat or to skip to.
        """
        self._warn_of_repeats(loader.loader)
        if stage == RunningStage.PREDICTING:
            if batches_of(loader) == 0:
                loader.length = 1  # Lightning refuses a rank without batches; its pass ends before the first one
            return
        if not self._is_exact or not self._has_others:
            return
        loader.balance = self._balance_by_samples(loader.loader, stage) or self._balance_by_lengths(loader)
        if self._idle_ranks == "skip" and loader.balance is not None and min(loader.balance.batches) == 0:
            raise ExactEvaluationError(
                f"idle_ranks='skip' needs a batch for every rank (got {loader.balance.batches} batches, by rank); "
                "evaluate at least as many samples as there are ranks, or leave the argument out"
            )

    def check_training(self, loader: DistributedLoader) -> None:
        """Have all ranks train on equally many batches of a user's exact sampler.

        Raises:
            UnevenInputsError: they cannot; on every rank.
        """
        if not self._has_others or not deals_unevenly(getattr(loader.loader, "batch_sampler", None)):
            return
        balance = self._balance_by_samples(loader.loader, RunningStage.TRAINING)
        if balance is not None and not balance.is_even:
            raise UnevenInputsError(
                f"training needs equally many batches on every rank (got {balance.batches}, by rank); "
                'use a sampler with uneven="pad" or "drop", or drop_last=True, or a batch_size above 1 with a sample '
                "for every rank"
            )

    def _balance_by_samples(self, loader: Any, stage: RunningStage) -> Balance | None:
        """Put a balanced sampler over a sampler of ours that deals out unevenly."""
        if not isinstance(loader, DataLoader):
            return None
        sampler: Any
        if loader.batch_sampler is None:
            if not is_exact(loader.sampler):
                return None
            sampler = PaddedSampler(loader.sampler)  # type: ignore[arg-type]
        elif not deals_unevenly(loader.batch_sampler):
            return None
        elif type(loader.batch_sampler) is BatchSampler:
            own = loader.batch_sampler
            sampler = BalancedBatchSampler(own.sampler, own.batch_size, own.drop_last)  # type: ignore[arg-type]
            sampler.may_split = self._is_read_to_the_end(len(sampler), stage)
        else:
            lengths = self._lengths(loader.batch_sampler)
            sampler = PaddedBatchSampler(loader.batch_sampler, lengths, self._strategy.global_rank)
        set_index_sampler(loader, sampler)
        balance: Balance = sampler.balance
        return balance

    def _balance_by_lengths(self, loader: DistributedLoader) -> Balance | None:
        """Where ranks say that they have different numbers of batches, let all make as many steps as the longest."""
        if batches_of(loader) == float("inf"):
            return None
        balance = Balance(tuple(self._lengths(loader)))
        if balance.is_even:
            return None
        if min(balance.batches) == 0:
            raise ExactEvaluationError(
                f"every rank needs a batch of its own in an evaluation (got {balance.batches} batches, by rank, of "
                f"{type(loader.loader).__name__}); evaluate at least as many samples as there are ranks"
            )
        loader.length = balance.steps
        return balance

    def _is_read_to_the_end(self, batches: int, stage: RunningStage) -> bool:
        """Whether the Trainer's limit leaves the last of these batches; splitting is of no use where it does not."""
        limit: float = getattr(self._trainer, _LIMITS.get(stage, "limit_val_batches"))
        return limit >= (batches if isinstance(limit, int) else 1.0)

    def _lengths(self, batches: Any) -> list[int]:
        """How many batches each rank has, by rank. Collective."""
        length = batches_of(batches)
        own = torch.tensor(-1 if length == float("inf") else int(length), device=self._strategy.root_device)
        lengths: list[int] = self._strategy.all_gather(own).flatten().tolist()
        if -1 in lengths:
            raise ExactEvaluationError(
                f"batch_sampler must have a length on every rank (got {type(batches).__name__} without one); "
                "give it a __len__, or set exact_evaluation=False"
            )
        return lengths

    def _warn_of_repeats(self, loader: Any) -> None:
        """Say so, once, where a sampler that the user chose repeats samples."""
        sampler = getattr(loader, "sampler", None)
        if type(sampler) is not DistributedSampler or sampler.drop_last or self._has_warned:
            return
        samples = len(cast(Any, sampler.dataset))
        if sampler.total_size != samples:
            self._has_warned = True
            rank_zero_warn(
                f"the loader's own DistributedSampler evaluates {sampler.total_size - samples} of {samples} samples "
                "twice; leave it out, or use lightning_ddp_ext.ExactDistributedSampler"
            )

    # Reading.

    def begin(self, loader: DistributedLoader) -> Iterator[Any]:
        """Begin a pass over a loader.

        Raises:
            ExactEvaluationError: some rank is idle in a step in which that cannot be told from a batch that counts.
        """
        balance = loader.balance
        if balance is None:
            return self._give(iter(loader.loader), None)
        self._refuse_unknown_idle_ranks()
        own = balance.batches[self._strategy.global_rank]
        if self._idle_ranks == "skip":
            return self._give(islice(loader.loader, own), balance)
        return self._give(_repeating(loader.loader, own, balance.steps), balance)

    def _give(self, batches: Iterator[Any], balance: Balance | None) -> Iterator[Any]:
        for step, batch in enumerate(batches):
            self._balance, self._step = balance, step
            yield batch

    def _refuse_unknown_idle_ranks(self) -> None:
        combined = combined_loader_of(active_loop_of(self._trainer))
        is_sequential = mode_of(combined) == "sequential"
        is_pulled = self._is_in_step
        if is_sequential and not is_pulled:
            return
        for loader, limit in zip(combined.flattened, combined.limits, strict=True):
            balance, steps = loader.balance, limit if is_sequential else len(combined)
            if balance is not None and min(balance.batches) < min(balance.steps, steps):
                how = "a step that takes dataloader_iter" if is_pulled else "a mode other than 'sequential'"
                # Every rank finds the same; together, or the slower ones would hear of a failure instead of this.
                self._strategy.barrier("the refusal of idle ranks")
                raise ExactEvaluationError(
                    f"every rank needs a batch of its own in every step where a CombinedLoader has {how} "
                    f"(got {balance.batches} batches, by rank); use a batch_size above 1 and at least a sample for "
                    "every rank, or drop_last=True, or exact_evaluation=False"
                )

    # Steps.

    @property
    def is_idle(self) -> bool:
        """Whether this rank's present batch does not count."""
        return self._balance is not None and self._strategy.global_rank in self._balance.idle(self._step)

    def end(self) -> None:
        """The evaluation is over."""
        self._balance = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """One ``validation_step`` or ``test_step``: on an idle rank it leaves no trace in any metric."""
        self.idle = () if self._balance is None else self._balance.idle(self._step)
        is_idle = self._strategy.global_rank in self.idle
        self._is_in_step = True
        try:
            with self._uncounted() if is_idle else nullcontext():
                yield
        finally:
            self._is_in_step = False
            self.idle = ()

    def _uncounted(self) -> AbstractContextManager[None]:
        return preserve_metric_state(results_of(self._trainer), self._strategy.lightning_module)


def _repeating(loader: Any, own: int, steps: int) -> Iterator[Any]:
    """The first ``own`` batches, and then the first one again, until there are as many as steps.

    A loader whose sampler is balanced has as many by itself.
    """
    given = 0
    for batch in islice(loader, steps):
        given += 1
        yield batch
    for _ in range(given, steps):
        yield next(iter(loader))
