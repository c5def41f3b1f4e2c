"""Each sample is evaluated once: samplers, batches that do not count, and reductions without them."""

from __future__ import annotations

import functools
from collections.abc import Sized
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_ddp_ext.data.balance import (
    Balance,
    BalancedBatchSampler,
    LevelledBatchSampler,
    LevelledSampler,
    is_dealt_exactly,
    is_exact,
)
from lightning_ddp_ext.data.continued import index_sampler_name, put_index_sampler
from lightning_ddp_ext.data.default_samplers import SharedSampler
from lightning_ddp_ext.data.samplers import ExactDistributedSampler
from lightning_ddp_ext.errors import ExactEvaluationError, UnevenInputsError
from lightning_ddp_ext.integration.lightning_tree import DDPStrategy, RunningStage, rank_zero_warn, refuse_missing
from lightning_ddp_ext.integration.uncounted import uncounted

T = TypeVar("T")

EVALUATED = (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING, RunningStage.PREDICTING)
_LIMITS = {
    RunningStage.TRAINING: "limit_train_batches",
    RunningStage.TESTING: "limit_test_batches",
    RunningStage.PREDICTING: "limit_predict_batches",
}


class Evaluation:
    """Evaluation and prediction on a strategy's ranks.

    Where a rank has no batch for a step that others make, it takes part with a sample that does not count: what
    ``self.log`` and torchmetrics hold is put back afterwards, and reductions leave it out. What the user's own code
    gathers in lists or sends to callbacks cannot be put back, and the value of a single step of a metric with
    ``dist_sync_on_step`` includes it.

    Args:
        strategy: whose ranks.

    Attributes:
        absent: the ranks whose batch does not count in the step that all ranks are in.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy: DDPStrategy = strategy
        self.absent: tuple[int, ...] = ()
        self._has_warned = False
        self._found: WeakKeyDictionary[DataLoader[Any], Any] = WeakKeyDictionary()

    @property
    def _trainer(self) -> Any:
        assert self._strategy.lightning_module is not None
        return self._strategy.lightning_module.trainer

    # Loaders.

    def sampler_for(self, loader: DataLoader[Any], shuffle: bool, seed: int) -> Sampler[int]:
        """Each sample on one rank, in the order in which the loader would read them all."""
        strategy = self._strategy
        place = {"num_replicas": strategy.world_size, "rank": strategy.global_rank, "seed": seed}
        if isinstance(loader.sampler, (RandomSampler, SequentialSampler)):
            shuffle = shuffle and len(cast(Sized, loader.dataset)) > 0
            return ExactDistributedSampler(loader.dataset, shuffle=shuffle, **place)
        return SharedSampler(loader.sampler, uneven="exact", **place)

    def balance(self, loader: DataLoader[Any]) -> None:
        """Have all ranks make equally many steps over a loader with a sampler that deals out unevenly.

        Collective for loaders with batch samplers of other classes than torch's: every rank must call it.

        Args:
            loader: whatever its sampler; others than ours are left alone.

        Raises:
            ExactEvaluationError: a batch sampler has no length.
            UnevenInputsError: ranks would have different numbers of batches to train on.
        """
        stage = self._trainer.state.stage
        if loader.batch_sampler is None:
            if is_exact(loader.sampler):
                self._put(loader, LevelledSampler(loader.sampler))  # type: ignore[arg-type]
        elif stage == RunningStage.PREDICTING:
            self._balance_predictions(loader)
        elif is_dealt_exactly(loader.batch_sampler):
            self._put(loader, self._balanced(loader.batch_sampler))
        balance = balance_of(loader)
        if stage == RunningStage.TRAINING and balance is not None and not balance.is_even:
            raise UnevenInputsError(
                f"training needs equally many batches on every rank (got {balance.batches}, by rank); "
                'use a sampler with uneven="pad" or "drop", or drop_last=True, or a batch_size above 1 with a sample '
                "for every rank"
            )

    def _balance_predictions(self, loader: DataLoader[Any]) -> None:
        """Have no rank end up without batches, for which Lightning refuses a loader."""
        batch_sampler: Any = loader.batch_sampler
        inner = getattr(batch_sampler, "_batch_sampler", None)  # below Lightning's, which keeps indices
        if inner is not None and is_dealt_exactly(inner):
            balanced = self._balanced(inner)
            if 0 in balanced.balance.batches:
                put_index_sampler(loader, type(batch_sampler)(balanced))

    def _put(self, loader: DataLoader[Any], index_sampler: Any) -> None:
        self._found.setdefault(loader, getattr(loader, index_sampler_name(loader)))
        put_index_sampler(loader, index_sampler)

    def warn_of_repeats(self, loader: Any) -> None:
        """Say so, once, where a sampler that the user chose repeats samples."""
        sampler = getattr(loader, "sampler", None)
        if type(sampler) is not DistributedSampler or sampler.drop_last or self._has_warned:
            return
        samples = len(cast(Sized, sampler.dataset))
        if sampler.total_size != samples:
            self._has_warned = True
            rank_zero_warn(
                f"the loader's own DistributedSampler evaluates {sampler.total_size - samples} of {samples} samples "
                "twice; leave it out, or use lightning_ddp_ext.ExactDistributedSampler"
            )

    def put_back(self) -> None:
        """Leave loaders that are the user's as they were found."""
        for loader, index_sampler in self._found.items():
            put_index_sampler(loader, index_sampler)
        self._found.clear()

    def _balanced(self, batch_sampler: Any) -> BalancedBatchSampler | LevelledBatchSampler:
        if isinstance(batch_sampler, LevelledBatchSampler):  # the same loader, a second time
            batch_sampler = batch_sampler.batch_sampler
        if type(batch_sampler) not in (BatchSampler, BalancedBatchSampler):
            return LevelledBatchSampler(batch_sampler, self._lengths(batch_sampler), self._strategy.global_rank)
        balanced = BalancedBatchSampler(batch_sampler.sampler, batch_sampler.batch_size, batch_sampler.drop_last)
        balanced.divide = self._is_read_to_the_end(len(balanced))
        return balanced

    def _is_read_to_the_end(self, batches: int) -> bool:
        """Whether the Trainer's limit leaves the last of these batches; no halves are of use where it does not."""
        stage = self._trainer.state.stage
        limit: float = getattr(self._trainer, _LIMITS.get(stage, "limit_val_batches"))
        return limit >= (batches if isinstance(limit, int) else 1.0)

    def _lengths(self, batch_sampler: Any) -> list[int]:
        """How many batches each rank has, by rank. Collective."""
        try:
            length = len(batch_sampler)
        except (TypeError, NotImplementedError):
            length = -1
        by_rank: Any = self._strategy.all_gather(torch.tensor(length, device=self._strategy.root_device))
        lengths: list[int] = by_rank.flatten().tolist()
        if -1 in lengths:
            raise ExactEvaluationError(
                f"batch_sampler must have a length on every rank (got {type(batch_sampler).__name__} without one); "
                "give it a __len__, or set exact_evaluation=False"
            )
        return lengths

    # Steps.

    def attach(self, trainer: Any) -> None:
        """Have the Trainer's loops tell us of each step, so that batches that must not count do not."""
        for loop in (trainer.validate_loop, trainer.test_loop, trainer.fit_loop.epoch_loop.val_loop):
            refuse_missing(type(loop), "_evaluation_step")
            loop._evaluation_step = functools.partial(self._evaluate, trainer, loop)
        refuse_missing(type(trainer.predict_loop), "_predict_step")
        trainer.predict_loop._predict_step = functools.partial(self._predict, trainer.predict_loop)

    def _evaluate(self, trainer: Any, loop: Any, batch: Any, batch_idx: int, dataloader_idx: int, *rest: Any) -> None:
        def step() -> None:
            type(loop)._evaluation_step(loop, batch, batch_idx, dataloader_idx, *rest)

        self.absent = self._absent(loop, batch_idx, dataloader_idx, *rest)
        try:
            if self._strategy.global_rank in self.absent:
                with uncounted(loop._results, trainer.lightning_module):
                    step()
            else:
                step()
        finally:
            self.absent = ()

    def _predict(self, loop: Any, batch: Any, batch_idx: int, dataloader_idx: int, *rest: Any) -> None:
        absent = self._absent(loop, batch_idx, dataloader_idx, *rest)
        if self._strategy.global_rank not in absent:
            type(loop)._predict_step(loop, batch, batch_idx, dataloader_idx, *rest)

    def _absent(
        self, loop: Any, batch_idx: int, dataloader_idx: int, dataloader_iter: object | None = None
    ) -> tuple[int, ...]:
        """The ranks whose batch does not count in this step; arithmetic, and so the same on every rank."""
        combined = loop._combined_loader
        is_sequential = combined._mode == "sequential"
        if is_sequential and dataloader_iter is None:
            balance = balance_of(combined.flattened[dataloader_idx])
            return () if balance is None else balance.absent(batch_idx)
        for loader, limit in zip(combined.flattened, loop.max_batches, strict=True):
            self._refuse_absence(loader, limit if is_sequential else len(combined), dataloader_iter)
        return ()

    def _refuse_absence(self, loader: object, steps: float, dataloader_iter: object | None) -> None:
        """Batches come from here in a way in which one cannot be told from those that count."""
        balance = balance_of(loader)
        if balance is None or min(balance.batches) >= min(balance.steps, steps):
            return
        how = "a step that takes dataloader_iter" if dataloader_iter is not None else "a mode other than 'sequential'"
        raise ExactEvaluationError(
            f"every rank needs a batch of its own in every step where a CombinedLoader has {how} "
            f"(got {balance.batches} batches, by rank); use a batch_size above 1 and at least a sample for every rank, "
            "or drop_last=True, or exact_evaluation=False"
        )


def balance_of(loader: object) -> Balance | None:
    """What the ranks make of a loader together; ``None`` where that is nothing of ours."""
    sampler = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader, "sampler", None) if sampler is None else sampler
    for each in (sampler, getattr(sampler, "_batch_sampler", None)):  # the latter below Lightning's, in predictions
        if isinstance(each, (BalancedBatchSampler, LevelledBatchSampler, LevelledSampler)):
            return each.balance
    return None
