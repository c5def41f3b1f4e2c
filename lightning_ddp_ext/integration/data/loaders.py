"""Wrap the loaders of a strategy.

Lightning calls :meth:`TrainerLoaders.prepare` where it would put its own sampler into a
loader. The result appears to be the user's loader; it iterates a ``DistributedLoader``,
whose iterators :class:`~.cursor.EpochCursor` starts.
"""

from __future__ import annotations

from typing import Any, get_args

from lightning_ddp_ext.arguments import check_choice
from lightning_ddp_ext.checkpoint.rank_records import Kind
from lightning_ddp_ext.data.loader import DistributedLoader, TrainingLoader, source_of
from lightning_ddp_ext.data.loader_kinds import global_order_of, position_of, rewind

from ..checkpoints.collective import Checkpoints
from ..private.lightning_tree import RunningStage, pl
from ..private.replaced_methods import Prepare
from ..start.devices import RankDevicesStrategy
from .cursor import EpochCursor, ResumeData, RunParts
from .evaluation import Evaluation
from .position_saver import PositionSaver
from .positions import training_loaders_of, validation_loaders_of
from .sampler_choice import divide
from .uneven import UnevenInputs, UnevenMode

# A checkpoint may lag these batches behind, besides those of an optimiser step.
_BATCHES_BEHIND = 4


class TrainerLoaders:
    """The loaders of a strategy's ranks, and the parts of the strategy that read them.

    Args:
        strategy: our strategy.
        checkpoints: gathers the ranks' states.
        parts: other parts of the strategy.
        exact_evaluation, uneven_inputs, resume_data: see ``DDPExtStrategy``.

    Attributes:
        uneven: handles ranks with different numbers of training batches.
        evaluation: counts each sample once.
        saver: saves the training position.
        cursor: starts iterators at it.
    """

    def __init__(
        self,
        strategy: RankDevicesStrategy,
        checkpoints: Checkpoints,
        parts: RunParts,
        *,
        exact_evaluation: bool,
        uneven_inputs: UnevenMode | None,
        resume_data: ResumeData,
    ) -> None:
        check_choice("exact_evaluation", exact_evaluation, True, False)
        check_choice("resume_data", resume_data, *get_args(ResumeData))
        check_choice("uneven_inputs", uneven_inputs, None, *get_args(UnevenMode))
        self._strategy = strategy
        self._parts = parts
        self.uneven = UnevenInputs(strategy, uneven_inputs)
        self.evaluation = Evaluation(strategy, is_exact=exact_evaluation)
        self.saver = PositionSaver(strategy, checkpoints, parts.stops)
        self.cursor = EpochCursor(strategy, parts, self.uneven, self.saver, resume_data)

    def attach(self, trainer: Any) -> None:
        """Reset the state, and make a Trainer call :meth:`prepare`.

        The Trainer then calls it where it would put its own sampler into a loader.
        """
        self.saver.attach(trainer)
        self.cursor.attach(trainer)
        self.uneven.start_run()
        self.evaluation.end()
        self._parts.replaced.prepare_loaders(trainer, by=self.prepare)

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Prepare to resume from a checkpoint, also if hooks have already loaded the data."""
        self.cursor.restore(checkpoint)
        for loader in training_loaders_of(self._strategy.current_trainer):
            sampler = global_order_of(loader.loader)
            if loader.is_dealt and sampler is not None:
                # Until now, it had the seed of this run instead of the resumed one's.
                sampler.seed = self.cursor.seed
                loader.position.read_parameters()

    def on_train_batch_start(self, batch: Any) -> None:
        """Let the loops continue as usual, and compare the ranks' first batches.

        Collective if the loaders are new.
        """
        self.cursor.on_train_batch_start()
        self.uneven.on_train_batch_start(batch)

    def prepare(
        self, as_lightning: Prepare, dataloader: Any, shuffle: bool, stage: RunningStage
    ) -> object:
        """Return the loader that the Trainer reads in place of the given one.

        Collective: every rank must call it.
        """
        source = source_of(dataloader)  # another Trainer or stage may have prepared it already
        if stage == RunningStage.PREDICTING:
            rewind(source)  # one of our samplers may continue in the middle of an epoch
            return as_lightning(source, shuffle, stage)
        divided = divide(
            self._strategy,
            source,
            stage,
            shuffle=shuffle,
            counts_once=self.evaluation.is_exact,
            seed=lambda: self.cursor.seed,
        )
        if divided is None:
            divided = as_lightning(source, shuffle, stage)
        kind = TrainingLoader if stage == RunningStage.TRAINING else DistributedLoader
        loader = kind(divided, self.cursor.start, is_dealt=divided is not source)
        if isinstance(loader, TrainingLoader):
            self._prepare_training(loader)
        else:
            self._prepare_evaluation(loader, stage)
        return loader.shown()

    def _prepare_evaluation(self, loader: DistributedLoader, stage: RunningStage) -> None:
        self.evaluation.prepare(loader, stage)
        loader.on_iterator = self._before_validation
        # Loaders that are made again in this run have new workers.
        is_made_again = bool(validation_loaders_of(self._strategy.current_trainer))
        if self.saver.had_seeded_validation and not is_made_again:
            loader.worker_seed.mark_seeded_in_resumed_run()

    def _prepare_training(self, loader: TrainingLoader) -> None:
        self.cursor.free_loaders()
        self.uneven.agree_on_length(loader)
        trainer = self._strategy.current_trainer
        loader.position = position_of(
            loader.loader,
            world_size=self._strategy.world_size,
            remembered=_most_batches_per_step(trainer) + _BATCHES_BEHIND,
        )
        loader.position.generators.append(loader.worker_seed.generator)

    def _before_validation(self, loader: DistributedLoader) -> None:
        """Record the weights and the random state before any validation hook runs.

        A hook may exchange the weights. Iterators have drawn no random numbers yet.
        """
        trainer = self._strategy.current_trainer
        self._parts.stops.weights.before_validation(trainer)
        self._parts.recorder.before_validation()
        has_begun = trainer.fit_loop.epoch_loop.val_loop.batch_progress.current.ready > 0
        is_first_loader = validation_loaders_of(trainer)[:1] == [loader]
        if trainer.validating and is_first_loader and not has_begun:
            self.saver.record("validation")
            self._parts.recorder.record(Kind.BATCH)


def _most_batches_per_step(trainer: Any) -> int:
    """Return the most batches that an optimiser step of this run may have.

    GradientAccumulationScheduler sets the Trainer's value only when an epoch starts.
    """
    scheduled = [
        batches
        for callback in trainer.callbacks
        if isinstance(callback, pl.callbacks.GradientAccumulationScheduler)
        for batches in callback.scheduling.values()
    ]
    return int(max([trainer.accumulate_grad_batches, *scheduled]))
