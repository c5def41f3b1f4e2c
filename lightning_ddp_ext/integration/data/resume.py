"""Save where training continues, and continue there: in the middle of an epoch, or at its start.

A run that resumes takes three steps:

1. :meth:`Resume.restore` reads the point from the checkpoint, and changes the saved state
   of Lightning's loops to it. The training loaders may not have been created yet.
2. All ranks decide together whether each of them can continue in the middle of the epoch;
   otherwise all of them start it again. They do so when the epoch's first batch is
   requested, or in ``on_train_start``, whichever is first. If the loaders are created
   again, the ranks decide again.
3. ``on_train_start`` restores the random state, and corrects the loops' numbers of
   batches.

When the next epoch begins, the run is no longer a resumed one. Random states are saved
only if the checkpoint is saved between two optimiser steps.

The strategy adds one section to a checkpoint, which is otherwise unchanged, so stock
``ddp`` can also resume from it:

===========  =====================================================================
``version``  the version of the section
``seed``     the seed for the order of samples
``orders``   what determines each rank's orders, see :class:`~.orders.Orders`
``restart``  where training continues, a :class:`~.loop_state.Restart`
``ranks``    of each rank that saved, the attributes of its :class:`RankState`
===========  =====================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from lightning_ddp_ext.data.random_state import record_random_state, restore_random_state

from ..checkpoints.collective import Checkpoints
from ..private.compat import end_epoch_after, end_restart, fetcher_of
from ..private.lightning_tree import pl, rank_zero_warn
from ..private.replaced_methods import ReplacedMethods
from ..start.devices import RankDevicesStrategy
from ..stopping.stops import StopController
from ..strategy_ranks import ranks_of, report_step
from .loop_state import Restart, change_to, count_done, find_restart
from .orders import Orders
from .training_loaders import batches_of_epoch, epoch_of, positions_of

KEY = "lightning_ddp_ext"
VERSION = 15
ResumeData = Literal["exact", "stock"]
Phase = Literal["not resumed", "restored", "training"]  # see `ResumedFrom`


@dataclass(frozen=True)
class RankState:
    """The part of a checkpoint that belongs to one rank.

    Attributes:
        rank: its number.
        random: the states of its generators, as ``record_random_state`` returns them;
            ``None`` if the checkpoint was saved during an optimiser step, or without this
            rank.
        loaders: for each training loader, its place, as ``Position.state_after`` returns
            it; empty if an epoch begins.
    """

    rank: int
    random: list[Any] | None
    loaders: list[dict[str, Any]]


@dataclass(frozen=True)
class ResumedFrom:
    """The checkpoint with which a run resumes, and how far the run has come with it.

    =================  ===================================  ==============================
    Phase              Begins                               Ends
    =================  ===================================  ==============================
    ``"not resumed"``  with each run, and with the epoch    when a checkpoint is restored
                       after the resumed one
    ``"restored"``     when a checkpoint is restored        in ``on_train_start``
    ``"training"``     in ``on_train_start``, unless the    with the next epoch
                       loops have been set to another epoch
    =================  ===================================  ==============================

    Attributes:
        phase: see the table.
        restart: the point where training continues, according to the checkpoint, and
            then to the ranks' decision.
        loops: the state of the fit loop, as it was saved.
        rank: this rank's state.
    """

    phase: Phase
    restart: Restart
    loops: Mapping[str, Any]
    rank: RankState


# No epoch has the number -1, so none continues there.
NOTHING = ResumedFrom(
    "not resumed",
    Restart("epoch_start", epoch=-1),
    loops={},
    rank=RankState(0, None, []),
)


class Resume:
    """The point where a strategy's training continues.

    In a run, :meth:`attach` is called first, :meth:`restore` if a checkpoint is
    restored, and :meth:`save_to` for each checkpoint. :meth:`on_train_start` and the
    iterators of the first epoch come in either order: :meth:`before_iterators` and
    :meth:`after_iterators` are called around the start of an epoch's iterators.

    Args:
        strategy: our strategy.
        checkpoints: gathers the ranks' states.
        stops: knows whether all ranks stop.
        replaced: hides Lightning's warning of a resume in the middle of an epoch.
        mode: the argument ``resume_data`` of ``DDPExtStrategy``.

    Attributes:
        mode: the argument.
        orders: determines the orders of the training loaders.
    """

    def __init__(
        self,
        strategy: RankDevicesStrategy,
        checkpoints: Checkpoints,
        stops: StopController,
        replaced: ReplacedMethods,
        mode: ResumeData,
    ) -> None:
        self._strategy = strategy
        self._checkpoints = checkpoints
        self._stops = stops
        self._replaced = replaced
        self.mode = mode
        self.orders = Orders(strategy)
        self._reset()

    def _reset(self) -> None:
        self._resumed = NOTHING
        # From the start of a validation to its end: the random state before it.
        self._before_validation: list[Any] | None = None

    @property
    def _trainer(self) -> Any:
        return self._strategy.current_trainer

    def attach(self, trainer: Any) -> None:
        """Reset the state for a Trainer that has not loaded a checkpoint."""
        if trainer.state.fn == "fit":
            # A checkpoint that is saved after an evaluation has the seed of the fit before it.
            self.orders = Orders(self._strategy)
        self._reset()

    @property
    def restart(self) -> Restart:
        """Where the resumed epoch continues; in other epochs, that of ``NOTHING``."""
        return self._resumed.restart

    @property
    def awaits_train_start(self) -> bool:
        """Whether a checkpoint was restored, and ``on_train_start`` was not called since."""
        return self._resumed.phase == "restored"

    @property
    def epoch(self) -> int:
        """The current or next training epoch.

        It is correct even before Lightning has restored its loops.
        """
        return max(epoch_of(self._trainer), self.restart.epoch)

    # Saving.

    def save_to(self, checkpoint: dict[str, Any], what: str, *, is_alone: bool) -> None:
        """Add the section with the point where training continues to a checkpoint.

        Collective, unless this rank saves alone. Without training data, as in a process
        that has only started ranks, nothing is added.

        Args:
            checkpoint: the checkpoint.
            what: the call that saves it, for errors.
            is_alone: whether this rank saves alone.
        """
        if "loops" not in checkpoint or self.orders.seed is None:
            return
        loops = checkpoint["loops"]["fit_loop"]
        fetcher = fetcher_of(self._trainer.fit_loop)
        restart = find_restart(
            loops,
            accumulated=self._trainer.accumulate_grad_batches,
            stopped=self._stops.stopped,
            has_ended=fetcher is not None and fetcher.done,
        )
        if self.awaits_train_start:
            state = self._resumed.rank  # nothing has changed since then
        else:
            state = self.state_at(restart, self._random_state_at(restart, loops))
        states = [state] if is_alone else self._checkpoints.to_rank_zero(state, what)
        checkpoint[KEY] = self.make_section(restart, states or [])

    def make_section(self, restart: Restart, states: Iterable[RankState]) -> dict[str, Any]:
        """Return the section of a checkpoint, in plain containers.

        Args:
            restart: where training continues.
            states: those of the ranks that save.
        """
        return {
            "version": VERSION,
            "seed": self.orders.seed,
            "orders": [(each.keys, each.checksums) for each in self.orders.by_rank],
            "restart": vars(restart),
            "ranks": [vars(state) for state in states],
        }

    def state_at(self, restart: Restart, random: list[Any] | None) -> RankState:
        """Return this rank's state in a checkpoint that continues at ``restart``."""
        positions = positions_of(self._trainer) if restart.is_within else []
        done_before = self.restart.done if self.restart.is_within else 0  # in an earlier run
        places = [position.state_after(restart.done - done_before) for position in positions]
        return RankState(self._strategy.global_rank, random, places)

    def _random_state_at(self, restart: Restart, loops: Mapping[str, Any]) -> list[Any] | None:
        """Return this rank's random state, or ``None`` in the middle of an optimiser step."""
        if restart.at == "validation":
            return self._before_validation
        batch = loops["epoch_loop.batch_progress"]["current"]
        # A step that takes `dataloader_iter` requests its batch after it has begun.
        is_in_batch = batch["ready"] != batch["processed"] and self._stops.stopped is None
        if is_in_batch or restart.dropped_of(batch["processed"]):
            return None
        return record_random_state(device_generators(self._strategy))

    def before_validation(self) -> None:
        """Record the random state, since an interrupted validation runs again.

        Further iterators of the same validation change nothing.
        """
        if self._before_validation is None:
            self._before_validation = record_random_state(device_generators(self._strategy))

    # Restoring.

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Prepare to resume from a checkpoint, and correct its loop state."""
        trainer = self._trainer
        if trainer.state.fn != "fit" or "loops" not in checkpoint or self.mode == "stock":
            return
        # Lightning has saved rank 0's states of loaders, but each rank has its own.
        loops = {**checkpoint["loops"]["fit_loop"], "state_dict": {}}
        section = checkpoint.get(KEY) or {}
        if section.get("version") == VERSION:
            self.orders.restore(section["seed"], section["orders"])
            restart = Restart(**section["restart"])
            state = state_of_rank(self._strategy.global_rank, section["ranks"])
        else:
            restart = find_restart(loops, accumulated=trainer.accumulate_grad_batches)
            if restart.is_within:
                _warn(
                    restart.epoch,
                    "the checkpoint has no position that this release can read; save at the end"
                    " of an epoch before you change the strategy or its release",
                )
                restart = restart.from_epoch_start()
            state = self.state_at(restart, None)
        self._resumed = ResumedFrom("restored", restart, loops, state)
        checkpoint["loops"]["fit_loop"] = change_to(loops, restart)

    # The resumed epoch.

    def before_iterators(self) -> None:
        """Prepare the training loaders for the iterators of an epoch.

        Collective in the resumed epoch.
        """
        report_step()  # names a rank that still waits in a call of the epoch before
        if self.epoch > self.restart.epoch:
            self._resumed = NOTHING
        self._decide()
        if not self.restart.is_within:
            for position in positions_of(self._trainer):
                position.start_epoch(self.epoch)

    def after_iterators(self) -> None:
        """Restore a random state that was saved after the epoch's iterators had started.

        Collective.
        """
        self.orders.gather()
        is_saved_after = self.restart.at == "batch_end" or self.restart.has_started
        # Before `on_train_start`, that hook restores it.
        if self._resumed.phase == "training" and is_saved_after:
            self._restore_random_state()

    def _decide(self) -> None:
        """Decide whether to continue in the middle of the resumed epoch, or to start it again.

        Collective, unless that was decided for these loaders.
        """
        self.orders.assign()
        restart = self.restart
        if not restart.is_within or positions_of(self._trainer)[0].epoch == restart.epoch:
            return
        problem = self.orders.continue_epoch(restart.epoch, self._resumed.rank.loaders)
        problems = list(filter(None, ranks_of(self._strategy).gather(problem)))
        if not problems:
            return
        _warn(restart.epoch, problems[0])
        self._resumed = replace(
            self._resumed,
            restart=restart.from_epoch_start(),
            rank=replace(self._resumed.rank, random=None),
        )
        fit_loop = self._trainer.fit_loop
        fit_loop.load_state_dict(change_to(self._resumed.loops, self.restart))
        fit_loop.update_restart_stage()

    # Hooks of the fit loop.

    def on_train_start(self) -> None:
        """Set the counters and the random state with which training continues.

        Collective in a resumed run.
        """
        done = self._trainer.fit_loop.epoch_loop.batch_progress.current.processed
        if (epoch_of(self._trainer), done) != (self.restart.epoch, self.restart.done):
            # Not resumed, or a `LearningRateFinder` has set the loops to its own file.
            self._resumed = NOTHING
            return
        self._resumed = replace(self._resumed, phase="training")
        for callback in self._trainer.callbacks:
            if isinstance(callback, pl.callbacks.GradientAccumulationScheduler):
                # An epoch that continues has no start, in which it sets the number of batches.
                callback.on_train_epoch_start(self._trainer)
        self._decide()
        self._restore_random_state()
        if self.restart.is_within:
            self._replaced.hide_warning(
                ".*resuming from a checkpoint that ended before the epoch ended"
            )
            self._count_batches_again()
        elif self.restart.at == "epoch_start":
            # Lightning then creates the iterators again after the hooks, as in a whole run.
            # They draw the seeds of workers.
            end_restart(self._trainer.fit_loop)

    def _count_batches_again(self) -> None:
        """Set the loops to the numbers of batches, done and in all, on these ranks.

        Both change with the number of ranks and the batch size, see :func:`count_done`.
        """
        whole, left = batches_of_epoch(self._trainer)
        limit = self._trainer.num_training_batches
        done = count_done(
            self.restart.done,
            whole=whole,
            left=left,
            limit=limit,
            accumulated=self._trainer.accumulate_grad_batches,
        )
        current = self._trainer.fit_loop.epoch_loop.batch_progress.current
        current.ready = current.started = current.processed = done
        current.completed = done - 1 if self.restart.at == "batch_end" else done
        if done + left < limit:
            end_epoch_after(self._trainer, int(done + left))
        self._resumed = replace(self._resumed, restart=replace(self.restart, done=done))

    def _restore_random_state(self) -> None:
        """Restore this rank's random state, if it was saved."""
        restore_random_state(self._resumed.rank.random or (), device_generators(self._strategy))

    def on_train_batch_start(self) -> None:
        """Let Lightning's loops continue as usual, once the first batch was read."""
        if self.restart.is_within:
            # Otherwise the epoch's end would skip schedulers that monitor a metric.
            end_restart(self._trainer.fit_loop)

    def on_validation_end(self) -> None:
        """Let the epoch end as usual, if the resume began with a validation."""
        self._before_validation = None
        if self.restart.at == "validation" and not self._trainer.sanity_checking:
            end_restart(self._trainer.fit_loop)


def state_of_rank(rank: int, saved: Sequence[Mapping[str, Any]]) -> RankState:
    """Return a rank's state from the section of a checkpoint.

    A rank that did not save uses the places of one that did, without random states and
    states of loaders, which belong to that rank alone.

    >>> place = {"identity": {}, "at": 8, "state": "of the loader on rank 0"}
    >>> saved = [{"rank": 0, "random": ["of rank 0"], "loaders": [place]}]
    >>> state_of_rank(1, saved)
    RankState(rank=1, random=None, loaders=[{'identity': {}, 'at': 8, 'state': None}])
    """
    places = [{**place, "state": None} for place in saved[0]["loaders"]]
    shared = RankState(rank, None, places)
    return next((RankState(**state) for state in saved if state["rank"] == rank), shared)


def device_generators(strategy: RankDevicesStrategy) -> list[Any]:
    """Return the generators of this rank's CUDA devices."""
    devices = [device for device in strategy.rank_devices if device.type == "cuda"]
    return [torch.cuda.default_generators[device.index] for device in devices]


def _warn(epoch: int, problem: str) -> None:
    rank_zero_warn(
        f"epoch {epoch} cannot be resumed in the middle, so that epoch starts again: {problem}"
    )
