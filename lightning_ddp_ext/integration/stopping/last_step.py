"""Save the last finished optimiser step on this rank alone, after a failure.

Nothing is recorded while steps run. After the exception, weights and optimiser states are
still those after the last finished step, unless an optimiser step was interrupted; only
the state of Lightning's loops has to be moved back to this step.

Every rank whose run ends by an exception tries to save, and a lock lets one of them do
so. If that rank is killed meanwhile, another one takes over.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_ddp_ext.checkpoint.location import locate
from lightning_ddp_ext.checkpoint.save_lock import has_saved, save_if_furthest
from lightning_ddp_ext.forced_exit import delaying_forced_exit, print_in_time
from lightning_ddp_ext.ranks import reason_of
from lightning_ddp_ext.rendezvous.process_context import current

from ..checkpoints.background import BackgroundSaves
from ..checkpoints.run_files import RunFiles
from ..data.loop_state import ResumePoint, find_resume_point, stop_after_batch
from ..data.resume import KEY, Resume
from ..private.compat import (
    averages_models,
    batches_that_stepped_of,
    dump_checkpoint,
    fetcher_of,
    is_in_batch_end,
    is_in_closure,
    is_in_optimizer_step,
    is_in_tuner,
    is_sharded,
    validates_next,
)
from ..private.lightning_tree import pl
from ..start.devices import RankDevicesStrategy
from ..strategy_ranks import wait_and_detect_abort
from .stops import StopController


class Refused(Exception):
    """Raised with the reason why nothing is saved."""


@dataclass(frozen=True)
class _LastStep:
    """The point after the last finished step.

    Attributes:
        loops: the state of the fit loop at this point.
        point: where training continues.
        batches: the number of batches that were trained on until then, in all epochs.
    """

    loops: dict[str, Any]
    point: ResumePoint
    batches: int


class LastStepSaver:
    """Saves the last finished optimiser step of a fit that an exception ends.

    In a fit, :meth:`start` is called first, :meth:`save` if an exception ends it, and
    :meth:`end` in the teardown.

    Args:
        strategy: our strategy.
        files: the strategy's files.
        background: the strategy's saves in the background, which end first.
        stops: the strategy's stop controller, which has the deadline and knows the
            training progress.
        resume: knows the position in the training data.
    """

    def __init__(
        self,
        strategy: RankDevicesStrategy,
        files: RunFiles,
        background: BackgroundSaves,
        stops: StopController,
        resume: Resume,
    ) -> None:
        self._strategy = strategy
        self._files = files
        self._background = background
        self._stops = stops
        self._resume = resume
        # Time for this rank to save and exit after a failure.
        self._seconds = stops.deadline.total_seconds()
        # From `start` to `end`, in a fit whose last step is saved: the file, and a delay
        # of a forced exit.
        self._path: str | None = None
        self._delay = ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        """Return what spawned ranks need, without the state of this process."""
        return {**vars(self), "_path": None, "_delay": ExitStack()}

    def start(self) -> None:
        """Save the last step from now on, if the Trainer runs a fit."""
        self.end()
        stop = self._files.chosen.stop_checkpoint
        if current() is None or self._strategy.current_trainer.state.fn != "fit" or stop is None:
            return
        self._path = stop
        self._delay.enter_context(
            delaying_forced_exit(self._seconds, "save the last step", is_needed=self._loses_step)
        )

    def end(self) -> None:
        """Save nothing from now on."""
        self._path = None
        self._delay.close()

    def _loses_step(self) -> bool:
        """Whether a forced exit would lose a step. Called in the thread that would exit.

        Only another rank's failure makes the main thread raise and then save.
        """
        path = self._path  # the main thread may set it to None meanwhile
        context = current()
        cause = None if context is None else context.peers.cause
        if path is None or cause is None or cause.who.rank == self._strategy.global_rank:
            return False
        return self._stops.weights.has_trained and not has_saved(path, self._files.chosen.token)

    def save(self, exception: BaseException) -> None:
        """Save the last finished step, or print why it cannot be saved.

        Each rank calls this alone. It does nothing before training, after the ranks have
        saved together, and after Ctrl-C, which asks for an immediate exit.

        Args:
            exception: the exception that ends this rank's run.
        """
        path = self._path
        may_have_step = self._stops.weights.has_started and not self._stops.has_saved
        if path is None or not may_have_step or isinstance(exception, KeyboardInterrupt):
            return
        try:
            with delaying_forced_exit(self._seconds):
                line = self._save(path, exception)
        except Exception as error:
            reason = error if isinstance(error, Refused) else reason_of(error)
            line = f"this rank did not save the last step: {reason}"
        self.end()
        if line:
            print_in_time(f"[rank {self._strategy.global_rank}] {line}\n")

    def _save(self, path: str, exception: BaseException) -> str:
        """Save the last step, and return what to print.

        That is nothing if another rank has saved this step or a later one.

        Raises:
            Refused: the step cannot be saved.
        """
        trainer = self._strategy.current_trainer
        self._refuse_unsafe(trainer, exception)
        step = _find_last_step(trainer, exception)
        if step.batches <= self._stops.weights.batches_before:
            raise Refused("no step has finished since the start")
        write = partial(self._write, path, step)
        if not save_if_furthest(path, self._files.chosen.token, step.batches, write, self._seconds):
            return ""
        return (
            f"saved step {trainer.global_step} to {path}; resume with trainer.fit(...,"
            f" ckpt_path='last') or ckpt_path={path!r}"
        )

    def _refuse_unsafe(self, trainer: Any, exception: BaseException) -> None:
        """Raise :class:`Refused` if a run that resumes might not continue after the last step."""
        # Nothing can be saved in this fit, whatever happens.
        if trainer.fast_dev_run:
            raise Refused("fast_dev_run saves nothing")
        if averages_models(self._strategy):
            raise Refused("model_averaging_period lets the ranks have different weights")
        if any(map(is_sharded, self._strategy.optimizers)):
            raise Refused(
                "each rank has only a shard of the optimiser's state (ZeroRedundancyOptimizer)"
            )
        if self._resume.mode == "stock":
            raise Refused(
                'with resume_data="stock", training would not continue with the next step'
            )
        # The weights may not be those after the last finished step.
        module = trainer.lightning_module
        if is_in_tuner(exception):
            raise Refused("a tuner has changed the weights")
        if is_in_optimizer_step(trainer) and not is_in_closure(exception, trainer):
            raise Refused("the next step had started to change the weights")
        if not self._stops.weights.match(module):
            raise Refused("a hook has swapped the weights for this validation")
        if wait_and_detect_abort(self._strategy):
            raise Refused(
                "NCCL was aborted, and a step may have used the gradients of only some ranks"
            )
        if not all(torch.isfinite(each).all() for each in module.parameters()):
            raise Refused("the weights are not finite")

    def _write(self, path: str, step: _LastStep) -> None:
        """Write the checkpoint in the foreground, after the saves in the background."""
        checkpoint = _checkpoint_of(step, self._strategy.current_trainer)
        states = [self._resume.state_at(step.point, None)]
        checkpoint[KEY] = self._resume.make_section(step.point, states)
        self._background.finish_earlier()
        self._background.foreground_io.save_checkpoint(checkpoint, path)


def _find_last_step(trainer: Any, exception: BaseException) -> _LastStep:
    """Find the point after the last finished step, without changing the Trainer.

    The loops' state is completed, as if all ranks had stopped after the current batch, and
    then gives the point where training continues, as in any checkpoint.
    """
    loops = trainer.fit_loop.state_dict()
    accumulated = trainer.accumulate_grad_batches
    batch = loops["epoch_loop.batch_progress"]
    done = batch["current"]["processed"]  # of the epoch's batches
    has_ended_batch = batch["current"]["ready"] == batch["current"]["completed"]
    completes_step = batch["is_last_batch"] or done % accumulated == 0
    # Lightning counts a step after the hooks and the validation at the end of its batch.
    is_counted = completes_step and has_ended_batch and not is_in_batch_end(exception)
    loops, stopped = stop_after_batch(
        loops,
        accumulated=accumulated,
        stepped=batches_that_stepped_of(trainer.fit_loop.epoch_loop) - int(is_counted),
        validates=validates_next(trainer),
        has_validated=has_ended_batch and not trainer.validating,
    )
    point = find_resume_point(
        loops,
        accumulated=accumulated,
        stopped=stopped,
        has_ended=fetcher_of(trainer.fit_loop).done,
    )
    # Without the batches that have accumulated gradients since the last step.
    batches = batch["total"]["processed"] - point.dropped_of(done)
    return _LastStep(loops, point, batches)


def _checkpoint_of(step: _LastStep, trainer: Any) -> dict[str, Any]:
    """Return the Trainer's checkpoint after the step."""
    checkpoint = dump_checkpoint(trainer)
    checkpoint["loops"]["fit_loop"] = step.loops
    states = checkpoint["callbacks"]
    for callback in trainer.checkpoint_callbacks:
        is_stock = isinstance(callback, pl.callbacks.ModelCheckpoint)
        if is_stock and callback.state_key in states:
            _forget_missing_files(states[callback.state_key])
    return checkpoint


def _forget_missing_files(state: dict[str, Any]) -> None:
    """Drop missing files from a ``ModelCheckpoint``'s state.

    Rank 0 may have been writing such a file when it died. When the callback saves its
    next file, it determines the best and the worst one again.
    """
    scores = state.get("best_k_models", {})
    state["best_k_models"] = {path: scores[path] for path in scores if not _is_missing(path)}
    for name in ("best_model_path", "last_model_path"):
        if _is_missing(state.get(name, "")):
            state[name] = ""


def _is_missing(path: str) -> bool:
    """Whether a local file is missing in a directory that this host sees."""
    local = locate(path).local if path else None
    return local is not None and local.parent.is_dir() and not local.exists()
