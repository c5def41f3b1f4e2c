"""Save where training continues, and continue there: in the middle of an epoch, or at its start.

**Saving.** The strategy adds one section to a checkpoint, which is otherwise unchanged,
so stock ``ddp`` can also resume from it. Random states are saved only between two
optimiser steps.

===========  =====================================================================
``version``  the version of the section
``seed``     the seed for the order of samples
``orders``   what determines each rank's orders, see :class:`~.orders.Orders`
``restart``  where training continues, a :class:`~.loop_state.ResumePoint`
``ranks``    of each rank that saved, the attributes of its :class:`RankState`
===========  =====================================================================

**Resuming.** A run passes through these phases, and one hook ends each of them:

================  ==============================================================
Phase             Ends
================  ==============================================================
not resumed       in :meth:`Resume.restore`, which reads the section, and changes
                  the saved state of Lightning's loops to the resume point
``"restored"``    in ``on_train_start``, which restores the random state, and
                  corrects the loops' numbers of batches
``"training"``    in :meth:`Resume.before_iterators` of the next epoch, which is
                  not resumed
================  ==============================================================

The iterators of the resumed epoch start before ``on_train_start`` if a loader has no
length, since Lightning then reads its first batch early; otherwise after it. Whichever is
first lets all ranks decide together whether each of them can continue in the middle of
the epoch; if not, all of them start it again. If the loaders are created again, the ranks
decide again.

Until ``end_restart``, Lightning's loops treat the epoch as restarted and leave out some
of its steps. When that ends, and when the random state is restored a second time, since
the iterators have drawn random numbers, depends on the resume point:

=====================  =============================  ==========================
Resume point           Restored again after           The restart ends in
                       iterators that start later
=====================  =============================  ==========================
next epoch             no                             ``on_train_start``
the same epoch again   yes                            ``on_train_start``
``"batch_end"``        yes                            ``on_train_batch_start``
``"validation"``       no                             ``on_validation_end``
``"epoch_end"``        there are none                 Lightning itself
=====================  =============================  ==========================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from lightning_ddp_ext.data.random_state import record_random_state, restore_random_state

from ..cooperation import CooperatingRanks
from ..private.compat import end_epoch_after, end_restart, fetcher_of
from ..private.lightning_tree import pl, rank_zero_warn
from ..private.replaced_methods import ReplacedMethods
from ..start.devices import RankDevicesStrategy
from ..stopping.stops import StopController
from ..strategy_ranks import ranks_of, report_step
from .loop_state import (
    ResumePoint,
    change_to,
    count_done,
    epoch_again,
    find_resume_point,
    is_saved_at,
)
from .orders import Orders, batches_of_epoch, epoch_of, positions_of

KEY = "lightning_ddp_ext"
VERSION = 15
ResumeData = Literal["exact", "stock"]


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


@dataclass
class ResumedEpoch:
    """The epoch in which a run resumes.

    Attributes:
        point: where it continues, according to the checkpoint, and then to the ranks'
            decision.
        rank: this rank's state.
        loops: the state of the fit loop, as it was saved.
        phase: see the module's table of phases.
    """

    point: ResumePoint
    rank: RankState
    loops: Mapping[str, Any]
    phase: Literal["restored", "training"] = "restored"


class Resume:
    """The point where a strategy's training continues.

    In a run, :meth:`attach` is called first, :meth:`restore` if a checkpoint is
    restored, and :meth:`save_to` for each checkpoint. :meth:`before_iterators` and
    :meth:`after_iterators` are called around the start of an epoch's iterators, which may
    be before :meth:`on_train_start`.

    Args:
        strategy: our strategy.
        ranks: gathers the ranks' states.
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
        ranks: CooperatingRanks,
        stops: StopController,
        replaced: ReplacedMethods,
        mode: ResumeData,
    ) -> None:
        self._strategy = strategy
        self._ranks = ranks
        self._stops = stops
        self._replaced = replaced
        self.mode = mode
        self.orders = Orders(strategy)
        self._resumed: ResumedEpoch | None = None  # in phase "not resumed"
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
        self._resumed = None
        self._before_validation = None

    @property
    def start(self) -> ResumePoint:
        """Where this run begins or began the current epoch: at a resume point, or as a whole."""
        if self._resumed is None:
            return ResumePoint("epoch_start", epoch_of(self._trainer))
        return self._resumed.point

    @property
    def awaits_train_start(self) -> bool:
        """Whether a checkpoint was restored, and ``on_train_start`` was not called since."""
        return self._resumed is not None and self._resumed.phase == "restored"

    @property
    def epoch(self) -> int:
        """The current or next training epoch.

        It is correct even before Lightning has restored its loops.
        """
        return max(epoch_of(self._trainer), self.start.epoch)

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
        point = find_resume_point(
            loops,
            accumulated=self._trainer.accumulate_grad_batches,
            stopped=self._stops.stopped,
            has_ended=fetcher is not None and fetcher.done,
        )
        if self._resumed is not None and self._resumed.phase == "restored":
            state = self._resumed.rank  # nothing has changed since then
        else:
            state = self.state_at(point, self._random_state_at(point, loops))
        states = [state] if is_alone else self._ranks.to_rank_zero(state, what)
        checkpoint[KEY] = self.make_section(point, states or [])

    def make_section(self, point: ResumePoint, states: Iterable[RankState]) -> dict[str, Any]:
        """Return the section of a checkpoint, in plain containers.

        Args:
            point: where training continues.
            states: those of the ranks that save.
        """
        return {
            "version": VERSION,
            "seed": self.orders.seed,
            "orders": self.orders.by_rank,
            "restart": vars(point),
            "ranks": [vars(state) for state in states],
        }

    def state_at(self, point: ResumePoint, random: list[Any] | None) -> RankState:
        """Return this rank's state in a checkpoint that continues at ``point``."""
        positions = positions_of(self._trainer) if point.is_within else []
        done_before = self.start.done if self.start.is_within else 0  # in an earlier run
        places = [position.state_after(point.done - done_before) for position in positions]
        return RankState(self._strategy.global_rank, random, places)

    def _random_state_at(self, point: ResumePoint, loops: Mapping[str, Any]) -> list[Any] | None:
        """Return the random state with which training continues; ``None`` if it is unknown."""
        if point.at == "validation":
            return self._before_validation  # the validation runs again
        if not is_saved_at(point, loops, stopped=self._stops.stopped):
            return None
        return record_random_state(device_generators(self._strategy))

    def before_validation(self) -> None:
        """Record the random state for checkpoints that are saved during the validation.

        Further iterators of the same validation change nothing.
        """
        if self._before_validation is None:
            self._before_validation = record_random_state(device_generators(self._strategy))

    # Restoring.

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Prepare to resume from a checkpoint, and correct its loop state."""
        if self._trainer.state.fn != "fit" or "loops" not in checkpoint or self.mode == "stock":
            return
        # Lightning has saved rank 0's states of loaders, but each rank has its own.
        loops = {**checkpoint["loops"]["fit_loop"], "state_dict": {}}
        section = checkpoint.get(KEY) or {}
        if section.get("version") == VERSION:
            self.orders.restore(section["seed"], section["orders"])
            point = ResumePoint(**section["restart"])
            state = state_of_rank(self._strategy.global_rank, section["ranks"])
        else:
            point = find_resume_point(loops, accumulated=self._trainer.accumulate_grad_batches)
            if point.is_within:
                _warn(
                    point.epoch,
                    "the checkpoint has no position that this release can read; save at the end"
                    " of an epoch before you change the strategy or its release",
                )
                point = epoch_again(point.epoch)
            state = RankState(self._strategy.global_rank, random=None, loaders=[])
        self._resumed = ResumedEpoch(point, state, loops)
        checkpoint["loops"]["fit_loop"] = change_to(loops, point)

    # The resumed epoch.

    def before_iterators(self) -> None:
        """Prepare the training loaders for the iterators of an epoch.

        Collective in the resumed epoch.
        """
        report_step()  # names a rank that still waits in a call of the epoch before
        if self.epoch > self.start.epoch:
            self._resumed = None  # the resumed epoch has ended
        if self._resumed is not None:
            self._decide(self._resumed)
        if not self.start.is_within:
            self.orders.start_epoch(self.epoch)

    def after_iterators(self) -> None:
        """Gather the orders, and restore a random state that was saved after such iterators.

        Collective.
        """
        self.orders.gather()
        is_saved_after = self.start.at == "batch_end" or self.start.has_started
        # In phase "restored", `on_train_start` restores it.
        if self._resumed is not None and self._resumed.phase == "training" and is_saved_after:
            self._restore_random_state(self._resumed)

    def _decide(self, resumed: ResumedEpoch) -> None:
        """Decide whether to continue in the middle of the resumed epoch, or to start it again.

        Collective, unless the loaders are at this epoch already, as decided before. New
        loaders are at none.
        """
        epoch = resumed.point.epoch
        if not resumed.point.is_within or positions_of(self._trainer)[0].epoch == epoch:
            return
        problem = self.orders.continue_epoch(epoch, resumed.rank.loaders)
        problems = list(filter(None, ranks_of(self._strategy).gather(problem)))
        if not problems:
            return
        _warn(epoch, problems[0])
        resumed.point = epoch_again(epoch)
        resumed.rank = replace(resumed.rank, random=None)
        self._trainer.fit_loop.load_state_dict(change_to(resumed.loops, resumed.point))
        self._trainer.fit_loop.update_restart_stage()

    # Hooks of the fit loop.

    def on_train_start(self) -> None:
        """Set the counters and the random state with which training continues.

        Collective in a resumed run.
        """
        resumed = self._resumed
        reached = (
            epoch_of(self._trainer),
            self._trainer.fit_loop.epoch_loop.batch_progress.current.processed,
        )
        if resumed is None or reached != (resumed.point.epoch, resumed.point.done):
            self._resumed = None  # a `LearningRateFinder` has set the loops to its own file
            return
        resumed.phase = "training"
        for callback in self._trainer.callbacks:
            if isinstance(callback, pl.callbacks.GradientAccumulationScheduler):
                # An epoch that continues has no start, in which it sets the number of batches.
                callback.on_train_epoch_start(self._trainer)
        self._decide(resumed)
        self._restore_random_state(resumed)
        if resumed.point.is_within:
            self._replaced.hide_warning(
                ".*resuming from a checkpoint that ended before the epoch ended"
            )
            self._count_batches_again(resumed)
        elif resumed.point.at == "epoch_start":
            # Lightning then creates the iterators again after the hooks, as in a whole run.
            # They draw the seeds of workers.
            end_restart(self._trainer.fit_loop)

    def _count_batches_again(self, resumed: ResumedEpoch) -> None:
        """Set the loops to the numbers of batches, done and in all, on these ranks.

        Both change with the number of ranks and the batch size, see :func:`count_done`.
        """
        whole, left = batches_of_epoch(self._trainer)
        limit = self._trainer.num_training_batches
        done = count_done(
            resumed.point.done,
            whole=whole,
            left=left,
            limit=limit,
            accumulated=self._trainer.accumulate_grad_batches,
        )
        current = self._trainer.fit_loop.epoch_loop.batch_progress.current
        current.ready = current.started = current.processed = done
        current.completed = done - 1 if resumed.point.at == "batch_end" else done
        if done + left < limit:
            end_epoch_after(self._trainer, int(done + left))
        resumed.point = replace(resumed.point, done=done)

    def _restore_random_state(self, resumed: ResumedEpoch) -> None:
        """Restore this rank's random state, if it was saved."""
        restore_random_state(resumed.rank.random or (), device_generators(self._strategy))

    def on_train_batch_start(self) -> None:
        """Let Lightning's loops continue as usual, once the first batch was read."""
        if self.start.is_within:
            # Otherwise Lightning would skip schedulers that monitor a metric at the epoch's end.
            end_restart(self._trainer.fit_loop)

    def on_validation_end(self) -> None:
        """Let the epoch end as usual, if the resume began with a validation."""
        self._before_validation = None
        if self.start.at == "validation" and not self._trainer.sanity_checking:
            end_restart(self._trainer.fit_loop)


def device_generators(strategy: RankDevicesStrategy) -> list[Any]:
    """Return the generators of this rank's CUDA devices."""
    devices = [device for device in strategy.rank_devices if device.type == "cuda"]
    return [torch.cuda.default_generators[device.index] for device in devices]


def _warn(epoch: int, problem: str) -> None:
    rank_zero_warn(
        f"epoch {epoch} cannot be resumed in the middle, so that epoch starts again: {problem}"
    )
