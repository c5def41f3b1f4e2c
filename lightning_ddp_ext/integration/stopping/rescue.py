"""Save a surviving rank's state after another rank has died, failed or hung.

Most parameters and the optimiser's state need no copy: with automatic optimisation, an
aborted collective raises before they change. Random states, buffers and parameters that
change before each forward pass are recorded in each step. A survivor saves all this in
an ordinary checkpoint, from which training can continue, unless another saved value may
have changed.
"""

from __future__ import annotations

import copy
import pickle
import secrets
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning_ddp_ext.checkpoint.location import PathOrUrl, locate
from lightning_ddp_ext.checkpoint.rank_records import Kind, open_records
from lightning_ddp_ext.checkpoint.save_lock import save_if_furthest
from lightning_ddp_ext.data.random_state import random_state_in, record_random_state
from lightning_ddp_ext.data.seeding import mix, seeded
from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.forced_exit import delaying_forced_exit, print_in_time
from lightning_ddp_ext.rank_lists import ranks_in_words
from lightning_ddp_ext.ranks import reason_of
from lightning_ddp_ext.rendezvous.process_context import current

from ..checkpoints.checkpoint_io import RankZeroCheckpointIO
from ..checkpoints.fit_identity import KEY as FILE_KEY
from ..checkpoints.run_files import RunFiles
from ..data.cursor import EpochCursor
from ..data.loop_state import Restart, Stopped, complete_batch, find_restart
from ..data.positions import positions_of
from ..data.saved_epoch import KEY, shared_state, without_random_state
from ..named_calls import ranks_of
from ..private.compat import (
    dump_checkpoint,
    fetcher_of,
    is_in_closure,
    is_in_optimizer_step,
    is_read_in_step,
    validates_next,
)
from ..private.lightning_tree import pl, rank_zero_warn
from ..start.devices import RankDevicesStrategy
from .recorder import Recorder
from .stops import StopController

# Events of a rank that leave the others in a state from which training can continue.
_SURVIVABLE = ("died", "failed", "hung")
# By a restart's ``at``: the last kind of note whose random state it may use. Otherwise
# ``EPOCH`` if the epoch's start hooks have run, else ``VALIDATED``.
_LATEST = {"batch_end": Kind.WINDOW, "validation": Kind.BATCH}


class Refused(Exception):
    """Raised with the reason why nothing is saved."""


class Rescue:
    """Saves the last optimiser step after another rank has died, failed or hung.

    Args:
        strategy: our strategy.
        name: the name of a file next to the other checkpoints, or a path; ``None``
            saves nothing.
        averages_models: whether the ranks may have different weights between averages
            of the model.
        files: the strategy's files.
        stops: the strategy's stop controller, which has the deadline and knows whether
            weights are swapped.
        cursor: the position in the training data.
        recorder: records the state of each step, which the strategy's hooks ask for.
    """

    def __init__(
        self,
        strategy: RankDevicesStrategy,
        name: PathOrUrl | None,
        *,
        averages_models: bool,
        files: RunFiles,
        stops: StopController,
        cursor: EpochCursor,
        recorder: Recorder,
    ) -> None:
        self._strategy = strategy
        self.name = name
        self._averages_models = averages_models
        self._files = files
        self._stops = stops
        self._cursor = cursor
        self._recorder = recorder
        self._trainer: Any = None  # the Trainer, while its run may be saved
        # Of the run that was started last.
        self._peers: Any = None
        self._path = ""
        self._run_token = ""
        self._refusal: str | None = None  # why nothing can be saved in this run
        # Of a forced exit, while another rank's failure leaves a step to save.
        self._delays = ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        """Return what spawned ranks need, without the state of this process."""
        return {**vars(self), "_trainer": None, "_peers": None, "_delays": ExitStack()}

    def start(self) -> None:
        """Start recording states, if the Trainer runs ``fit`` on several ranks.

        Collective: every rank must call it.
        """
        self.end()
        strategy = self._strategy
        trainer = strategy.current_trainer
        context = current()
        is_fit = trainer.state.fn == "fit" and not trainer.fast_dev_run
        if self.name is None or context is None or strategy.world_size == 1 or not is_fit:
            return
        self._trainer = trainer
        self._peers = context.peers
        ranks = ranks_of(strategy)
        # Loggers choose directories on rank 0, and command lines may differ by rank.
        files = self._files
        place = str(files.place(self.name, trainer)) if ranks.rank == 0 else ""
        shared = ranks.from_rank_zero((place, secrets.token_hex(8), files.identity.content))
        self._path, self._run_token, files.identity.content = shared
        if locate(self._path).local is None:
            raise ConfigurationError(
                "rescue_checkpoint must be on a file system, because the ranks need locks (got"
                f" {self._path}); pass a local path, such as '/shared/last-rescued.ckpt'"
            )
        self._refusal = self._why_never()
        if self._refusal is None:
            try:
                self._recorder.start(open_records(ranks), context.peers)
                self._delays.enter_context(
                    delaying_forced_exit(
                        self._stops.deadline.total_seconds(),
                        "save the last step",
                        is_needed=lambda: self._is_due and self._recorder.parameters.has_finished_step,
                    )
                )
            except (OSError, RuntimeError) as error:
                self._refusal = f"the ranks cannot record their states ({error})"
        if self._refusal is not None:
            rank_zero_warn(
                f"rescue_checkpoint={self.name!r} saves nothing in this run: {self._refusal}"
            )

    def _why_never(self) -> str | None:
        if self._averages_models:
            return "model_averaging_period lets the ranks have different weights"
        kinds = {base.__name__ for each in self._strategy.optimizers for base in type(each).__mro__}
        if "ZeroRedundancyOptimizer" in kinds:  # by name: importing ZeroRedundancyOptimizer is slow
            return "each rank has only a shard of the optimiser's state (ZeroRedundancyOptimizer)"
        if self._cursor.resume_data == "stock":
            return 'with resume_data="stock", training would not continue with the next step'
        return None

    def end(self) -> None:
        """Close the notes."""
        self._delays.close()
        self._trainer = None
        self._recorder.end()

    def save(self, exception: BaseException) -> None:
        """Save the last finished step after another rank has caused an exception.

        It does nothing if another survivor has saved that step.
        """
        if not self._is_due:
            return
        seconds = self._stops.deadline.total_seconds()
        try:
            with delaying_forced_exit(seconds):
                line = self._save(exception, seconds)
        except Exception as error:
            line = (
                "this rank did not save the last step:"
                f" {error if isinstance(error, Refused) else reason_of(error)}"
            )
        self.end()
        if line:
            print_in_time(f"[rank {self._strategy.global_rank}] {line}\n")

    @property
    def _is_due(self) -> bool:
        """Whether another rank has caused a failure after which this rank may save."""
        cause = None if self._trainer is None else self._peers.cause
        return (
            cause is not None
            and cause.kind in _SURVIVABLE
            and cause.rank != self._strategy.global_rank
        )

    def _save(self, exception: BaseException, seconds: float) -> str:
        refusal = self._refusal or self._recorder.error or self._why_not(exception)
        if refusal is not None:
            raise Refused(refusal)
        trainer = self._trainer
        loops = copy.deepcopy(trainer.fit_loop.state_dict())
        stopped = self._complete_batch(loops)
        accumulated = trainer.accumulate_grad_batches
        has_ended = fetcher_of(trainer.fit_loop).done
        restart = find_restart(loops, accumulated=accumulated, stopped=stopped, has_ended=has_ended)
        batch = loops["epoch_loop.batch_progress"]
        batches = batch["total"]["processed"] - restart.dropped_of(batch["current"]["processed"])
        states, lost = self._states_of_ranks(restart, batches)

        def write() -> None:
            checkpoint = self._checkpoint(loops, batches)
            checkpoint[KEY] = self._cursor.section(restart, stopped, states)
            checkpoint[FILE_KEY] = self._files.identity.content
            io = self._strategy.checkpoint_io
            if isinstance(io, RankZeroCheckpointIO):
                io.saver.deadline = seconds
                io.saver.finish()  # otherwise an earlier save error would prevent this save
            io.save_checkpoint(checkpoint, self._path)
            io.teardown()  # waits for a save in the background

        Path(self._path).parent.mkdir(parents=True, exist_ok=True)
        if not save_if_furthest(self._path, self._run_token, batches, write, seconds):
            return ""
        line = (
            f"saved step {trainer.global_step} to {self._path}; resume with trainer.fit(...,"
            f" ckpt_path='last') or ckpt_path={self._path!r}"
        )
        if lost:
            line += (
                f"; this host has no record of the random states of {ranks_in_words(lost)}, so"
                " those states are derived from the seed"
            )
        return line

    def _why_not(self, exception: BaseException) -> str | None:
        trainer = self._trainer
        recorder = self._recorder
        if not recorder.parameters.has_finished_step:
            return "no step has finished since the start"
        current = trainer.fit_loop.epoch_loop.batch_progress.current
        if current.ready > current.processed:
            if not trainer.lightning_module.automatic_optimization:
                return "the failure happened in the middle of a batch with manual optimisation"
            if is_in_optimizer_step(trainer) and recorder.forward_passes > 1:
                return "the optimiser calls its closure several times per step"
            if is_in_optimizer_step(trainer) and not is_in_closure(exception):
                return "the next step had started to change the weights"
        elif not self._stops.weights.match(trainer.lightning_module.parameters()):
            return (
                "the weights changed after the last step, for example because weight averaging"
                " swapped them"
            )
        return None

    def _complete_batch(self, loops: dict[str, Any]) -> Stopped | None:
        own_notes = self._recorder.notes[self._strategy.global_rank]
        batches = loops["epoch_loop.batch_progress"]["total"]["ready"]
        return complete_batch(
            loops,
            accumulated=self._trainer.accumulate_grad_batches,
            stepped=self._recorder.stepped,
            validates=validates_next(self._trainer),
            has_validated=own_notes.find(batches, Kind.VALIDATED) is not None,
        )

    def _checkpoint(self, loops: dict[str, Any], batches: int) -> dict[str, Any]:
        """Return the Trainer's checkpoint with the given state of the loops.

        First restore the values of the last step that this rank has recorded.

        Raises:
            Refused: another saved value may have changed.
        """
        self._restore(batches)
        checkpoint = dump_checkpoint(self._trainer)
        checkpoint["loops"]["fit_loop"] = loops
        for callback in self._trainer.checkpoint_callbacks:
            if (
                isinstance(callback, pl.callbacks.ModelCheckpoint)
                and callback.state_key in checkpoint["callbacks"]
            ):
                forget_missing_files(checkpoint["callbacks"][callback.state_key], callback.mode)
        return checkpoint

    def _restore(self, batches: int) -> None:
        recorder = self._recorder
        parameters = recorder.parameters
        is_step_lost = (
            parameters.is_in_step and self._trainer.lightning_module.automatic_optimization
        )
        if is_step_lost and parameters.changes_early and is_read_in_step(self._trainer.fit_loop):
            raise Refused(
                "parameters may have changed before the step fetched its batch (dataloader_iter)"
            )
        unknown = parameters.undo(step=is_step_lost)
        if unknown is not None:
            raise Refused(
                f"{unknown} may have changed since the last step, and its earlier value is not"
                " recorded"
            )
        fixed = recorder.fixed.find_changed()
        if fixed is not None:
            raise Refused(
                f"{fixed} has changed since the start, and its value after the last step is not"
                " recorded: it is too large a buffer, or neither a parameter nor a buffer"
            )
        noted = recorder.notes[recorder.first].find(batches, Kind.BUFFERS) or b""
        if not recorder.buffers.restore(noted):
            raise Refused("the buffers of this step are not recorded")

    def _states_of_ranks(self, restart: Restart, batches: int) -> tuple[list[Any], list[int]]:
        """Return the state of each rank, and the ranks without notes.

        The random states of ranks without notes are derived from the seed.
        """
        positions = positions_of(self._trainer) if restart.is_within else []
        if any(position.kind == "state" for position in positions):
            raise Refused("the training loaders have states that only their own ranks can save")
        own = {"loaders": [each.state_dict(restart.done, each.batches_given) for each in positions]}
        shared = shared_state(own)
        known = {self._strategy.global_rank: without_random_state(own)}
        ranks = range(self._strategy.world_size)
        states = [
            self._state_of(rank, restart, batches, known.get(rank, shared)["loaders"])
            for rank in ranks
        ]
        lost = [rank for rank in ranks if states[rank] is None]
        if lost and any(position.is_by_rank for position in positions):
            raise Refused(
                f"the order in which rank {lost[0]} reads its samples is not recorded on this host"
            )
        for rank in lost:
            with seeded(mix(self._cursor.known_seed or 0, rank, restart.epoch, batches)):
                states[rank] = {**shared, "random": record_random_state()}
        return states, lost

    def _state_of(
        self, rank: int, restart: Restart, batches: int, loaders: list[Any]
    ) -> dict[str, Any] | None:
        """Return the state of a rank at a restart, or ``None``.

        The state is read from the rank's notes, and is ``None`` if no note has it.
        """
        if rank not in self._recorder.notes:
            return None
        notes = self._recorder.notes[rank]
        latest = Kind.EPOCH if restart.has_started else _LATEST.get(restart.at, Kind.VALIDATED)
        random = notes.find(batches, *Kind.up_to(latest))
        starts = notes.find(restart.epoch, Kind.LOADERS) if loaders else pickle.dumps([])
        if random is None or starts is None:
            return None
        by_loader = [dict(each) for each in pickle.loads(starts)]  # each by iterators' numbers
        return {
            "random": random_state_in(random),
            "loaders": [
                {**loader, "random": by_number.get(loader["number"], [])}
                for loader, by_number in zip(loaders, by_loader, strict=True)
            ],
        }


def forget_missing_files(state: dict[str, Any], mode: str) -> None:
    """Drop missing files from a ``ModelCheckpoint``'s state.

    Rank 0 may have been writing such a file when it died.
    """

    def is_missing(path: str) -> bool:
        return Path(path).parent.is_dir() and not Path(path).exists()

    best = {
        path: score
        for path, score in state.get("best_k_models", {}).items()
        if not is_missing(path)
    }
    if len(best) < len(state.get("best_k_models", {})):
        # The callback finds the worst file once it has `save_top_k` of them.
        state["best_k_models"] = best
        state["best_model_path"] = (min if mode == "min" else max)(
            best, key=best.__getitem__, default=""
        )
        state["best_model_score"] = best.get(state["best_model_path"])
    for name in ("best_model_path", "last_model_path"):
        if is_missing(state.get(name, "")):
            state[name] = ""
