"""Follow training from epoch to epoch, and begin where a checkpoint left off.

A loader's iterator does nothing until its first batch is requested. These steps follow:

1. ``LazyIterator.__next__`` calls :meth:`EpochCursor.start`, which sets the epoch in
   the loader.
2. If the iterator is the first of its epoch, ``_enter_epoch`` finds the position at
   which the epoch begins or continues.
3. ``_start_together`` starts the iterators of all loaders, so that all of them draw
   random numbers before any batch is read.
4. ``_start_at_position`` starts each of them.

A checkpoint decides about one epoch, ``resumed``. It passes through three phases:

=========  ==================  ====================================================
phase      ``resumed``         meaning
=========  ==================  ====================================================
beginning  ``None``            no checkpoint decides, or none does any longer
saved      without ``placed``  the checkpoint was read, its loaders are not known yet
placed     with ``placed``     each loader continues, or the whole epoch is repeated
=========  ==================  ====================================================

====================================  ===============================================
hook                                  effect on a resumed epoch
====================================  ===============================================
the checkpoint is read                saved; Lightning gets a corrected loop state
an iterator enters the epoch          placed
``on_train_start``                    placed; counters and random state are restored
``on_train_batch_start``              the loops no longer treat it as restarted
``on_validation_end``                 the same, if the resume began with a validation
an iterator enters the next epoch     beginning
====================================  ===============================================

``on_train_start`` restores the random state that was saved. Iterators that start
afterwards draw numbers too, so it is restored again at the moment at which it was
recorded: before they start if the epoch is repeated, and after they have started if it
continues after a batch. Without a length, Lightning reads the first batch before
``on_train_start``. Where an epoch begins, the state is then restored before that batch,
and is not restored again after it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from lightning_ddp_ext.checkpoint.rank_records import Kind
from lightning_ddp_ext.data.epochs import start_epoch
from lightning_ddp_ext.data.loader import DistributedLoader, LazyIterator, batches_of, own_copy
from lightning_ddp_ext.data.loader_kinds import rewind
from lightning_ddp_ext.data.position import FROM_THE_EPOCHS_START, LoaderPosition
from lightning_ddp_ext.data.random_state import record_random_state, restore_random_state
from lightning_ddp_ext.data.seeding import WorkerSeeding, workers_seeded_apart
from lightning_ddp_ext.errors import ResumeError
from lightning_ddp_ext.rank_lists import ranks_in_words

from ..callbacks.hang_watchdog import report_progress
from ..checkpoints.collective import Checkpoints
from ..named_calls import ranks_of, refuse
from ..private.compat import (
    active_loop_of,
    combined_iterator_of,
    combined_loader_of,
    end_epoch_after,
    end_restart,
    fetcher_of,
    iterators_of,
    mode_of,
    schedule_timed_validation,
)
from ..private.lightning_tree import rank_zero_warn
from ..private.replaced_methods import ReplacedMethods
from ..start.devices import RankDevicesStrategy
from ..stopping.recorder import Recorder
from ..stopping.stops import StopController
from .loop_state import Restart, Stopped, epoch_of, find_restart
from .positions import positions_of, training_generators, training_loaders_of
from .saved_epoch import KEY, VERSION, SavedEpoch, read_saved, without_random_state
from .uneven import UnevenInputs

ResumeData = Literal["exact", "strict", "epoch", "stock"]
Moment = Literal["epoch", "step", "validation"]

_OF_MID_EPOCH_RESUME = ".*resuming from a checkpoint that ended before the epoch ended"


@dataclass(frozen=True)
class RecordedState:
    """A rank's state at the start of an epoch, an optimiser step or a validation.

    Attributes:
        random: the random states.
        batches_given: the number of batches that each loader had given in the epoch.
    """

    random: list[Any]
    batches_given: list[int]


@dataclass
class ResumedEpoch:
    """An epoch about which a checkpoint decides.

    Attributes:
        saved: the content of the checkpoint.
        restart: where training continues, with the batches of this number of ranks. It
            is the start of the epoch if that is repeated.
        batches: the number of the epoch's batches, if known from the checkpoint.
        placed: the positions of the loaders that were looked at; empty before.
        has_random_state: whether the random state was restored.
    """

    saved: SavedEpoch
    restart: Restart
    batches: float = math.inf
    placed: Sequence[LoaderPosition] = ()
    has_random_state: bool = False

    @property
    def restores_on_train_start(self) -> bool:
        """Whether the random state is restored in ``on_train_start``."""
        has_read_batch = self.restart.at == "epoch_start" and self.has_random_state
        return not has_read_batch

    @property
    def restores_before_iterators(self) -> bool:
        """Whether it is restored before the epoch's iterators start."""
        is_due = self.restart.has_started or not self.has_random_state
        return self.restart.at == "epoch_start" and is_due

    @property
    def restores_after_iterators(self) -> bool:
        """Whether it is restored after the epoch's iterators have started."""
        return self.restart.at == "batch_end"


@dataclass(frozen=True)
class TrainingEnd:
    """Where a training ended.

    Attributes:
        batches: the number of batches of all epochs.
        restart: where another training continues.
        state: this rank's random states and positions.
    """

    batches: int
    restart: Restart
    state: dict[str, Any]


class EpochCursor:
    """The current epoch of training and the position in it.

    Without a checkpoint, every epoch begins at its first batch.

    Args:
        strategy: our strategy.
        checkpoints: gathers the ranks' states.
        stops: stops all ranks before a batch.
        recorder: records each step for a rescue.
        replaced: restores what a run changes in Lightning.
        uneven: ends epochs on all ranks together.
        resume_data: see ``DDPExtStrategy``.

    Attributes:
        known_seed: the seed for the order of samples, once it is known.
        seeding: how ``SamplerEpochSeeding`` seeds loader workers.
        resumed: the epoch about which a checkpoint decides, if any.
    """

    def __init__(
        self,
        strategy: RankDevicesStrategy,
        checkpoints: Checkpoints,
        stops: StopController,
        recorder: Recorder,
        replaced: ReplacedMethods,
        uneven: UnevenInputs,
        resume_data: ResumeData,
    ) -> None:
        self._strategy = strategy
        self._checkpoints = checkpoints
        self._stops = stops
        self._recorder = recorder
        self._replaced = replaced
        self._uneven = uneven
        self.resume_data = resume_data
        self.known_seed: int | None = None
        self._end: TrainingEnd | None = None
        self._reset()

    def _reset(self) -> None:
        self.seeding: WorkerSeeding | None = None
        self.resumed: ResumedEpoch | None = None
        self._recorded: dict[Moment, RecordedState] = {}
        self._combined_iterator: Any = None  # of the epoch that was entered last
        self._validated_at = math.inf

    @property
    def _trainer(self) -> Any:
        return self._strategy.current_trainer

    def attach(self, trainer: Any) -> None:
        """Reset the state for a Trainer that has not loaded a checkpoint."""
        if trainer.state.fn == "fit":
            # Otherwise a checkpoint still describes the earlier training.
            self.known_seed = None
            self._end = None
        self._reset()

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Prepare to resume from a checkpoint, and change its loop state."""
        is_fitting = self._trainer.state.fn == "fit"
        if not is_fitting or "loops" not in checkpoint or self.resume_data == "stock":
            return
        saved = read_saved(
            checkpoint,
            accumulated=self._trainer.accumulate_grad_batches,
            repeats_epoch=self.resume_data == "epoch",
        )
        checkpoint["loops"]["fit_loop"] = saved.loops_at(saved.restart)
        self.resumed = ResumedEpoch(saved, saved.restart)

    @property
    def seed(self) -> int:
        """The seed for the order of samples.

        It is the seed of the resumed run, otherwise rank 0's. Collective the first
        time.
        """
        if self.known_seed is None:
            chosen = self._strategy.broadcast(int(os.environ.get("PL_GLOBAL_SEED", 0)))
            saved = None if self.resumed is None else self.resumed.saved.seed
            self.known_seed = chosen if saved is None else saved
        return self.known_seed

    @property
    def epoch(self) -> int:
        """The current or next training epoch.

        It is correct even before Lightning reads the checkpoint.
        """
        epoch = epoch_of(self._trainer)
        return epoch if self.resumed is None else max(epoch, self.resumed.restart.epoch)

    # Iterators.

    def start(self, loader: DistributedLoader, iterator: LazyIterator) -> Iterator[Any]:
        """Start an iterator over a loader, because its first batch was requested.

        In the fit loop it starts at the training position; in an evaluation loop or
        user code, at the beginning.
        """
        is_trained = loader.position is not None
        loop = self._trainer.fit_loop if is_trained else active_loop_of(self._trainer)
        with self._in_epoch(loader):
            if not any(iterator is each for each in iterators_of(loop)):
                rewind(loader.loader)
                return iter(own_copy(loader.loader))
            if not is_trained:
                rewind(loader.loader)
                start = loader.start_evaluation
                return iter(loader.loader) if start is None else start()
            if combined_iterator_of(loop) is not self._combined_iterator:
                self._enter_epoch()
                return self._start_together(iterator)
            # If it replaces an iterator that ended, the batch was announced to that one.
            iterator.is_announced = True
            return self._start_at_position(iterator)

    @contextmanager
    def _in_epoch(self, loader: DistributedLoader) -> Iterator[None]:
        """Set the current epoch in a loader whose iterator is created in the block."""
        epoch = self.epoch
        rank = self._strategy.global_rank
        keeps_workers = start_epoch(loader.loader, epoch, rank=rank, seeding=self.seeding)
        # A resumed run may start its workers later, when the original run drew no
        # number for them.
        is_later = keeps_workers and (epoch > 0 or loader.position is None)
        with workers_seeded_apart(loader.loader, epoch) if is_later else nullcontext():
            yield

    def _enter_epoch(self) -> None:
        """Find the position at which the epoch begins or continues."""
        self._combined_iterator = combined_iterator_of(self._trainer.fit_loop)
        epoch = self.epoch
        if self.resumed is not None and epoch > self.resumed.restart.epoch:
            self.resumed = None
        resumed = self.resumed
        if resumed is not None:
            self._place(resumed)
            if resumed.restores_before_iterators:
                self._restore_random_state(resumed)
        if resumed is None or not resumed.restart.is_within:
            for position in positions_of(self._trainer):
                position.start_epoch(epoch)
        self.record("epoch")
        self._recorder.record(Kind.EPOCH)

    def _start_together(self, iterator: LazyIterator) -> Iterator[Any]:
        """Start the iterators of all training loaders, and return the batches of one."""
        batches = self._start_at_position(iterator)
        for other in iterators_of(self._trainer.fit_loop):
            if other is not iterator:
                other.start()
        if self.resumed is not None and self.resumed.restores_after_iterators:
            self._restore_random_state(self.resumed)
        return batches

    def _start_at_position(self, iterator: LazyIterator) -> Iterator[Any]:
        """Start an iterator over a training loader at the loader's position."""
        if self._has_no_batches_left:
            return iter(())
        position = iterator.loader.position
        batches = self._uneven.give_batches(position.start_iterator(), position)
        self._recorder.has_new_iterator = True
        if position is not positions_of(self._trainer)[0]:
            return batches
        iterator.before_next = self._before_batch
        return batches

    @property
    def _has_no_batches_left(self) -> bool:
        """Whether a resumed epoch is complete, possibly because of a new limit."""
        if self.resumed is None:
            return False
        restart = self.resumed.restart
        limit = self._trainer.num_training_batches
        is_cut = restart.at == "batch_end" and restart.done >= limit > 0
        return restart.is_last or is_cut

    def _before_batch(self) -> None:
        """Stop if the ranks agreed to, and record the random state of a new step."""
        accumulated = self._trainer.accumulate_grad_batches
        self._stops.before_batch()
        schedule_timed_validation(self._trainer, self._validated_at)
        if self._trainer.fit_loop.epoch_loop.batch_progress.current.processed % accumulated == 0:
            self._recorder.record(Kind.WINDOW)
            if accumulated > 1:
                self.record("step")

    # Placing loaders in a resumed epoch.

    def _place(self, resumed: ResumedEpoch) -> None:
        """Continue in each training loader, or repeat the epoch.

        Collective the first time, and again for new loaders.

        Raises:
            ResumeError: the data differs from the resumed run's; or its order does,
                with ``resume_data="strict"``.
        """
        positions = positions_of(self._trainer)
        if not resumed.restart.is_within:
            return
        if resumed.placed and resumed.placed[0] is positions[0]:
            return
        resumed.placed = positions
        ranks = ranks_of(self._strategy)
        try:
            different = ranks.on_every_rank(partial(self._continue, resumed), "the resume")
        except ResumeError as error:
            refuse(self._strategy, error)
        names = ranks.gather(different)
        by_rank = {rank: name for rank, name in enumerate(names) if name is not None}
        if by_rank:
            self._repeat(resumed, by_rank)

    def _continue(self, resumed: ResumedEpoch) -> str | None:
        """Continue in each loader.

        Return the name of the first one that does not draw the same as the resumed run.
        """
        epoch = resumed.restart.epoch
        rank = self._strategy.global_rank
        states = resumed.saved.state_of(rank)["loaders"]
        _check(resumed.placed, states, epoch)
        self._count(resumed, states)
        different = []
        for loader, state in zip(training_loaders_of(self._trainer), states, strict=True):
            position = loader.position
            position.on_progress = partial(report_progress, self._trainer)
            needs_own_state = position.is_by_rank and state["at"] > 0
            if needs_own_state and resumed.saved.random_state_of(rank) is None:
                different.append(position.name)
                continue
            with self._in_epoch(loader):
                if not position.continue_epoch(epoch, state, done=resumed.restart.done):
                    different.append(position.name)
        return next(iter(different), None)

    def _count(self, resumed: ResumedEpoch, states: Sequence[Mapping[str, Any]]) -> None:
        """Compute the number of batches done and the epoch's number of batches.

        Both are for this number of ranks. Batches after the last optimiser step are not
        done. Loops assume the same number of batches in all epochs. On a different
        number of ranks, or with another batch size, the number of done batches
        therefore changes. Loaders that restarted within the epoch are ignored for the
        remaining batches, because the longest loader, which ends the epoch, is read
        only once.
        """
        combine = min if mode_of(combined_loader_of(self._trainer.fit_loop)) == "min_size" else max
        whole = combine(batches_of(position.loader) for position in resumed.placed)
        left = combine(
            position.left_after(state["at"])
            for position, state in zip(resumed.placed, states, strict=True)
            if not state["number"]
        )
        if math.inf not in (whole, left):
            accumulated = self._trainer.accumulate_grad_batches
            done = int(whole - left) // accumulated * accumulated
            resumed.restart = replace(resumed.restart, done=done)
            resumed.batches = done + left

    def _repeat(self, resumed: ResumedEpoch, by_rank: Mapping[int, str]) -> None:
        """Start the epoch again, as stock Lightning does.

        It is called when loaders do not draw the same as the resumed run.
        """
        names = " and ".join(dict.fromkeys(by_rank.values()))
        message = (
            f"epoch {resumed.restart.epoch} cannot be resumed in the middle: {names} on"
            f" {ranks_in_words(by_rank)} does not yield the samples that it yielded before the"
            " checkpoint was saved"
        )
        remedy = (
            "derive its order from the epoch that set_epoch() gets, or draw it from a generator"
            " that is an attribute of the loader or sampler, and save with trainer.save_checkpoint"
            " or ModelCheckpoint"
        )
        if self.resume_data == "strict":
            refuse(self._strategy, ResumeError(f"{message}; {remedy}, or {FROM_THE_EPOCHS_START}"))
        rank_zero_warn(
            f'{message}, so that epoch starts again; {remedy} (resume_data="strict" raises instead)'
        )
        resumed.restart = resumed.restart.from_epoch_start()
        resumed.saved = replace(resumed.saved, ranks=())

    def _restore_random_state(self, resumed: ResumedEpoch) -> None:
        """Restore this rank's random state, if one was saved."""
        resumed.has_random_state = True
        random = resumed.saved.random_state_of(self._strategy.global_rank)
        if random is None:
            return
        reloads = self._trainer.reload_dataloaders_every_n_epochs > 0
        has_new_loaders = resumed.restart.begins_epoch and reloads
        generators = training_generators(self._strategy, with_loaders=not has_new_loaders)
        restore_random_state(random, generators)

    # Hooks of the fit loop.

    def on_train_start(self) -> None:
        """Set the counters and the random state with which training continues."""
        self._validated_at = time.monotonic()
        resumed = self.resumed
        if resumed is None:
            return
        if not self._describes_loops(resumed.saved.restart):
            # A `LearningRateFinder` makes Lightning restore its loops from the finder's
            # file, and from no other.
            self.resumed = None
            return
        self._place(resumed)
        self._correct_loops(resumed)
        if resumed.restores_on_train_start:
            self._restore_random_state(resumed)

    def _describes_loops(self, restart: Restart) -> bool:
        """Whether Lightning's loops are at a restart."""
        done = self._trainer.fit_loop.epoch_loop.batch_progress.current.processed
        return (epoch_of(self._trainer), done) == (restart.epoch, restart.done)

    def _correct_loops(self, resumed: ResumedEpoch) -> None:
        """Change what the checkpoint's loop state did not yet take into account."""
        fit_loop = self._trainer.fit_loop
        restart = resumed.restart
        saved = resumed.saved
        if restart.at != saved.restart.at:
            fit_loop.load_state_dict(saved.loops_at(restart))
            fit_loop.update_restart_stage()
        if restart.at == "epoch_start":
            end_restart(fit_loop)
        if not restart.is_within:
            return
        self._replaced.hide_warning(_OF_MID_EPOCH_RESUME)
        if restart.done == saved.restart.done:
            return
        current = fit_loop.epoch_loop.batch_progress.current
        current.ready = current.started = current.processed = restart.done
        current.completed = restart.done - 1 if restart.at == "batch_end" else restart.done
        if resumed.batches < self._trainer.num_training_batches:
            end_epoch_after(self._trainer, int(resumed.batches))

    def on_train_batch_start(self) -> None:
        """Let Lightning's loops continue as usual in a resumed epoch.

        It is called once the epoch's first batch was read.
        """
        if self.resumed is not None and self.resumed.restart.is_within:
            # Otherwise the epoch's end would skip schedulers that monitor a metric.
            end_restart(self._trainer.fit_loop)

    def on_validation_end(self) -> None:
        """Record the time of the validation.

        If the resume began with it, let the epoch end as usual.
        """
        self._validated_at = time.monotonic()
        if self.resumed is None or self._trainer.sanity_checking:
            return
        if self.resumed.restart.at == "validation":
            end_restart(self._trainer.fit_loop)

    def on_train_end(self) -> None:
        """Record where training ended, and this rank's state there.

        It is called before Lightning resets its loops and an evaluation removes the
        loaders.
        """
        loop = self._trainer.fit_loop
        # Its whole state would include those of loaders, which may be large.
        loops = {
            "epoch_progress": loop.epoch_progress.state_dict(),
            "epoch_loop.batch_progress": loop.epoch_loop.batch_progress.state_dict(),
        }
        restart = self._find_restart(loops)
        self._end = TrainingEnd(_batches_in(loops), restart, self._state_at(restart, loops))

    # Recording and saving.

    def record(self, moment: Moment) -> None:
        """Record this rank's state at the start of what ``moment`` names."""
        self._recorded[moment] = self._current_state()

    def _current_state(self) -> RecordedState:
        batches_given = [position.batches_given for position in positions_of(self._trainer)]
        random = record_random_state(training_generators(self._strategy))
        return RecordedState(random, batches_given)

    def save_to(self, checkpoint: dict[str, Any], what: str) -> None:
        """Add all ranks' data positions to a checkpoint in the call ``what``.

        Collective unless interrupted.
        """
        if "loops" not in checkpoint:
            return
        position = self._position_to_save(checkpoint["loops"]["fit_loop"])
        if position is None:
            return
        restart, own = position
        if not self._checkpoints.is_interrupted:
            ranks = self._checkpoints.to_rank_zero(own, what)
        elif self._strategy.world_size == 1:
            ranks = [own]
        else:  # the other ranks skip this call
            ranks = [without_random_state(own)]
        checkpoint[KEY] = self.section(restart, self._stops.stopped, ranks)

    def _position_to_save(self, loops: Mapping[str, Any]) -> tuple[Restart, dict[str, Any]] | None:
        """Return where training continues, and this rank's state there.

        Return ``None`` if nothing has been trained.
        """
        fit_loop = self._trainer.fit_loop
        is_running = fetcher_of(fit_loop) is not None
        end = self._end
        if end is not None and not is_running and end.batches == _batches_in(loops):
            return end.restart, end.state
        restart = self._find_restart(loops)
        has_loaders = combined_loader_of(fit_loop) is not None
        needs_only_random_state = not restart.is_within and restart.epoch > 0
        if not has_loaders and not needs_only_random_state:
            return None
        return restart, self._state_at(restart, loops)

    def _find_restart(self, loops: Mapping[str, Any]) -> Restart:
        fetcher = fetcher_of(self._trainer.fit_loop)
        return find_restart(
            loops,
            accumulated=self._trainer.accumulate_grad_batches,
            stopped=self._stops.stopped,
            has_ended=fetcher is not None and fetcher.done,
        )

    def _state_at(self, restart: Restart, loops: Mapping[str, Any]) -> dict[str, Any]:
        """Return this rank's random states and positions."""
        positions = positions_of(self._trainer) if restart.is_within else []
        processed = loops["epoch_loop.batch_progress"]["current"]["processed"]
        recorded = self._recorded_for(restart, processed)
        loaders = [
            position.state_dict(restart.done, batches_given)
            # Outside of an epoch there are no positions.
            for position, batches_given in zip(positions, recorded.batches_given, strict=False)
        ]
        return {"random": recorded.random, "loaders": loaders}

    def _recorded_for(self, restart: Restart, processed: int) -> RecordedState:
        """Return the state recorded for a restart, or the current one if none was."""
        moment: Moment | None = None
        if restart.has_started:
            moment = "epoch"
        elif restart.at == "validation":
            moment = "validation"
        elif restart.dropped_of(processed):
            moment = "step"
        recorded = None if moment is None else self._recorded.get(moment)
        return recorded or self._current_state()

    def section(self, restart: Restart, stopped: Stopped | None, ranks: Any) -> dict[str, Any]:
        """Return the section for a checkpoint; ``ranks`` has each rank's state."""
        return {
            "version": VERSION,
            "seed": self.known_seed,
            "restart": vars(restart),
            "stopped": stopped,
            "ranks": ranks,
        }


def _batches_in(loops: Mapping[str, Any]) -> int:
    return int(loops["epoch_loop.batch_progress"]["total"]["processed"])


def _check(
    positions: Sequence[LoaderPosition], states: Sequence[Mapping[str, Any]], epoch: int
) -> None:
    """Raise if the training loaders are not those of which the states were saved."""
    if len(states) != len(positions):
        raise ResumeError(
            f"epoch {epoch} cannot be resumed in the middle: it began with {len(states)} training"
            f" loaders, but there are {len(positions)} now; use the same loaders, or"
            f" {FROM_THE_EPOCHS_START}"
        )
    for position, state in zip(positions, states, strict=True):
        position.check(state)
