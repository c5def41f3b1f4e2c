"""Save where training continues, and continue there: in the middle of an epoch, or at its start.

A run is in one of three phases:

===========  =======================================================================
not resumed  no checkpoint was read, or its epoch is over; ``_saved`` is ``None``
read         ``_saved`` is the place in the file; the loaders may not be known yet
decided      all ranks continue at ``_saved``, which may now be the epoch's start
===========  =======================================================================

All ranks decide together, once, when the first batch is requested or in
``on_train_start``, whichever is first.

Random states are saved only if the checkpoint is saved between two optimiser steps.

The strategy adds one section to a checkpoint, which is otherwise unchanged, so stock
``ddp`` can also resume from it:

===========  =====================================================================
``version``  the version of the section
``seed``     the seed for the order of samples
``orders``   what determines each rank's orders, see :class:`~.training_loaders.Orders`
``restart``  where training continues, a :class:`~.loop_state.Restart`
``ranks``    of each rank that saved: its ``rank``, its random states
             (``random``), and for each training loader the place (``loaders``)
===========  =====================================================================
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from lightning_ddp_ext.data.position import Position
from lightning_ddp_ext.data.proxy import length_or_inf, name_of
from lightning_ddp_ext.data.random_state import record_random_state, restore_random_state

from ..checkpoints.collective import Checkpoints
from ..named_calls import report_step
from ..private.compat import end_epoch_after, end_restart, fetcher_of, mode_of
from ..private.lightning_tree import pl, rank_zero_warn
from ..private.replaced_methods import ReplacedMethods
from ..start.devices import RankDevicesStrategy
from ..stopping.stops import StopController
from ..strategy_ranks import ranks_of
from .loop_state import Restart, change_to, find_restart
from .training_loaders import Orders, epoch_of, positions_of, training_loaders_of

KEY = "lightning_ddp_ext"
VERSION = 15
ResumeData = Literal["exact", "stock"]

_OF_MID_EPOCH_RESUME = ".*resuming from a checkpoint that ended before the epoch ended"
_IS_LOST = (
    "the checkpoint has no position that this release can read; save at the end of an epoch"
    " before you change the strategy or its release"
)


@dataclass(frozen=True)
class SavedPlace:
    """The place at which training continues.

    Attributes:
        restart: the place according to the checkpoint, and then to the ranks' decision.
        loops: the state of the fit loop, as it was saved.
        rank: this rank's state, see :meth:`Resume.state_at`.
    """

    restart: Restart
    loops: Mapping[str, Any]
    rank: Mapping[str, Any]


class Resume:
    """The place at which a strategy's training continues.

    In a run, :meth:`attach` is called first, :meth:`restore` if a checkpoint is
    restored, :meth:`before_iterators` and :meth:`after_iterators` around the start of
    an epoch's iterators, the hooks, and :meth:`save_to` for each checkpoint.

    Args:
        strategy: our strategy.
        checkpoints: gathers the ranks' states.
        stops: knows whether all ranks stop.
        replaced: hides Lightning's warning of a resume in the middle of an epoch.
        mode: the argument ``resume_data`` of ``DDPExtStrategy``.

    Attributes:
        mode: the argument.
        orders: determines the orders of the training loaders.
        is_training: whether ``on_train_start`` was called.
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
        self.is_training = False
        self._saved: SavedPlace | None = None  # `None` if not resumed, see above
        self._before_validation: list[Any] | None = None

    @property
    def _trainer(self) -> Any:
        return self._strategy.current_trainer

    def attach(self, trainer: Any) -> None:
        """Reset the state for a Trainer that has not loaded a checkpoint."""
        if trainer.state.fn == "fit":
            # A checkpoint that is saved after an evaluation has the seed of the fit before it.
            self.orders.forget()
        self._reset()

    @property
    def restart(self) -> Restart | None:
        """Where the resumed epoch continues; ``None`` in other epochs."""
        return None if self._saved is None else self._saved.restart

    @property
    def epoch(self) -> int:
        """The current or next training epoch.

        It is correct even before Lightning reads the checkpoint.
        """
        epoch = epoch_of(self._trainer)
        return epoch if self.restart is None else max(epoch, self.restart.epoch)

    # Saving.

    def save_to(self, checkpoint: dict[str, Any], what: str, *, is_alone: bool) -> None:
        """Add the place at which training continues to a checkpoint, in the call ``what``.

        Collective, unless this rank saves alone. There is no place without training data,
        as in a process that has only started ranks.
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
        if self._saved is not None and not self.is_training:
            own = self._saved.rank  # nothing has changed since then
        else:
            own = self.state_at(restart, self._random_state_at(restart, loops))
        ranks = [own] if is_alone else self._checkpoints.to_rank_zero(own, what)
        checkpoint[KEY] = self.make_section(restart, ranks)

    def make_section(self, restart: Restart, ranks: Any) -> dict[str, Any]:
        """Return the section of a checkpoint."""
        return {
            "version": VERSION,
            "seed": self.orders.seed,
            "orders": self.orders.by_rank,
            "restart": vars(restart),
            "ranks": ranks,
        }

    def state_at(self, restart: Restart, random: Any) -> dict[str, Any]:
        """Return this rank's state for a checkpoint that continues at ``restart``."""
        positions = positions_of(self._trainer) if restart.is_within else []
        before = self.restart.done if self.restart is not None and self.restart.is_within else 0
        places = [position.state_after(restart.done - before) for position in positions]
        return {"rank": self._strategy.global_rank, "random": random, "loaders": places}

    def _random_state_at(self, restart: Restart, loops: Mapping[str, Any]) -> Any:
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
            self._saved = self._read_section(section, loops)
        else:
            restart = find_restart(loops, accumulated=trainer.accumulate_grad_batches)
            if restart.is_within:
                _warn(restart.epoch, _IS_LOST)
                restart = restart.from_epoch_start()
            self._saved = SavedPlace(restart, loops, self.state_at(restart, None))
        checkpoint["loops"]["fit_loop"] = change_to(loops, self._saved.restart)

    def _read_section(self, section: Mapping[str, Any], loops: Mapping[str, Any]) -> SavedPlace:
        """Return the place in a section.

        A rank that did not save shares the place of one that did, without what belongs
        to that rank alone.
        """
        self.orders.restore(section)
        rank = self._strategy.global_rank
        by_rank = {state["rank"]: state for state in section["ranks"]}
        places = [{**place, "state": None} for place in section["ranks"][0]["loaders"]]
        shared = {"rank": rank, "random": None, "loaders": places}
        return SavedPlace(Restart(**section["restart"]), loops, by_rank.get(rank, shared))

    # The resumed epoch.

    def before_iterators(self) -> None:
        """Prepare the training loaders for the iterators of an epoch.

        Collective in the resumed epoch.
        """
        report_step()  # names a rank that still waits in a call of the epoch before
        if self.restart is not None and self.epoch > self.restart.epoch:
            self._saved = None
        self._decide()
        if self.restart is None or not self.restart.is_within:
            for position in positions_of(self._trainer):
                position.start_epoch(self.epoch)

    def after_iterators(self) -> None:
        """Restore a random state that was saved after the epoch's iterators had started.

        Collective.
        """
        self.orders.gather()
        restart = self.restart
        if restart is None or not self.is_training:
            return
        if restart.at == "batch_end" or restart.has_started:
            self._restore_random_state()

    def _decide(self) -> None:
        """Continue in the resumed epoch on all ranks, or start it again. Collective."""
        self.orders.assign()
        saved = self._saved
        if saved is None or not saved.restart.is_within:
            return
        positions = positions_of(self._trainer)
        if positions[0].epoch == saved.restart.epoch:
            return  # decided, for these loaders
        problem = self._continue(positions, saved)
        problems = list(filter(None, ranks_of(self._strategy).gather(problem)))
        if not problems:
            return
        _warn(saved.restart.epoch, problems[0])
        restart = saved.restart.from_epoch_start()
        self._saved = replace(saved, restart=restart, rank={**saved.rank, "random": None})
        fit_loop = self._trainer.fit_loop
        fit_loop.load_state_dict(change_to(saved.loops, restart))
        fit_loop.update_restart_stage()

    def _continue(self, positions: Sequence[Position], saved: SavedPlace) -> str | None:
        """Continue in each training loader; return why that is impossible, if it is."""
        restart = saved.restart
        places = saved.rank["loaders"]
        if len(places) != len(positions):
            return (
                f"it began with {len(places)} training loaders, and there are {len(positions)} now;"
                " resume with the same loaders"
            )
        for loader in training_loaders_of(self._trainer):
            loader.set_epoch(restart.epoch)
        by_rank = self.orders.by_rank
        # A rank that is new draws the order that all ranks draw.
        _, checksums = by_rank[min(self._strategy.global_rank, len(by_rank) - 1)]
        for position, place, checksum in zip(positions, places, checksums, strict=True):
            problem = position.continue_epoch(restart.epoch, place, checksum)
            if problem is not None:
                return f"{name_of(position.loader)} {problem}"
        return None

    # Hooks of the fit loop.

    def on_train_start(self) -> None:
        """Set the counters and the random state with which training continues.

        Collective in a resumed run.
        """
        self.is_training = True
        if self._saved is None:
            return
        restart = self._saved.restart
        done = self._trainer.fit_loop.epoch_loop.batch_progress.current.processed
        if (epoch_of(self._trainer), done) != (restart.epoch, restart.done):
            # A `LearningRateFinder` has set the loops to its own file.
            self._saved = None
            return
        for callback in self._trainer.callbacks:
            if isinstance(callback, pl.callbacks.GradientAccumulationScheduler):
                # An epoch that continues has no start, in which it sets the number of batches.
                callback.on_train_epoch_start(self._trainer)
        self._decide()
        self._restore_random_state()
        if self._saved.restart.is_within:
            self._replaced.hide_warning(_OF_MID_EPOCH_RESUME)
            self._saved = self._set_numbers_of_batches(self._saved)
        elif self._saved.restart.at == "epoch_start":
            # Lightning then creates the iterators again after the hooks, as in a whole run.
            # They draw the seeds of workers.
            end_restart(self._trainer.fit_loop)

    def _set_numbers_of_batches(self, saved: SavedPlace) -> SavedPlace:
        """Set the loops to the numbers of batches, done and in all, on these ranks.

        Both change with the number of ranks and the batch size. Lightning assumes the
        same number of batches in all epochs, so those that are not left are done, but
        not those after the last optimiser step. An epoch that is beyond its limit has one
        more step, and then ends as usual.
        """
        fit_loop = self._trainer.fit_loop
        lengths = [length_or_inf(loader.loader) for loader in training_loaders_of(self._trainer)]
        whole = min(lengths) if mode_of(fit_loop) == "min_size" else max(lengths)
        longest = positions_of(self._trainer)[lengths.index(whole)]
        left = longest.left(longest.start)
        limit = self._trainer.num_training_batches
        done = int(min(saved.restart.done if whole == math.inf else whole - left, limit - 1))
        done -= done % self._trainer.accumulate_grad_batches
        current = fit_loop.epoch_loop.batch_progress.current
        current.ready = current.started = current.processed = done
        current.completed = done - 1 if saved.restart.at == "batch_end" else done
        if done + left < limit:
            end_epoch_after(self._trainer, int(done + left))
        return replace(saved, restart=replace(saved.restart, done=done))

    def _restore_random_state(self) -> None:
        random = None if self._saved is None else self._saved.rank["random"]
        if random is not None:
            restore_random_state(random, device_generators(self._strategy))

    def on_train_batch_start(self) -> None:
        """Let Lightning's loops continue as usual, once the first batch was read."""
        if self.restart is not None and self.restart.is_within:
            # Otherwise the epoch's end would skip schedulers that monitor a metric.
            end_restart(self._trainer.fit_loop)

    def on_validation_end(self) -> None:
        """Let the epoch end as usual, if the resume began with a validation."""
        self._before_validation = None
        is_first = self.restart is not None and self.restart.at == "validation"
        if is_first and not self._trainer.sanity_checking:
            end_restart(self._trainer.fit_loop)


def device_generators(strategy: RankDevicesStrategy) -> list[Any]:
    """Return the generators of this rank's CUDA devices."""
    devices = [device for device in strategy.rank_devices if device.type == "cuda"]
    return [torch.cuda.default_generators[device.index] for device in devices]


def _warn(epoch: int, problem: str) -> None:
    rank_zero_warn(
        f"epoch {epoch} cannot be resumed in the middle, so that epoch starts again: {problem}"
    )
