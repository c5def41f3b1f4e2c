"""Stop a Trainer on all ranks after the same step, when one receives a signal.

1. :meth:`StopController.attach` installs signal handlers at the start of a run.
2. A signal to any rank requests a stop from ``supervision.graceful_stop``, which lets all
   ranks agree on a stop point.
3. Each rank passes the same stop points. The iterator over the training data calls
   :meth:`~StopController.before_batch`; the strategy's hooks call the others. Where all
   ranks have agreed to stop, they save and raise :class:`StoppedException`.
4. :meth:`StopController.detach` restores the handlers after the run.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

from lightning_ddp_ext.rendezvous.runs import Run, current_run
from lightning_ddp_ext.supervision.graceful_stop import GracefulStop, StopRequest
from lightning_ddp_ext.supervision.session import current_session
from lightning_ddp_ext.supervision.signals import status_of

from ..checkpoints.background import BackgroundSaves
from ..checkpoints.run_files import RunFiles
from ..data.loop_state import Stopped
from ..private.compat import treat_next_exception_as_stop
from ..private.lightning_tree import TrainerStatus, pl, rank_zero_info
from ..private.replaced_methods import ReplacedMethods
from ..start.devices import RankDevicesStrategy
from ..start.slurm import needs_requeue, requeue, requeue_signal_of
from .training_weights import TrainingWeights

# torchrun kills ranks 30 s after its SIGTERM. Elsewhere the time is a setting of the system,
# such as SLURM's KillWait or a grace period of Kubernetes, which no rank can read.
_UNDER_TORCHRUN = timedelta(seconds=25)
_ELSEWHERE = timedelta(minutes=10)


def default_deadline() -> timedelta:
    """Return the time for all ranks to exit after a signal, unless set by the user."""
    return _UNDER_TORCHRUN if "TORCHELASTIC_RUN_ID" in os.environ else _ELSEWHERE


class StoppedException(pl.utilities.exceptions.SIGTERMException):
    """Raised on all ranks after they have stopped together.

    The process exits with the signal's usual status.
    """

    def __init__(self, signum: int) -> None:
        # Newer versions of the base class take no status.
        SystemExit.__init__(self, status_of(signum))


class StopController:
    """Stops a strategy's Trainer on all ranks after a signal to any rank.

    All methods are called in the main thread, except for ``_acknowledge``.

    Args:
        strategy: our strategy.
        files: the strategy's files, of which the stop checkpoint is saved.
        background: the strategy's saves in the background, which end first.
        deadline: time for all ranks to exit after a signal.

    Attributes:
        deadline: the argument.
        weights: the training progress of the current run, or of the last one. The
            strategy and its loaders report training and validation to it.
        stopped: the stop point at which all ranks are stopping in this run, recorded in
            the checkpoint; ``None`` if they are not, or at the run's end.
        has_saved: whether the ranks have saved the stop checkpoint of this run together.
    """

    def __init__(
        self,
        strategy: RankDevicesStrategy,
        files: RunFiles,
        background: BackgroundSaves,
        deadline: timedelta,
    ) -> None:
        self._strategy = strategy
        self._files = files
        self._background = background
        self.deadline = deadline
        # Of the current run, or of the last one: `attach` resets them all.
        self.weights = TrainingWeights()
        self.stopped: Stopped | None = None
        self.has_saved = False
        self._trainer: Any = None
        self._run = Run(is_outermost=False)
        # From `attach` to `detach`, if this run handles signals.
        self._stop: GracefulStop | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what spawned ranks need, without the state of this process."""
        return {**vars(self), "_trainer": None, "_stop": None}

    # The Trainer's run.

    def attach(self, trainer: Any, replaced: ReplacedMethods) -> None:
        """Begin a run of this Trainer, and handle signals during it.

        In a process group that we did not create, Lightning handles them. Within
        another Trainer's run, that run does.
        """
        run = current_run() or Run(is_outermost=False)  # a user may call setup_environment
        if run.is_outermost:
            self.detach()  # an earlier run may not have been torn down
        self.weights = TrainingWeights()
        self.stopped = None
        self.has_saved = False
        self._trainer = trainer
        self._run = run
        session = current_session()
        if session is None:
            return
        replaced.leave_signals_to_us(trainer)
        if run.is_outermost:
            self._stop = session.start_stops(self.deadline, self._acknowledge)
            before_time_limit = requeue_signal_of(self._strategy.cluster_environment)
            handled = [signal.SIGTERM, signal.SIGINT, before_time_limit]
            self._stop.signals.install(*filter(None, handled))

    def detach(self) -> None:
        """End the Trainer's run, and restore the signal handlers.

        A signal that arrived after the last stop point is then raised again. After an
        exception or a stop it is not, since the exception ends the process.
        """
        has_failed = self._run.has_failed
        self._run.has_failed = False  # ranks cooperate again, as the Trainer has handled it
        stop = self._stop
        if stop is None:
            return
        self._stop = None
        stop.end()
        if not has_failed and self._trainer.state.status != TrainerStatus.INTERRUPTED:
            stop.signals.raise_late()

    def _acknowledge(self, request: StopRequest) -> None:
        """Log the signal immediately, in a thread of rank 0.

        A step may take a long time, and users might otherwise press Ctrl-C again.
        """
        saves = self._files.chosen.stop_checkpoint is not None
        stop = ", save and stop" if saves else " and stop without saving"
        if request.signum == signal.SIGINT:
            stop += "; press Ctrl-C again to exit immediately without saving"
        rank_zero_info(f"{request}: the ranks will finish the current step{stop}")

    # Stop points. Every rank passes the same ones in the same order.

    def before_batch(self) -> None:
        """Stop between two training batches, if the ranks have agreed to."""
        if self._stop is not None:
            self._stop_if_agreed(self._stop.at_point(), "batch")

    def at_step(self) -> None:
        """Stop before a step of an evaluation, if the ranks have agreed to."""
        if self._stop is not None:
            self._stop_if_agreed(self._stop.at_step(self._may_stop), "validation")

    def at_end_of_evaluation(self) -> None:
        """Stop after an evaluation outside of training, if the ranks have agreed to."""
        if self._trainer is not None and self._trainer.state.fn != "fit":
            self.at_end()

    def at_end(self) -> None:
        """Stop at the end of the Trainer's run, if the ranks have agreed to. Collective."""
        if self._stop is not None:
            self._stop_if_agreed(self._stop.at_last_point(), None)

    def _may_stop(self) -> bool:
        """Whether a checkpoint would contain the training weights, according to rank 0.

        Collective.
        """
        may_stop = self._strategy.broadcast(self.weights.match(self._trainer.lightning_module))
        if not may_stop:
            rank_zero_info(
                "the ranks will finish this validation before they stop: a hook has swapped the"
                " weights"
            )
        return may_stop

    def _stop_if_agreed(self, agreed: StopRequest | None, point: Stopped | None) -> None:
        """Save, requeue the job if necessary, and raise, if the ranks have agreed to stop.

        Collective if they have.

        Args:
            agreed: the request if all ranks stop here, and otherwise ``None``.
            point: the stop point, as the checkpoint records it.
        """
        if agreed is None:
            return
        self.stopped = point  # before the save, since the checkpoint records it
        # Asked before the save, after which the other ranks exit and a launcher may kill this one.
        requeues = self._needs_requeue(agreed.signum)
        saved = self._save() if self.weights.has_trained else "nothing to save yet"
        self._background.finish()  # no save may continue in the background at the exit
        rank_zero_info(f"{agreed}: all ranks stop {self._describe_point()}; {saved}")
        if requeues:
            self._requeue()  # last, because SLURM may end this process
        treat_next_exception_as_stop(self._trainer)
        raise StoppedException(agreed.signum)

    def _save(self) -> str:
        """Save the stop checkpoint, and return what to log about it. Collective."""
        path = self._files.chosen.stop_checkpoint
        if path is None:
            return "nothing is saved (stop_checkpoint=None)"
        self._background.finish_earlier()
        # The default is given, since Lightning would announce on each rank that it is used.
        self._trainer.save_checkpoint(path, weights_only=False)
        self.has_saved = True
        return (
            f"saved to {path}; resume with the same command and trainer.fit(...,"
            " ckpt_path='last'), or pass this path as ckpt_path"
        )

    def _describe_point(self) -> str:
        if self._trainer.state.fn != "fit":
            return f"during trainer.{self._trainer.state.fn.value}"
        if not self.weights.has_trained:
            return "before the first step"
        return f"after step {self._trainer.global_step}"

    def _needs_requeue(self, signum: int) -> bool:
        """Whether rank 0 has to requeue the SLURM job, because its end is not final."""
        environment = self._strategy.cluster_environment
        return self._trainer.is_global_zero and needs_requeue(environment, signum)

    def _requeue(self) -> None:
        for logger in self._trainer.loggers:
            logger.finalize("finished")
        rank_zero_info(requeue())
