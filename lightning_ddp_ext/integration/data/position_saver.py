"""Save where training continues in its data, and each rank's state there.

A checkpoint may continue before the batch after which it is saved. For example,
accumulated gradients are not saved, so training continues after the last optimiser
step. Each rank therefore records its state at three moments, and a checkpoint has the
state from which training continues:

======================================  ==============================================
Training continues                      The saved state was recorded
======================================  ==============================================
with an epoch that starts again         as "epoch", immediately before its iterators
                                        started
with a validation that starts again     as "validation", before its iterators were
                                        created
with an optimiser step that starts      as "step", before its first batch was
again                                   requested
anywhere else                           when the checkpoint is saved
======================================  ==============================================

If the moment was not recorded, the state is that when the checkpoint is saved.
Evaluations that follow a fit do not change what is saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from lightning_ddp_ext.data.random_state import record_random_state

from ..checkpoints.collective import Checkpoints
from ..private.compat import combined_loader_of, fetcher_of, is_due_to_reload
from ..start.devices import RankDevicesStrategy
from ..stopping.stops import StopController
from .loop_state import Restart, find_restart
from .positions import epoch_of, positions_of, training_generators, validation_loaders_of
from .saved_epoch import KEY, make_section, without_random_state

Moment = Literal["epoch", "step", "validation"]


@dataclass(frozen=True)
class RecordedState:
    """A rank's state at the start of an epoch, an optimiser step or a validation.

    Attributes:
        random: the random states.
        batches_given: the number of batches that each loader had given in the epoch.
        has_seeded_validation: see :meth:`PositionSaver.has_seeded_validation`.
    """

    random: list[Any]
    batches_given: list[int]
    has_seeded_validation: bool


class RankPosition(NamedTuple):
    """Where a checkpoint continues, for one rank.

    Attributes:
        batches: the number of batches that were processed in all epochs.
        restart: where training continues.
        state: this rank's random states and positions there.
    """

    batches: int
    restart: Restart
    state: dict[str, Any]


class PositionSaver:
    """Records a rank's states, and adds the ranks' positions to checkpoints.

    In a run, :meth:`attach` is called first, :meth:`record` at each moment,
    :meth:`on_train_end` after the last epoch, and :meth:`save_to` for each checkpoint.

    Args:
        strategy: our strategy.
        checkpoints: gathers the ranks' states.
        stops: knows whether all ranks stop.

    Attributes:
        had_seeded_validation: whether the run that this one resumes had seeded workers
            for validation.
    """

    def __init__(
        self, strategy: RankDevicesStrategy, checkpoints: Checkpoints, stops: StopController
    ) -> None:
        self._strategy = strategy
        self._checkpoints = checkpoints
        self._stops = stops
        self._trainer: Any = None  # of the last run in this process
        self._recorded: dict[Moment, RecordedState] = {}
        self._end: RankPosition | None = None
        self.had_seeded_validation = False

    def attach(self, trainer: Any) -> None:
        """Drop what an earlier run recorded, and before a fit also where training ended."""
        self._trainer = trainer
        self._recorded = {}
        self.had_seeded_validation = False
        if trainer.state.fn == "fit":
            self._end = None

    def record(self, moment: Moment) -> None:
        """Record this rank's state at the start of what ``moment`` names."""
        self._recorded[moment] = self._current_state(epoch_of(self._trainer))

    def has_seeded_validation(self, epoch: int, *, before_latest: bool = False) -> bool:
        """Whether the next validation, in this epoch, reuses workers that are seeded.

        With ``before_latest``, the validation that has begun does not count.
        """
        loaders = validation_loaders_of(self._trainer)
        if not loaders:
            return self.had_seeded_validation
        is_seeded = any(
            each.worker_seed.was_seeded(before_latest=before_latest) for each in loaders
        )
        return is_seeded and not is_due_to_reload(self._trainer, epoch)

    def _current_state(self, epoch: int) -> RecordedState:
        positions = positions_of(self._trainer)
        random = record_random_state(training_generators(self._strategy, positions))
        batches_given = [position.batches_given for position in positions]
        return RecordedState(random, batches_given, self.has_seeded_validation(epoch))

    def on_train_end(self) -> None:
        """Record where training ended.

        It is called before Lightning resets its loops and an evaluation removes the
        loaders.
        """
        loop = self._trainer.fit_loop
        # Its whole state would include those of loaders, which may be large.
        loops = {
            "epoch_progress": loop.epoch_progress.state_dict(),
            "epoch_loop.batch_progress": loop.epoch_loop.batch_progress.state_dict(),
        }
        self._end = self._position_at(self._find_restart(loops), loops)

    def save_to(
        self, checkpoint: dict[str, Any], what: str, *, seed: int | None, is_alone: bool
    ) -> None:
        """Add all ranks' data positions to a checkpoint in the call ``what``.

        Collective, unless this rank saves alone. A process that has only started ranks
        has no position.

        Args:
            checkpoint: the checkpoint.
            what: the name of the call in errors.
            seed: the seed for the order of samples, if known.
            is_alone: whether this rank saves alone.
        """
        if "loops" not in checkpoint or self._trainer is None:
            return
        position = self._position_to_save(checkpoint["loops"]["fit_loop"])
        if position is None:
            return
        checkpoint[KEY] = make_section(
            position.restart,
            seed=seed,
            stopped=self._stops.stopped,
            ranks=self._gather(position.state, what, is_alone=is_alone),
        )

    def _gather(self, own: dict[str, Any], what: str, *, is_alone: bool) -> list[Any] | None:
        """Return the ranks' states that this rank saves, or ``None`` if rank 0 does."""
        if not is_alone:
            return self._checkpoints.to_rank_zero(own, what)
        # The other ranks skip this call.
        return [own if self._strategy.world_size == 1 else without_random_state(own)]

    def _position_to_save(self, loops: Mapping[str, Any]) -> RankPosition | None:
        """Return this rank's position, or ``None`` if it is unknown.

        After training, a checkpoint of its last step has the position of the end. Within
        an epoch, only loaders know it. Between two epochs, it consists of the random
        state; before the first epoch, nothing has been trained.
        """
        fit_loop = self._trainer.fit_loop
        is_running = fetcher_of(fit_loop) is not None
        if self._end is not None and not is_running and self._end.batches == _batches_in(loops):
            return self._end
        restart = self._find_restart(loops)
        has_loaders = combined_loader_of(fit_loop) is not None
        needs_only_random_state = not restart.is_within and restart.epoch > 0
        if has_loaders or needs_only_random_state:
            return self._position_at(restart, loops)
        return None

    def _find_restart(self, loops: Mapping[str, Any]) -> Restart:
        fetcher = fetcher_of(self._trainer.fit_loop)
        return find_restart(
            loops,
            accumulated=self._trainer.accumulate_grad_batches,
            stopped=self._stops.stopped,
            has_ended=fetcher is not None and fetcher.done,
        )

    def _position_at(self, restart: Restart, loops: Mapping[str, Any]) -> RankPosition:
        processed = loops["epoch_loop.batch_progress"]["current"]["processed"]
        recorded = self._state_at(restart, processed)
        positions = positions_of(self._trainer) if restart.is_within else []
        state = {
            "random": recorded.random,
            "loaders": [
                position.state_dict(restart.done, batches_given)
                # Outside of an epoch there are no positions.
                for position, batches_given in zip(positions, recorded.batches_given, strict=False)
            ],
            "has_drawn_seeds": restart.has_started,
            "has_seeded_validation": recorded.has_seeded_validation,
        }
        return RankPosition(_batches_in(loops), restart, state)

    def _state_at(self, restart: Restart, processed: int) -> RecordedState:
        """Return the state from which training continues, see the module's table.

        Args:
            restart: where training continues.
            processed: the number of batches processed in the epoch.
        """
        recorded: RecordedState | None = None
        if restart.has_started:
            recorded = self._recorded.get("epoch")
        elif restart.at == "validation":
            recorded = self._recorded.get("validation")
        elif restart.dropped_of(processed):
            recorded = self._recorded.get("step")
        return recorded or self._current_state(restart.epoch)


def _batches_in(loops: Mapping[str, Any]) -> int:
    return int(loops["epoch_loop.batch_progress"]["total"]["processed"])
