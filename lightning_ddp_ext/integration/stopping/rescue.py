"""Save a surviving rank's state after another rank has died, failed or hung.

1. :meth:`Rescue.start` starts recording states, unless this run can never be saved.
2. After another rank's failure, :meth:`Rescue.save` finds out whether the last finished
   step can be saved, and saves it, unless another survivor has done so.
3. :meth:`Rescue.end` closes the records.

Most parameters and the optimiser's state need no copy: with automatic optimisation, an
aborted collective raises before they change. Random states, buffers and parameters that
change before each forward pass are recorded in each step. A survivor saves all this in
an ordinary checkpoint, from which training can continue, unless another saved value may
have changed.
"""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from lightning_ddp_ext.checkpoint.location import PathOrUrl, locate
from lightning_ddp_ext.checkpoint.rank_records import open_records
from lightning_ddp_ext.checkpoint.save_lock import save_if_furthest
from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.forced_exit import delaying_forced_exit, print_in_time
from lightning_ddp_ext.rank_lists import ranks_in_words
from lightning_ddp_ext.ranks import reason_of
from lightning_ddp_ext.rendezvous.process_context import current

from ..checkpoints.checkpoint_io import RankZeroCheckpointIO
from ..checkpoints.fit_identity import KEY as FILE_KEY
from ..checkpoints.run_files import RunFiles
from ..data.cursor import EpochCursor
from ..data.saved_epoch import KEY, make_section
from ..named_calls import ranks_of
from ..private.compat import is_in_closure, is_in_optimizer_step
from ..private.lightning_tree import rank_zero_warn
from ..start.devices import RankDevicesStrategy
from .last_step import (
    LastStep,
    RankStates,
    Refused,
    checkpoint_of,
    find_last_step,
    states_of_ranks,
)
from .recorder import Recorder
from .stops import StopController

# Events of a rank that leave the others in a state from which training can continue.
_SURVIVABLE = ("died", "failed", "hung")


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
        # The block that delays a forced exit while there is a step to save.
        self._delays = ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        """Return what spawned ranks need, without the state of this process."""
        return {**vars(self), "_trainer": None, "_peers": None, "_delays": ExitStack()}

    def start(self) -> None:
        """Start recording states, if the Trainer runs ``fit`` on several ranks.

        Collective: every rank must call it.
        """
        self.end()
        trainer = self._strategy.current_trainer
        context = current()
        is_fit = trainer.state.fn == "fit" and not trainer.fast_dev_run
        if context is None or self._strategy.world_size == 1 or not is_fit or self.name is None:
            return
        self._trainer = trainer
        self._peers = context.peers
        self._share_names()
        if locate(self._path).local is None:
            raise ConfigurationError(
                "rescue_checkpoint must be on a file system, because the ranks need locks (got"
                f" {self._path}); pass a local path, such as '/shared/last-rescued.ckpt'"
            )
        self._refusal = self._why_never()
        if self._refusal is None:
            self._refusal = self._start_recording()
        if self._refusal is not None:
            rank_zero_warn(
                f"rescue_checkpoint={self.name!r} saves nothing in this run: {self._refusal}"
            )

    def _share_names(self) -> None:
        """Use rank 0's path, a new token of the run, and rank 0's identity of the fit.

        Loggers choose directories on rank 0, and command lines may differ by rank.
        """
        ranks = ranks_of(self._strategy)
        files = self._files
        path = str(files.place(self.name, self._trainer)) if ranks.rank == 0 else ""
        shared = ranks.from_rank_zero((path, secrets.token_hex(8), files.identity.content))
        self._path, self._run_token, files.identity.content = shared

    def _start_recording(self) -> str | None:
        """Start recording states, or return why the ranks cannot."""
        try:
            self._recorder.start(open_records(ranks_of(self._strategy)), self._peers)
        except (OSError, RuntimeError) as error:
            return f"the ranks cannot record their states ({error})"
        self._delays.enter_context(
            delaying_forced_exit(
                self._stops.deadline.total_seconds(),
                "save the last step",
                is_needed=lambda: self._is_due and self._recorder.parameters.has_finished_step,
            )
        )
        return None

    def _why_never(self) -> str | None:
        """Return why nothing can be saved in this run, whatever happens."""
        if self._averages_models:
            return "model_averaging_period lets the ranks have different weights"
        if any(map(_is_sharded, self._strategy.optimizers)):
            return "each rank has only a shard of the optimiser's state (ZeroRedundancyOptimizer)"
        if self._cursor.resume_data == "stock":
            return 'with resume_data="stock", training would not continue with the next step'
        return None

    def end(self) -> None:
        """Close the records."""
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
            reason = error if isinstance(error, Refused) else reason_of(error)
            line = f"this rank did not save the last step: {reason}"
        self.end()
        if line:
            print_in_time(f"[rank {self._strategy.global_rank}] {line}\n")

    @property
    def _is_due(self) -> bool:
        """Whether another rank has caused a failure after which this rank may save."""
        cause = None if self._trainer is None else self._peers.cause
        if cause is None:
            return False
        return cause.kind in _SURVIVABLE and cause.rank != self._strategy.global_rank

    def _save(self, exception: BaseException, seconds: float) -> str:
        """Save the last step, and return what to print; empty if another rank saved it."""
        refusal = self._refusal or self._recorder.error or self._why_not(exception)
        if refusal is not None:
            raise Refused(refusal)
        trainer = self._trainer
        step = find_last_step(trainer, self._strategy.global_rank, self._recorder)
        ranks = states_of_ranks(
            step,
            trainer,
            self._recorder,
            seed=self._cursor.known_seed,
            has_seeded_validation=self._cursor.has_seeded_validation(step.restart),
        )
        Path(self._path).parent.mkdir(parents=True, exist_ok=True)
        write = partial(self._write, step, ranks, seconds)
        if not save_if_furthest(self._path, self._run_token, step.batches, write, seconds):
            return ""
        line = (
            f"saved step {trainer.global_step} to {self._path}; resume with trainer.fit(...,"
            f" ckpt_path='last') or ckpt_path={self._path!r}"
        )
        if ranks.derived:
            line += (
                "; this host has no record of the random states of"
                f" {ranks_in_words(ranks.derived)}, so those states are derived from the seed"
            )
        return line

    def _write(self, step: LastStep, ranks: RankStates, seconds: float) -> None:
        checkpoint = checkpoint_of(step, self._trainer, self._recorder)
        checkpoint[KEY] = make_section(
            step.restart, seed=self._cursor.known_seed, stopped=step.stopped, ranks=ranks.states
        )
        checkpoint[FILE_KEY] = self._files.identity.content
        io = self._strategy.checkpoint_io
        if isinstance(io, RankZeroCheckpointIO):
            io.saver.deadline = seconds
            io.saver.finish()  # otherwise an earlier save error would prevent this save
        io.save_checkpoint(checkpoint, self._path)
        io.teardown()  # waits for a save in the background

    def _why_not(self, exception: BaseException) -> str | None:
        """Return why the last step cannot be saved, if another one may have begun."""
        trainer = self._trainer
        module = trainer.lightning_module
        recorder = self._recorder
        if not recorder.parameters.has_finished_step:
            return "no step has finished since the start"
        batch = trainer.fit_loop.epoch_loop.batch_progress.current
        is_between_batches = batch.ready == batch.processed
        if is_between_batches:
            if self._stops.weights.match(module.parameters()):
                return None
            return (
                "the weights changed after the last step, for example because weight averaging"
                " swapped them"
            )
        if not module.automatic_optimization:
            return "the failure happened in the middle of a batch with manual optimisation"
        if is_in_optimizer_step(trainer) and recorder.forward_passes > 1:
            return "the optimiser calls its closure several times per step"
        if is_in_optimizer_step(trainer) and not is_in_closure(exception):
            return "the next step had started to change the weights"
        return None


def _is_sharded(optimizer: Any) -> bool:
    """Whether each rank has only a shard of the optimiser's state."""
    names = [base.__name__ for base in type(optimizer).__mro__]
    return "ZeroRedundancyOptimizer" in names  # by name, because importing it is slow
