"""Follow training from epoch to epoch, and start the iterators of its loaders.

A loader's iterator does nothing until its first batch is requested. These steps follow:

1. ``LazyIterator.__next__`` calls :meth:`EpochCursor.start`, which sets the epoch in
   the loader.
2. If the iterator is the first of its epoch, ``_enter_epoch`` finds the position at
   which the epoch begins or continues.
3. ``_start_together`` starts the iterators of all loaders, so that all of them draw
   random numbers before any batch is read.
4. ``_start_at_position`` starts each of them.
5. ``_before_batch`` is called before each request of a batch from the first loader.

Without a checkpoint, every epoch begins at its first batch. A checkpoint decides about
one epoch, see ``resumed_epoch``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from lightning_ddp_ext.checkpoint.rank_records import Kind
from lightning_ddp_ext.data.loader import DistributedLoader, LazyIterator, TrainingLoader, own_copy
from lightning_ddp_ext.data.loader_kinds import rewind
from lightning_ddp_ext.data.seeding import WorkerSeeding

from ..private.compat import active_loop_of, combined_iterator_of, iterators_of
from ..private.replaced_methods import ReplacedMethods
from ..start.devices import RankDevicesStrategy
from ..stopping.recorder import Recorder
from ..stopping.stops import StopController
from .loop_state import Restart
from .position_saver import PositionSaver
from .positions import epoch_of, positions_of
from .resumed_epoch import ResumedEpoch
from .saved_epoch import read_saved
from .uneven import UnevenInputs

ResumeData = Literal["exact", "strict", "epoch", "stock"]


@dataclass(frozen=True)
class RunParts:
    """The parts of a strategy that follow a Trainer's run.

    Attributes:
        stops: stops all ranks before a batch.
        recorder: records each step for a rescue.
        replaced: restores what a run changes in Lightning.
    """

    stops: StopController
    recorder: Recorder
    replaced: ReplacedMethods


class EpochCursor:
    """The current epoch of training and the position in it.

    Args:
        strategy: our strategy.
        parts: the strategy's other parts.
        uneven: ends epochs on all ranks together.
        saver: saves the position.
        resume_data: see ``DDPExtStrategy``.

    Attributes:
        resume_data: the argument.
        known_seed: the seed for the order of samples, once it is known.
        seeding: how ``SamplerEpochSeeding`` seeds loader workers; the callback sets it
            in its ``setup``, before a checkpoint is restored.
    """

    def __init__(
        self,
        strategy: RankDevicesStrategy,
        parts: RunParts,
        uneven: UnevenInputs,
        saver: PositionSaver,
        resume_data: ResumeData,
    ) -> None:
        self._strategy = strategy
        self._parts = parts
        self._uneven = uneven
        self._saver = saver
        self.resume_data = resume_data
        self.known_seed: int | None = None
        self._reset()

    def _reset(self) -> None:
        self.seeding: WorkerSeeding | None = None
        self._resumed: ResumedEpoch | None = None
        self._combined_iterator: Any = None  # of the epoch that was entered last

    @property
    def _trainer(self) -> Any:
        return self._strategy.current_trainer

    def attach(self, trainer: Any) -> None:
        """Reset the state for a Trainer that has not loaded a checkpoint."""
        if trainer.state.fn == "fit":
            # A checkpoint that is saved after an evaluation has the seed of the fit before it.
            self.known_seed = None
        self._reset()

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Prepare to resume from a checkpoint, and change its loop state."""
        is_fitting = self._trainer.state.fn == "fit"
        if not is_fitting or "loops" not in checkpoint or self.resume_data == "stock":
            return
        saved = read_saved(
            checkpoint,
            rank=self._strategy.global_rank,
            accumulated=self._trainer.accumulate_grad_batches,
            repeats_epoch=self.resume_data == "epoch",
        )
        checkpoint["loops"]["fit_loop"] = saved.loops_at(saved.restart)
        if saved.seed is not None:
            self.known_seed = saved.seed
        self._saver.had_seeded_validation = saved.own.has_seeded_validation
        self._resumed = ResumedEpoch(
            self._strategy,
            self._parts.replaced,
            saved,
            seeding=self.seeding,
            is_strict=self.resume_data == "strict",
        )

    @property
    def seed(self) -> int:
        """The seed for the order of samples.

        It is the seed of the resumed run, otherwise rank 0's. Collective the first
        time.
        """
        if self.known_seed is None:
            self.known_seed = self._strategy.broadcast(int(os.environ.get("PL_GLOBAL_SEED", 0)))
        return self.known_seed

    @property
    def epoch(self) -> int:
        """The current or next training epoch.

        It is correct even before Lightning reads the checkpoint.
        """
        epoch = epoch_of(self._trainer)
        return epoch if self._resumed is None else max(epoch, self._resumed.restart.epoch)

    def has_seeded_validation(self, restart: Restart) -> bool:
        """Whether workers for validation persist and had been seeded before a restart."""
        is_in_validation = restart.at == "validation" and self._trainer.validating
        return self._saver.has_seeded_validation(restart.epoch, before_latest=is_in_validation)

    # Iterators.

    def free_loaders(self) -> None:
        """Refer to no loader of an earlier epoch, since new ones are prepared.

        Otherwise the earlier data and workers would be in memory beside the new ones.
        """
        self._combined_iterator = None

    def start(self, loader: DistributedLoader, iterator: LazyIterator) -> Iterator[Any]:
        """Start an iterator over a loader, because its first batch was requested.

        An iterator of the fit loop starts at the training position, any other one at
        the beginning. If user code iterates over a loader, no epoch is set and a copy
        of the loader is read, because a loop may be reading the loader itself.
        """
        trainer = self._trainer
        loop = trainer.fit_loop if isinstance(loader, TrainingLoader) else active_loop_of(trainer)
        is_read_by_loop = any(iterator is other for other in iterators_of(loop))
        if is_read_by_loop:
            # Without a length, Lightning reads a resumed epoch's first batch before it
            # sets the epoch of samplers.
            is_set_by_lightning = self._resumed is None or self._resumed.is_training
            loader.set_epoch(self.epoch, is_set_by_lightning=is_set_by_lightning)
        rank = self._strategy.global_rank
        with loader.workers_of(self.epoch, rank=rank, seeding=self.seeding):
            if isinstance(loader, TrainingLoader) and is_read_by_loop:
                return self._start_training(loader, iterator)
            rewind(loader.loader)
            if is_read_by_loop:
                return loader.start_evaluation(loader.loader)
            return iter(own_copy(loader.loader))

    def _start_training(self, loader: TrainingLoader, iterator: LazyIterator) -> Iterator[Any]:
        """Start an iterator of the fit loop, with all others if an epoch begins.

        If a loader that is shorter than the epoch begins again, its ended iterator has
        already called ``_before_batch`` for this batch.
        """
        if combined_iterator_of(self._trainer.fit_loop) is self._combined_iterator:
            return self._start_at_position(loader, iterator)
        self._enter_epoch()
        batches = self._start_together(loader, iterator)
        if iterator.before_next is not None:
            iterator.before_next()
        return batches

    def _enter_epoch(self) -> None:
        """Find the position at which the epoch begins or continues."""
        self._combined_iterator = combined_iterator_of(self._trainer.fit_loop)
        epoch = self.epoch
        if self._resumed is not None and epoch > self._resumed.restart.epoch:
            self._resumed = None
        if self._resumed is not None:
            self._resumed.before_iterators()
        continues = self._resumed is not None and self._resumed.restart.is_within
        if not continues:
            for position in positions_of(self._trainer):
                position.start_epoch(epoch)
        self._saver.record("epoch")
        self._parts.recorder.record(Kind.EPOCH)

    def _start_together(self, loader: TrainingLoader, iterator: LazyIterator) -> Iterator[Any]:
        """Start the iterators of all training loaders, and return the batches of one."""
        batches = self._start_at_position(loader, iterator)
        for other in iterators_of(self._trainer.fit_loop):
            if other is not iterator:
                other.start()
        if self._resumed is not None:
            self._resumed.after_iterators()
        return batches

    def _start_at_position(self, loader: TrainingLoader, iterator: LazyIterator) -> Iterator[Any]:
        """Start an iterator over a training loader at the loader's position."""
        if self._resumed is not None and self._resumed.has_no_batches_left:
            return iter(())
        rest = loader.position.start_iterator(loader.draw_seed)
        loader.position.taken_ahead = self._uneven.ahead
        batches = loader.position.give(self._uneven.give_batches(rest))
        self._parts.recorder.has_new_iterator = True
        is_first_loader = loader.position is positions_of(self._trainer)[0]
        if is_first_loader:
            iterator.before_next = self._before_batch
        return batches

    def _before_batch(self) -> None:
        """Stop if the ranks agreed to, and record the state if an optimiser step begins."""
        self._parts.stops.before_batch()
        accumulated = self._trainer.accumulate_grad_batches
        processed = self._trainer.fit_loop.epoch_loop.batch_progress.current.processed
        is_within_step = processed % accumulated > 0
        if is_within_step:
            return
        self._parts.recorder.record(Kind.WINDOW)
        if accumulated > 1:
            self._saver.record("step")

    # Hooks of the fit loop.

    def on_train_start(self) -> None:
        """Set the counters and the random state with which training continues."""
        if self._resumed is None:
            return
        if self._resumed.describes_loops:
            self._resumed.on_train_start()
        else:
            # A `LearningRateFinder` has set the loops to its own file.
            self._resumed = None

    def on_train_batch_start(self) -> None:
        """Let Lightning's loops continue as usual in a resumed epoch."""
        if self._resumed is not None:
            self._resumed.on_train_batch_start()

    def on_validation_end(self) -> None:
        """Let a resumed epoch end as usual.

        If the resume began with this validation, the end of the epoch would otherwise skip
        schedulers that monitor a metric.
        """
        if self._resumed is not None:
            self._resumed.on_validation_end()
