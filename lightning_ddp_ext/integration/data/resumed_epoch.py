"""Continue in the epoch in which a checkpoint was saved, or repeat it.

When the checkpoint is read, the loaders are not known yet. The epoch is **placed** once
each loader continues at its position, or the whole epoch is repeated because a loader
cannot continue:

====================================  ================================================
Event                                 Effect on the resumed epoch
====================================  ================================================
the checkpoint is read                Lightning gets a corrected loop state
an iterator enters the epoch          placed; the random state is restored
``on_train_start``                    placed; counters and random state are restored
``on_train_batch_start``              the loops no longer treat it as restarted
``on_validation_end``                 the same, if the resume began with a validation
an iterator enters the next epoch     it ends, and the cursor drops it
====================================  ================================================

If a loader has no length, Lightning reads a batch before ``on_train_start``, so that an
iterator enters the epoch first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from lightning_ddp_ext.data.loader import TrainingLoader
from lightning_ddp_ext.data.loader_properties import length_or_inf
from lightning_ddp_ext.data.position import FROM_THE_EPOCHS_START, LoaderPosition
from lightning_ddp_ext.data.seeding import WorkerSeeding
from lightning_ddp_ext.errors import ResumeError
from lightning_ddp_ext.rank_lists import ranks_in_words

from ..callbacks.hang_watchdog import report_progress
from ..private.compat import end_epoch_after, end_restart, mode_of
from ..private.lightning_tree import pl, rank_zero_warn
from ..private.replaced_methods import ReplacedMethods
from ..start.devices import RankDevicesStrategy
from ..strategy_ranks import ranks_of, refuse
from .positions import epoch_of, positions_of, training_loaders_of
from .resumed_random_state import ResumedRandomState
from .saved_epoch import SavedEpoch

T = TypeVar("T")

_OF_MID_EPOCH_RESUME = ".*resuming from a checkpoint that ended before the epoch ended"


class ResumedEpoch:
    """An epoch about which a checkpoint decides.

    Args:
        strategy: our strategy.
        replaced: hides Lightning's warning of a resume in the middle of an epoch.
        saved: the content of the checkpoint.
        seeding: how ``SamplerEpochSeeding`` seeds loader workers.
        is_strict: whether to raise if a loader cannot continue; otherwise the epoch is
            repeated.

    Attributes:
        restart: where training continues, with the batches of this number of ranks. It
            is the start of the epoch if that is repeated.
        is_training: whether ``on_train_start`` was called.
    """

    def __init__(
        self,
        strategy: RankDevicesStrategy,
        replaced: ReplacedMethods,
        saved: SavedEpoch,
        *,
        seeding: WorkerSeeding | None,
        is_strict: bool,
    ) -> None:
        self._strategy = strategy
        self._replaced = replaced
        self._saved = saved
        self._seeding = seeding
        self._is_strict = is_strict
        self.restart = saved.restart
        self.is_training = False
        self._batches_in_epoch = math.inf  # unless known from the checkpoint
        self._placed: Sequence[LoaderPosition] = ()
        self._random_state = ResumedRandomState(strategy, saved)

    @property
    def _trainer(self) -> Any:
        return self._strategy.current_trainer

    @property
    def describes_loops(self) -> bool:
        """Whether Lightning's loops are where the checkpoint was saved."""
        done = self._trainer.fit_loop.epoch_loop.batch_progress.current.processed
        saved = self._saved.restart
        return (epoch_of(self._trainer), done) == (saved.epoch, saved.done)

    @property
    def has_no_batches_left(self) -> bool:
        """Whether the epoch is complete, possibly because of a new limit."""
        limit = self._trainer.num_training_batches
        is_cut = self.restart.at == "batch_end" and self.restart.done >= limit > 0
        return self.restart.is_last or is_cut

    # Iterators of the training loaders.

    def before_iterators(self) -> None:
        """Prepare the loaders and the random state for the iterators of this epoch.

        Collective if the loaders are new. For errors, see :meth:`_place`.
        """
        self._place()
        self._random_state.before_iterators()

    def after_iterators(self) -> None:
        """Restore the random state if the iterators have changed it."""
        self._random_state.after_iterators()

    # Placing the loaders.

    def _place(self) -> None:
        """Continue in each training loader, or repeat the epoch, unless it is placed.

        Raises:
            ResumeError: the data differs from the resumed run's; or its order does,
                with ``resume_data="strict"``.
        """
        positions = positions_of(self._trainer)
        is_placed = bool(self._placed) and self._placed[0] is positions[0]
        if not self.restart.is_within or is_placed:
            return
        self._placed = positions
        # If a rank refuses to resume, no rank has begun to read.
        self._on_every_rank(self._check)
        different = self._on_every_rank(self._continue)
        self._repeat_if_impossible(different)

    def _on_every_rank(self, work: Callable[[], T]) -> T:
        try:
            return ranks_of(self._strategy).on_every_rank(work, "the resume")
        except ResumeError as error:
            refuse(self._strategy, error)

    def _check(self) -> None:
        """Raise if the training loaders are not those of which the states were saved."""
        states = self._saved.own.loaders
        if len(states) != len(self._placed):
            raise ResumeError(
                f"epoch {self.restart.epoch} cannot be resumed in the middle: it began with"
                f" {len(states)} training loaders, but there are {len(self._placed)} now; use the"
                f" same loaders, or {FROM_THE_EPOCHS_START}"
            )
        for position, state in zip(self._placed, states, strict=True):
            position.check(state)

    def _continue(self) -> str | None:
        """Continue in each loader.

        Return the name of the first one that does not draw the same as the resumed run.
        """
        self._count_batches()
        different = [
            loader.position.name
            for loader, state in zip(
                training_loaders_of(self._trainer), self._saved.own.loaders, strict=True
            )
            if not self._continue_loader(loader, state)
        ]
        return different[0] if different else None

    def _continue_loader(self, loader: TrainingLoader, state: Mapping[str, Any]) -> bool:
        """Continue in a loader, and return whether it draws the same as the resumed run."""
        epoch = self.restart.epoch
        position = loader.position
        position.on_progress = partial(report_progress, self._trainer)
        needs_own_state = position.is_by_rank and state["at"] > 0
        if needs_own_state and self._saved.own.random is None:
            return False
        loader.set_epoch(epoch)
        with loader.workers_of(epoch, rank=self._strategy.global_rank, seeding=self._seeding):
            return position.continue_epoch(epoch, state, done=self.restart.done)

    def _count_batches(self) -> None:
        """Count the epoch's batches, and those of them that are done.

        Both change with the number of ranks and the batch size. Lightning assumes the
        same number of batches in all epochs, so those that are not left are done, but
        not those after the last optimiser step.
        """
        combine = min if mode_of(self._trainer.fit_loop) == "min_size" else max
        whole = combine(length_or_inf(position.loader) for position in self._placed)
        left = combine(
            position.left_after(state["at"])
            for position, state in zip(self._placed, self._saved.own.loaders, strict=True)
            # A loader that has begun again is shorter, and does not end the epoch.
            if state["number"] == 0
        )
        if math.inf not in (whole, left):
            accumulated = self._trainer.accumulate_grad_batches
            done = int(whole - left) // accumulated * accumulated
            self.restart = replace(self.restart, done=done)
            self._batches_in_epoch = done + left

    def _repeat_if_impossible(self, different: str | None) -> None:
        """Start the epoch again if not all ranks can continue in it together. Collective.

        Args:
            different: the name of a loader of this rank that does not draw the same as
                the resumed run, if any.
        """
        answers = ranks_of(self._strategy).gather((different, self.restart.done))
        name_by_rank = {rank: name for rank, (name, _) in enumerate(answers) if name is not None}
        done_by_rank = [done for _, done in answers]
        if name_by_rank:
            names = " and ".join(dict.fromkeys(name_by_rank.values()))
            self._repeat(
                f"{names} on {ranks_in_words(name_by_rank)} does not yield the samples that it"
                " yielded before the checkpoint was saved",
                "derive its order from the epoch that set_epoch() gets, or draw it from a"
                " generator that is an attribute of the loader, sampler or dataset, and save with"
                " trainer.save_checkpoint or ModelCheckpoint",
            )
        elif len(set(done_by_rank)) > 1:
            self._repeat(
                "on this number of ranks, a sampler lets them continue after different numbers of"
                f" batches: {done_by_rank}",
                "use a sampler with uneven='pad' or 'drop', or as many ranks as before",
            )

    def _repeat(self, reason: str, remedy: str) -> None:
        """Start the epoch again, as stock Lightning does."""
        message = f"epoch {self.restart.epoch} cannot be resumed in the middle: {reason}"
        if self._is_strict:
            refuse(self._strategy, ResumeError(f"{message}; {remedy}, or {FROM_THE_EPOCHS_START}"))
        rank_zero_warn(
            f'{message}, so that epoch starts again; {remedy} (resume_data="strict" raises instead)'
        )
        for loader in training_loaders_of(self._trainer):
            loader.set_epoch(self.restart.epoch, again=True)
        self.restart = self.restart.from_epoch_start()
        self._random_state.forget()

    # Hooks of the fit loop.

    def on_train_start(self) -> None:
        """Set the counters and the random state with which training continues.

        Collective if the loaders are new. For errors, see :meth:`_place`.
        """
        self.is_training = True
        self._place()
        self._correct_loops()
        self._random_state.on_train_start()
        _warn_of_frozen_parameters(self._trainer)

    def _correct_loops(self) -> None:
        """Change what the checkpoint's loop state did not yet take into account."""
        fit_loop = self._trainer.fit_loop
        is_repeated = self.restart.at != self._saved.restart.at
        if is_repeated:
            fit_loop.load_state_dict(self._saved.loops_at(self.restart))
            fit_loop.update_restart_stage()
        if self.restart.at == "epoch_start":
            end_restart(fit_loop)
        if self.restart.is_within:
            self._replaced.hide_warning(_OF_MID_EPOCH_RESUME)
            self._set_numbers_of_batches()

    def _set_numbers_of_batches(self) -> None:
        """Set the loops to the numbers of batches, done and in all, on these ranks."""
        done = self.restart.done
        current = self._trainer.fit_loop.epoch_loop.batch_progress.current
        current.ready = current.started = current.processed = done
        current.completed = done - 1 if self.restart.at == "batch_end" else done
        if self._batches_in_epoch < self._trainer.num_training_batches:
            end_epoch_after(self._trainer, int(self._batches_in_epoch))

    def on_train_batch_start(self) -> None:
        """Let Lightning's loops continue as usual, once the first batch was read."""
        if self.restart.is_within:
            # Otherwise the epoch's end would skip schedulers that monitor a metric.
            end_restart(self._trainer.fit_loop)

    def on_validation_end(self) -> None:
        """Let the epoch end as usual, if the resume began with a validation."""
        if self.restart.at == "validation" and not self._trainer.sanity_checking:
            end_restart(self._trainer.fit_loop)


def _warn_of_frozen_parameters(trainer: Any) -> None:
    """Warn if a callback has frozen again what the resumed run trained."""
    callbacks = [type(callback) for callback in trainer.callbacks]
    freezing = [each for each in callbacks if issubclass(each, pl.callbacks.BaseFinetuning)]
    if not freezing:
        return
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    trained = {parameter for group in groups for parameter in group["params"]}
    frozen = [
        name
        for name, parameter in trainer.lightning_module.named_parameters()
        if parameter in trained and not parameter.requires_grad
    ]
    if frozen:
        rank_zero_warn(
            f"{freezing[0].__name__} has frozen {len(frozen)} parameters that the optimisers of"
            f" the resumed run have, such as {frozen[0]}; call its make_trainable in"
            " on_train_start"
        )
