"""Start the iterators over a strategy's loaders: at the start of the data, or where training has to continue.

An iterator starts when its first batch is asked for: at the beginning, if a loop evaluates or if the user looks at a
batch, and where training is, if the fit loop reads it. The first iterator of an epoch also starts the epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_ddp_ext.data.epochs import start_epoch
from lightning_ddp_ext.data.loader import DistributedLoader, LazyIterator, own_copy
from lightning_ddp_ext.data.loader_kinds import rewind
from lightning_ddp_ext.data.position import LoaderPosition

from .compat import TimedValidation, active_loop_of, combined_iterator_of, iterators_of
from .evaluation import Evaluation
from .resume import positions_of
from .training_data import TrainingData
from .uneven import UnevenInputs


class IteratorStarts:
    """The starts of all iterators over a strategy's loaders; for ``worker_seed`` see ``SamplerEpochSeeding``."""

    def __init__(self, strategy: Any, training: TrainingData, uneven: UnevenInputs, evaluation: Evaluation) -> None:
        self._strategy = strategy
        self._training = training
        self._uneven = uneven
        self._evaluation = evaluation
        self.worker_seed: int | None = None
        self.attach()

    def attach(self) -> None:
        """Prepare for a Trainer that has not read anything."""
        self._epoch_started: Any = None  # the combined iterator of the newest epoch
        self._timed_validation = TimedValidation()

    def start_iterator(self, loader: DistributedLoader, iterator: LazyIterator) -> Iterator[Any]:
        """Start an iterator over a loader, whose first batch has just been asked for."""
        trainer = self._strategy.current_trainer
        epoch = self._training.epoch
        start_epoch(loader.loader, epoch, rank=trainer.global_rank, seed=self.worker_seed)
        is_trained = loader.position is not None
        loop = trainer.fit_loop if is_trained else active_loop_of(trainer)
        if not any(iterator is each for each in iterators_of(loop)):
            rewind(loader.loader)
            return iter(own_copy(loader.loader))  # leaves the workers of the loop's own iterator alone
        if is_trained:
            return self._start_in_training(loader, epoch)
        rewind(loader.loader)
        return self._evaluation.read(loader)

    def _start_in_training(self, loader: DistributedLoader, epoch: int) -> Iterator[Any]:
        """Start an iterator of the fit loop.

        The first one of an epoch starts those of the other loaders as well, so that all draw random numbers before a
        batch is read.
        """
        loop = self._strategy.current_trainer.fit_loop
        combined = combined_iterator_of(loop)
        if combined is self._epoch_started:
            return self._start_at_position(loader)
        self._epoch_started = combined
        self._start_epoch(epoch)
        batches = self._start_at_position(loader)
        for iterator in iterators_of(loop):
            if iterator.loader is not loader:
                iterator.start()
        if self._training.resume.restart.at == "batch_end":
            self._training.resume.restore_random_state()
        return batches

    def _start_epoch(self, epoch: int) -> None:
        resume = self._training.start_epoch(epoch)
        # Without a length Lightning reads the first batch before training starts, and so before it is restored there.
        if resume.restart.has_started or (resume.restart.at == "epoch_start" and not resume.has_restored_random):
            resume.restore_random_state()
        if resume.restart.is_within:
            resume.find_data()
        for index, position in enumerate(positions_of(self._strategy.current_trainer)):
            position.start_epoch(epoch, done=resume.done, state=resume.state_of(index))
        self._training.record_random_state("epoch")

    def _start_at_position(self, loader: DistributedLoader) -> Iterator[Any]:
        if self._training.resume.is_over:
            return iter(())
        position: LoaderPosition = loader.position
        batches = self._uneven.end_together(position.start_iterator(), position)
        is_first = position is positions_of(self._strategy.current_trainer)[0]
        return self._announce(batches) if is_first else batches

    def _announce(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Stop before a batch if the ranks have agreed to; record the random state of the last optimiser step."""
        trainer = self._strategy.current_trainer
        accumulated = trainer.accumulate_grad_batches
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        while True:
            self._strategy.stops.before_batch()
            self._timed_validation.before_batch(trainer)
            if accumulated > 1 and progress.ready % accumulated == 0:
                self._training.record_random_state("step")
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch
