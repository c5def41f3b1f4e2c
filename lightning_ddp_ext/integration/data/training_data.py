"""Start the iterators over training data, and save each rank's position in them.

A checkpoint gets one additional section and is otherwise unchanged, so stock ``ddp``
can also resume from it. When a checkpoint is loaded, ``resume`` changes the loops'
state before Lightning reads it. The loaders' iterators start at the saved position
later, when their first batch is requested.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from lightning_ddp_ext.checkpoint.rank_records import Kind
from lightning_ddp_ext.data.epochs import start_epoch
from lightning_ddp_ext.data.loader import DistributedLoader, batches_of
from lightning_ddp_ext.data.random_state import record_random_state
from lightning_ddp_ext.data.seeding import WorkerSeeding, workers_seeded_apart

from ..checkpoints.collective import Checkpoints
from ..host import Host
from ..private.compat import (
    combined_iterator_of,
    combined_loader_of,
    fetcher_of,
    is_restored_from,
    iterators_of,
    schedule_timed_validation,
)
from ..private.lightning_tree import rank_zero_warn
from ..stopping.recorder import Recorder
from ..stopping.stops import StopController
from .loop_state import Restart, Stopped, epoch_of, find_restart
from .resume import (
    KEY,
    VERSION,
    Resume,
    ResumeData,
    positions_of,
    training_generators,
    without_random_state,
)
from .uneven import UnevenInputs

Moment = Literal["epoch", "step", "validation"]


@dataclass(frozen=True)
class Recorded:
    """A rank's state at the start of an epoch, an optimiser step or a validation.

    Attributes:
        random: the random states.
        given: the number of batches that each loader had given in the epoch.
    """

    random: list[Any]
    given: list[int]


class TrainingData:
    """The data-related state of training.

    It consists of the seed, the epoch, the resume, and recorded random states.

    Attributes:
        known_seed: the seed for the order of samples, once it is known.
        seeding: how ``SamplerEpochSeeding`` seeds loader workers.
    """

    def __init__(
        self,
        strategy: Host,
        checkpoints: Checkpoints,
        stops: StopController,
        recorder: Recorder,
        uneven: UnevenInputs,
        resume_data: ResumeData,
    ) -> None:
        self._strategy = strategy
        self._checkpoints = checkpoints
        self._stops = stops
        self._recorder = recorder
        self._uneven = uneven
        self.resume_data = resume_data
        self.known_seed: int | None = None
        # Whether the last epoch's data was exhausted when training ended.
        self._has_ended = False
        # Where it ended, if in the middle of an epoch, and this rank's state there.
        self._at_end: tuple[Restart, dict[str, Any]] | None = None
        self.attach()

    def attach(self, trainer: Any = None) -> None:
        """Reset the state for a Trainer that has not loaded a checkpoint."""
        if trainer is not None and trainer.state.fn == "fit":
            # Otherwise a checkpoint still describes the earlier training.
            self.known_seed = None
            self._has_ended = False
            self._at_end = None
        self.seeding: WorkerSeeding | None = None
        self.resume = self._new_resume()
        self._resumed_from: Mapping[str, Any] | None = None  # until Lightning's loops are restored
        self._recorded: dict[Moment, Recorded] = {}
        self._started_iterator: Any = None  # the combined iterator of the last epoch
        self._validated_at = math.inf

    def _new_resume(self) -> Resume:
        return Resume(self._strategy, self.in_epoch)

    def resume_from(self, checkpoint: dict[str, Any]) -> None:
        """Prepare to resume from a checkpoint, and change its loop state."""
        is_fitting = self._strategy.current_trainer.state.fn == "fit"
        if is_fitting and "loops" in checkpoint and self.resume_data != "stock":
            self.resume = Resume(self._strategy, self.in_epoch, checkpoint, self.resume_data)
            self._resumed_from = checkpoint

    def on_loops_restored(self, checkpoint: Mapping[str, Any]) -> None:
        """Drop the resume if the Trainer's loops were restored from another checkpoint.

        A ``LearningRateFinder`` makes Lightning restore its loops from the finder's own
        file, and from no other.
        """
        if is_restored_from(self._strategy.current_trainer, checkpoint):
            if checkpoint is not self._resumed_from:
                self.resume = self._new_resume()
            self._resumed_from = None

    @property
    def seed(self) -> int:
        """The seed for the order of samples.

        It is the seed of the resumed run, otherwise rank 0's. Collective the first
        time.
        """
        if self.known_seed is None:
            own = self._strategy.broadcast(int(os.environ.get("PL_GLOBAL_SEED", 0)))
            self.known_seed = own if self.resume.seed is None else self.resume.seed
        return self.known_seed

    @property
    def epoch(self) -> int:
        """The current or next training epoch.

        It is correct even before Lightning reads the checkpoint.
        """
        return max(epoch_of(self._strategy.current_trainer), self.resume.restart.epoch)

    def record_random_state(self, moment: Moment) -> None:
        """Record the random state at the start of what ``moment`` names."""
        self._recorded[moment] = self._current_state()

    def _current_state(self) -> Recorded:
        given = [position.given for position in positions_of(self._strategy.current_trainer)]
        return Recorded(record_random_state(training_generators(self._strategy)), given)

    def on_train_start(self) -> None:
        """Start training where the checkpoint left off."""
        self._validated_at = time.monotonic()
        self.resume.on_train_start()

    def on_validation_end(self) -> None:
        """Record the time of the validation.

        If the resume began with it, let the epoch end as usual.
        """
        self._validated_at = time.monotonic()
        self.resume.on_validation_end()

    def on_train_end(self) -> None:
        """Record where training ended.

        It is called before Lightning resets its loops and an evaluation removes the
        loaders.
        """
        loop = self._strategy.current_trainer.fit_loop
        self._has_ended = fetcher_of(loop).done
        # Its whole state would include those of loaders, which may be large.
        loops = {
            "epoch_progress": loop.epoch_progress.state_dict(),
            "epoch_loop.batch_progress": loop.epoch_loop.batch_progress.state_dict(),
        }
        restart = self._find_restart(loops)
        if restart.is_within:
            self._at_end = restart, self._own_state(restart, loops)

    def end(self) -> None:
        """End what must not outlive the Trainer's run."""
        self.resume.end()

    # Reading.

    @contextmanager
    def in_epoch(self, loader: DistributedLoader) -> Iterator[None]:
        """Set the current epoch in a loader whose iterator is created in the block."""
        epoch = self.epoch
        rank = self._strategy.global_rank
        keeps_workers = start_epoch(loader.loader, epoch, rank=rank, seeding=self.seeding)
        # A resumed run may start its workers later, when the original run drew no
        # number for them.
        is_later = keeps_workers and (epoch > 0 or loader.position is None)
        with workers_seeded_apart(loader.loader, epoch) if is_later else nullcontext():
            yield

    def start_iterator(self, loader: DistributedLoader, epoch: int) -> Iterator[Any]:
        """Start an iterator of the fit loop.

        The first one in an epoch also starts the iterators of the other loaders, so
        that all of them draw random numbers before any batch is read.
        """
        loop = self._strategy.current_trainer.fit_loop
        combined = combined_iterator_of(loop)
        if combined is self._started_iterator:
            return self._start_at_position(loader, is_restarted=True)
        self._started_iterator = combined
        self._start_epoch(epoch)
        batches = self._start_at_position(loader)
        for iterator in iterators_of(loop):
            if iterator.loader is not loader:
                iterator.start()
        if self.resume.restart.at == "batch_end":
            self.resume.restore_random_state()
        return batches

    def _start_epoch(self, epoch: int) -> None:
        if epoch > self.resume.restart.epoch:
            self.resume.end()
            self.resume = self._new_resume()
        resume = self.resume
        resume.find_data()
        resume.on_epoch_start()
        if not resume.restart.is_within:
            for position in positions_of(self._strategy.current_trainer):
                position.start_epoch(epoch)
        self.record_random_state("epoch")
        self._recorder.note(Kind.EPOCH)

    def _start_at_position(
        self, loader: DistributedLoader, *, is_restarted: bool = False
    ) -> Iterator[Any]:
        if self.resume.is_over:
            return iter(())
        batches = self._uneven.give_batches(loader.position.start_iterator(), loader.position)
        self._recorder.has_new_iterator = True
        if loader.position is not positions_of(self._strategy.current_trainer)[0]:
            return batches
        return _Announced(
            batches,
            self._before_batch,
            partial(_warn_of_early_end, loader),
            is_restarted=is_restarted,
        )

    def _before_batch(self) -> None:
        """Stop if the ranks agreed to, and record the random state of a new step."""
        trainer = self._strategy.current_trainer
        accumulated = trainer.accumulate_grad_batches
        self._stops.before_batch()
        schedule_timed_validation(trainer, self._validated_at)
        if trainer.fit_loop.epoch_loop.batch_progress.current.processed % accumulated == 0:
            self._recorder.note(Kind.WINDOW)
            if accumulated > 1:
                self.record_random_state("step")

    # Saving.

    def save_to(self, checkpoint: dict[str, Any], what: str) -> None:
        """Add all ranks' data positions to a checkpoint in the call ``what``.

        Collective unless interrupted.
        """
        if "loops" not in checkpoint:
            return
        trainer = self._strategy.current_trainer
        loops: Mapping[str, Any] = checkpoint["loops"]["fit_loop"]
        restart = self._find_restart(loops)
        has_loaders = combined_loader_of(trainer.fit_loop) is not None
        # In epoch 0 without loaders, nothing has been trained.
        needs_only_random_state = not restart.is_within and restart.epoch > 0
        if has_loaders or needs_only_random_state:
            own = self._own_state(restart, loops)
        elif self._at_end is not None and self._at_end[0] == restart:
            # An evaluation has removed the loaders.
            own = self._at_end[1]
        else:
            return
        if not self._checkpoints.is_interrupted:
            ranks = self._checkpoints.to_rank_zero(own, what)
        else:  # the other ranks skip this call
            ranks = [own if self._strategy.world_size == 1 else without_random_state(own)]
        checkpoint[KEY] = self.section(restart, self._stops.stopped, ranks)

    def _find_restart(self, loops: Mapping[str, Any]) -> Restart:
        trainer = self._strategy.current_trainer
        fetcher = fetcher_of(trainer.fit_loop)
        return find_restart(
            loops,
            accumulated=trainer.accumulate_grad_batches,
            stopped=self._stops.stopped,
            has_ended=self._has_ended if fetcher is None else fetcher.done,
        )

    def _own_state(self, restart: Restart, loops: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's random states and positions."""
        positions = positions_of(self._strategy.current_trainer) if restart.is_within else []
        recorded = self._state_of(restart, loops)
        loaders = [
            each.state_dict(restart.done, given)
            # Outside of an epoch there are no positions.
            for each, given in zip(positions, recorded.given, strict=False)
        ]
        return {"random": recorded.random, "loaders": loaders}

    def section(self, restart: Restart, stopped: Stopped | None, ranks: Any) -> dict[str, Any]:
        """Return the section for a checkpoint; ``ranks`` has each rank's state."""
        own = {"version": VERSION, "seed": self.known_seed, "restart": vars(restart)}
        return {**own, "stopped": stopped, "ranks": ranks}

    def _state_of(self, restart: Restart, loops: Mapping[str, Any]) -> Recorded:
        """Return the state recorded for a restart, or the current one if none was."""
        moment: Moment | None = None
        if restart.has_started:
            moment = "epoch"
        elif restart.at == "validation":
            moment = "validation"
        elif (
            restart.at == "batch_end"
            and restart.done < loops["epoch_loop.batch_progress"]["current"]["processed"]
        ):
            moment = "step"
        recorded = None if moment is None else self._recorded.get(moment)
        return recorded or self._current_state()


class _Announced(Iterator[Any]):
    """The batches of the first loader, each announced before it is requested.

    Each batch is announced once, also after the loader's end.

    Args:
        batches: an iterator over the loader.
        on_next: called when a batch is requested.
        on_end: called once, when a batch is requested after the last one.
        is_restarted: whether the batch that is requested first was announced when an
            earlier iterator ended.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        on_next: Callable[[], None],
        on_end: Callable[[], None],
        *,
        is_restarted: bool,
    ) -> None:
        self._batches = batches
        self._on_next = on_next
        self._on_end: Callable[[], None] | None = on_end
        self._is_announced = is_restarted

    def __next__(self) -> Any:
        if not self._is_announced:
            self._on_next()
        self._is_announced = False
        try:
            return next(self._batches)
        except StopIteration:
            if self._on_end is not None:
                self._on_end()
            self._on_end = None
            raise


def _warn_of_early_end(loader: DistributedLoader) -> None:
    """Warn if a loader ends before its length.

    Lightning finds the last batch by the length.
    """
    length = batches_of(loader)
    position = loader.position
    if position.given < length < math.inf:
        rank_zero_warn(
            f"{position.name} ended after {position.given} batches, but its length is {length:g},"
            " so Lightning did not know which batch was the last: validation, learning-rate"
            " schedulers and loggers that act at the end of an epoch were skipped, as with ddp;"
            " let __len__ return the number of samples of this rank, or remove it"
        )
