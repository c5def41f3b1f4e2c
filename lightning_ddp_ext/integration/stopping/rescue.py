"""Save a surviving rank's state after another rank has died, failed or hung.

1. :meth:`Rescue.start` starts recording states, unless this run can never be saved.
2. After another rank's failure, :meth:`Rescue.save` finds out whether the last finished
   step can be saved, and saves it, unless another survivor has done so.
3. :meth:`Rescue.end` ends the recording.

Most parameters and the optimiser's state need no copy: with automatic optimisation, an
aborted collective raises before they change. Random states, buffers and parameters that
change before each forward pass are recorded in each step. A survivor saves all this in
an ordinary checkpoint, from which training can continue, unless another saved value may
have changed.
"""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from dataclasses import dataclass
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
from lightning_ddp_ext.rendezvous.peers import Peers
from lightning_ddp_ext.rendezvous.process_context import current

from ..checkpoints.fit_identity import KEY as FILE_KEY
from ..checkpoints.run_files import RunFiles
from ..data.resume import KEY, Resume
from ..private.compat import averages_models, is_in_closure, is_in_optimizer_step
from ..private.lightning_tree import rank_zero_warn
from ..start.devices import RankDevicesStrategy
from ..strategy_ranks import is_sharded, ranks_of
from .last_step import (
    LastStep,
    RankStates,
    Refused,
    checkpoint_of,
    find_last_step,
    states_of_ranks,
)
from .recorder import RecordedRun, Recorder
from .stops import StopController

# Events of a rank that leave the others in a state from which training can continue.
_SURVIVABLE = ("died", "failed", "hung")


@dataclass(frozen=True)
class _Run:
    """A run that may be saved.

    Attributes:
        trainer: its Trainer.
        peers: the other ranks.
        path: the path of the rescue checkpoint.
        token: distinguishes the run from others that save to this path.
        refusal: why nothing is recorded and this run cannot be saved, if so.
    """

    trainer: Any
    peers: Peers
    path: str
    token: str
    refusal: str | None


class Rescue:
    """Saves the last optimiser step after another rank has died, failed or hung.

    Args:
        strategy: our strategy.
        name: the name of a file next to the other checkpoints, or a path; ``None``
            saves nothing.
        files: the strategy's files.
        stops: the strategy's stop controller, which has the deadline and knows whether
            weights are swapped.
        resume: knows the position in the training data.
        recorder: records the state of each step, which the strategy's hooks ask for.
    """

    def __init__(
        self,
        strategy: RankDevicesStrategy,
        name: PathOrUrl | None,
        *,
        files: RunFiles,
        stops: StopController,
        resume: Resume,
        recorder: Recorder,
    ) -> None:
        self._strategy = strategy
        self._name = name
        self._files = files
        self._stops = stops
        self._resume = resume
        self._recorder = recorder
        self._run: _Run | None = None
        # What the run opened: the records, and the delay of a forced exit.
        self._opened = ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        """Return what spawned ranks need, without the state of this process."""
        return {**vars(self), "_run": None, "_opened": ExitStack()}

    def start(self) -> None:
        """Start recording states, if the Trainer runs ``fit`` on several ranks.

        Collective: every rank must call it.
        """
        self.end()
        trainer = self._strategy.current_trainer
        context = current()
        is_fit = trainer.state.fn == "fit" and not trainer.fast_dev_run
        if context is None or self._strategy.world_size == 1 or not is_fit or self._name is None:
            return
        path, token = self._share_names(trainer)
        if locate(path).local is None:
            raise ConfigurationError(
                "rescue_checkpoint must be on a file system, because the ranks need locks (got"
                f" {path}); pass a local path, such as '/shared/last-rescued.ckpt'"
            )
        refusal = self._why_never() or self._start_recording(context.peers)
        if refusal is not None:
            rank_zero_warn(f"rescue_checkpoint={self._name!r} saves nothing in this run: {refusal}")
        self._run = _Run(trainer, context.peers, path, token, refusal)

    def _share_names(self, trainer: Any) -> tuple[str, str]:
        """Return rank 0's path and a token of the run, and use its identity of the fit.

        Loggers choose directories on rank 0, and command lines may differ by rank.
        """
        ranks = ranks_of(self._strategy)
        files = self._files
        path = files.place(self._name, trainer) if ranks.rank == 0 else None
        own = (path, secrets.token_hex(8), files.identity)
        path, token, files.identity = ranks.from_rank_zero(own)
        return path, token

    def _start_recording(self, peers: Peers) -> str | None:
        """Start recording states, or return why this rank cannot."""
        try:
            records = open_records(ranks_of(self._strategy))
            for each in records.values():
                self._opened.callback(each.close)
            self._recorder.start(records, peers)
        except (OSError, RuntimeError) as error:
            return f"the ranks cannot record their states ({error})"
        self._opened.enter_context(
            delaying_forced_exit(
                self._seconds, "save the last step", is_needed=self._has_step_to_save
            )
        )
        return None

    def _why_never(self) -> str | None:
        """Return why nothing can be saved in this run, whatever happens."""
        if averages_models(self._strategy):
            return "model_averaging_period lets the ranks have different weights"
        if any(map(is_sharded, self._strategy.optimizers)):
            return "each rank has only a shard of the optimiser's state (ZeroRedundancyOptimizer)"
        if self._resume.mode == "stock":
            return 'with resume_data="stock", training would not continue with the next step'
        return None

    def end(self) -> None:
        """End the recording, and save nothing from now on."""
        self._run = None
        self._recorder.end()
        self._opened.close()

    def save(self, exception: BaseException) -> None:
        """Save the last finished step after another rank has caused an exception.

        Each surviving rank calls this by itself. It does nothing if another survivor has
        saved that step, and prints why the step cannot be saved.

        Args:
            exception: the exception that ends this rank's run.
        """
        run = self._run
        if run is None or not self._is_survivor_among(run.peers):
            return
        try:
            with delaying_forced_exit(self._seconds):
                line = self._save(run, exception)
        except Exception as error:
            reason = error if isinstance(error, Refused) else reason_of(error)
            line = f"this rank did not save the last step: {reason}"
        self.end()
        if line:
            print_in_time(f"[rank {self._strategy.global_rank}] {line}\n")

    def _is_survivor_among(self, peers: Peers) -> bool:
        """Whether another rank has caused a failure after which this rank may save."""
        cause = peers.cause
        if cause is None or cause.rank == self._strategy.global_rank:
            return False
        return cause.kind in _SURVIVABLE

    def _has_step_to_save(self) -> bool:
        """Whether a forced exit would lose a step. Called in another thread."""
        recorded = self._recorder.run
        if recorded is None or not recorded.parameters.has_finished_step:
            return False
        return self._is_survivor_among(recorded.peers)

    @property
    def _seconds(self) -> float:
        """The time for this rank to save and exit after a failure."""
        return self._stops.deadline.total_seconds()

    def _save(self, run: _Run, exception: BaseException) -> str:
        """Save the last step, and return what to print; empty if another rank saved it.

        Raises:
            Refused: the step cannot be saved.
        """
        recorded = self._recorder.run
        if recorded is None:
            raise Refused(run.refusal)
        refusal = recorded.error or self._why_not(run.trainer, recorded, exception)
        if refusal is not None:
            raise Refused(refusal)
        step = find_last_step(run.trainer, recorded)
        ranks = states_of_ranks(
            step,
            run.trainer,
            recorded,
            self._resume,
        )
        Path(run.path).parent.mkdir(parents=True, exist_ok=True)
        write = partial(self._write, run, recorded, step, ranks)
        if not save_if_furthest(run.path, run.token, step.batches, write, self._seconds):
            return ""
        line = (
            f"saved step {run.trainer.global_step} to {run.path}; resume with trainer.fit(...,"
            f" ckpt_path='last') or ckpt_path={run.path!r}"
        )
        if ranks.derived:
            line += (
                "; this host has no record of the random states of"
                f" {ranks_in_words(ranks.derived)}, so those states are derived from the seed"
            )
        return line

    def _write(self, run: _Run, recorded: RecordedRun, step: LastStep, ranks: RankStates) -> None:
        checkpoint = checkpoint_of(step, run.trainer, recorded)
        checkpoint[KEY] = self._resume.make_section(step.restart, step.stopped, ranks.states)
        checkpoint[FILE_KEY] = self._files.identity.to_entry()
        self._stops.finish_earlier_saves().save_checkpoint(checkpoint, run.path)

    def _why_not(self, trainer: Any, recorded: RecordedRun, exception: BaseException) -> str | None:
        """Return why the last step cannot be saved, if another one may have begun."""
        module = trainer.lightning_module
        if not recorded.parameters.has_finished_step:
            return "no step has finished since the start"
        batch = trainer.fit_loop.epoch_loop.batch_progress.current
        is_between_batches = batch.ready == batch.processed
        if is_between_batches:
            # Buffers are compared and restored later.
            if self._stops.weights.match(module, with_buffers=False):
                return None
            return (
                "the weights changed after the last step, for example because weight averaging"
                " swapped them"
            )
        if not module.automatic_optimization:
            return "the failure happened in the middle of a batch with manual optimisation"
        if is_in_optimizer_step(trainer) and recorded.forward_passes > 1:
            return "the optimiser calls its closure several times per step"
        if is_in_optimizer_step(trainer) and not is_in_closure(exception):
            return "the next step had started to change the weights"
        return None
