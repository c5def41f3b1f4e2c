"""Where training is in its data: what a checkpoint says about it, and where each iterator over a loader begins.

A checkpoint gets a section of its own, and nothing else of it is changed, so that stock ``ddp`` can resume it, too.
When it is loaded, ``resume`` changes the state of the loops before Lightning reads it; the loaders begin here, when
their first batches are asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lightning_ddp_ext.data.generators import take_random
from lightning_ddp_ext.data.loader import DistributedLoader
from lightning_ddp_ext.data.position import LoaderPosition

from .compat import TimedValidation, combined_iterator_of, combined_loader_of, iterators_of
from .lightning_tree import rank_zero_info
from .loop_state import Restart, epoch_of, find_restart
from .resume import KEY, VERSION, Resume, ResumeData, in_common, positions_of
from .uneven import UnevenInputs


class TrainingData:
    """The training loaders of a strategy's ranks, and how far each is read."""

    def __init__(self, strategy: Any, uneven: UnevenInputs, resume_data: ResumeData) -> None:
        self._strategy = strategy
        self._uneven = uneven
        self._resume_data = resume_data
        self.attach()

    def attach(self, trainer: Any = None) -> None:
        """Begin with a Trainer that has not loaded anything."""
        if trainer is None or trainer.state.fn == "fit":  # what is saved after a validation is of the training before
            self._seed: int | None = None
        self.resume = Resume(self._strategy)
        self._timed_validation = TimedValidation()
        self._begun: Any = None
        self._random: dict[str, dict[str, Any]] = {}  # when the last epoch, step and validation began

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Prepare to go on where a checkpoint was saved, and change the state of its loops for that."""
        module = self._strategy.lightning_module
        is_fitting = module is not None and module._trainer is not None and module._trainer.state.fn == "fit"
        if is_fitting and "loops" in checkpoint and self._resume_data != "off":
            self.resume = Resume(self._strategy, checkpoint, self._resume_data)

    def on_validation_start(self) -> None:
        """Remember the random numbers with which the validation could begin again."""
        if self._strategy.current_trainer.state.fn == "fit":
            self._random["validation"] = take_random(self._device)

    @property
    def seed(self) -> int:
        """The seed of the orders of samples: the resumed run's, else rank 0's. Collective, the first time."""
        if self._seed is None:
            self._seed = self._strategy.broadcast(int(os.environ.get("PL_GLOBAL_SEED", 0)))
            resumed = self.resume.seed
            if resumed is not None and resumed != self._seed:
                rank_zero_info(f"samples are shuffled with the checkpoint's seed, {resumed}, not {self._seed}")
                self._seed = resumed
        return self._seed

    # Reading.

    @property
    def epoch(self) -> int:
        """The epoch that is trained, or that is trained next, also before Lightning has read its checkpoint."""
        return max(epoch_of(self._strategy.current_trainer), self.resume.restart.epoch)

    def begin(self, loader: DistributedLoader, epoch: int) -> Iterator[Any]:
        """Begin an iterator of the Trainer over a loader: at its start, or where a checkpoint left it.

        The first one of an epoch begins those of the other loaders, too, so that all draw random numbers before a batch
        is read.
        """
        combined = combined_iterator_of(self._strategy.current_trainer.fit_loop)
        if combined is self._begun:
            return self._begin_iterator(loader)
        self._begun = combined
        self._start_epoch(epoch)
        batches = self._begin_iterator(loader)
        for iterator in iterators_of(self._strategy.current_trainer.fit_loop):
            if iterator.loader is not loader:
                iterator.begin()
        if self.resume.restart.at == "batch_end":
            self.resume.restore_random()
        return batches

    def _start_epoch(self, epoch: int) -> None:
        if epoch > self.resume.restart.epoch:
            self.resume = Resume(self._strategy)
        restart = self.resume.restart
        # Without a length Lightning reads the first batch before training starts, and so before it is restored there.
        if restart.has_started or (restart.at == "epoch_start" and not self.resume.has_restored_random):
            self.resume.restore_random()
        if restart.is_within:
            self.resume.find_data()
        for index, position in enumerate(positions_of(self._strategy.current_trainer)):
            position.start_epoch(epoch, done=self.resume.done, state=self.resume.state_of(index))
        self._random["epoch"] = take_random(self._device)

    def _begin_iterator(self, loader: DistributedLoader) -> Iterator[Any]:
        if self.resume.is_over:
            return iter(())
        position: LoaderPosition = loader.position
        batches = self._uneven.begin(position)
        is_first = position is positions_of(self._strategy.current_trainer)[0]
        return self._announce(batches) if is_first else batches

    def _announce(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Stop before a batch if the ranks have agreed to; remember the random numbers of the last optimiser step."""
        accumulated = self._strategy.current_trainer.accumulate_grad_batches
        progress = self._strategy.current_trainer.fit_loop.epoch_loop.batch_progress.current
        while True:
            self._strategy.stops.before_batch()
            self._timed_validation.before_batch(self._strategy.current_trainer)
            if accumulated > 1 and progress.ready % accumulated == 0:
                self._random["step"] = take_random(self._device)
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    # Saving.

    def save_to(self, checkpoint: dict[str, Any], what: str) -> None:
        """Put into a checkpoint where each rank's data are, in the call ``what``. Collective, unless interrupted."""
        if "loops" not in checkpoint:
            return
        trainer, checkpoints, stopped = (
            self._strategy.current_trainer,
            self._strategy.checkpoints,
            self._strategy.stops.stopped,
        )
        loops: Mapping[str, Any] = checkpoint["loops"]["fit_loop"]
        accumulated = trainer.accumulate_grad_batches
        restart = find_restart(loops, accumulated=accumulated, stopped=stopped)
        has_loaders = combined_loader_of(trainer.fit_loop) is not None
        if not has_loaders and (restart.is_within or restart.epoch == 0):  # a validation makes Lightning forget them
            return
        positions = positions_of(trainer) if restart.is_within else []
        own = {
            "random": self._random_of(restart, loops),
            "loaders": [position.state_dict(restart.done) for position in positions],
        }
        if not checkpoints.is_interrupted:
            ranks = checkpoints.to_rank_zero(own, what)
        else:  # the others do not come
            ranks = [own if self._strategy.world_size == 1 else in_common(own)]
        checkpoint[KEY] = {
            "version": VERSION,
            "seed": self._seed,
            "accumulate_grad_batches": accumulated,
            "stopped": stopped,
            "ranks": ranks,
        }

    def _random_of(self, restart: Restart, loops: Mapping[str, Any]) -> dict[str, Any]:
        """The random numbers with which training goes on at a restart."""
        moment = "now"
        if restart.has_started:
            moment = "epoch"
        elif restart.at == "validation":
            moment = "validation"
        elif restart.at == "batch_end" and restart.done < loops["epoch_loop.batch_progress"]["current"]["processed"]:
            moment = "step"
        return self._random.get(moment) or take_random(self._device)

    # What the Trainer and the strategy have.

    @property
    def _device(self) -> torch.device:
        return self._strategy.root_device  # type: ignore[no-any-return]
