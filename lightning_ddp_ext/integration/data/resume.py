"""Save where training continues, and continue there: in the middle of an epoch, or at its start.

The strategy adds one section to a checkpoint, which is otherwise unchanged, so stock
``ddp`` can also resume from it:

===========  =====================================================================
``version``  the version of the section
``seed``     the seed for the order of samples
``keys``     of each rank, those of its generators, see ``data.random_state.keys_of``
``restart``  where training continues, a :class:`~.loop_state.Restart`
``stopped``  where all ranks stopped and saved the checkpoint, if they did
``ranks``    of each rank that saved: its ``rank``, its random states
             (``random``), and for each training loader the place (``loaders``)
===========  =====================================================================

When a checkpoint is read, the loaders may not be known yet. Whether the epoch continues
or starts again is decided once, by all ranks together, when the first batch is
requested or in ``on_train_start``, whichever is first.

Random states are saved only if the checkpoint is saved between two optimiser steps.
Each time Lightning creates an iterator, its loader draws a seed for the workers, and a
resumed run creates the iterators of its first epoch too early. At the start of an
epoch, the seeds are therefore drawn again after the random states are restored.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from lightning_ddp_ext.data.loader import TrainingLoader
from lightning_ddp_ext.data.loader_properties import length_or_inf
from lightning_ddp_ext.data.position import OrderOfRank
from lightning_ddp_ext.data.random_state import (
    keys_of,
    record_random_state,
    restore_random_state,
)

from ..checkpoints.collective import Checkpoints
from ..private.compat import (
    combined_iterator_of,
    end_epoch_after,
    end_restart,
    fetcher_of,
    mode_of,
)
from ..private.lightning_tree import pl, rank_zero_warn
from ..private.replaced_methods import ReplacedMethods
from ..start.devices import RankDevicesStrategy
from ..stopping.stops import StopController
from ..strategy_ranks import ranks_of
from .loop_state import Restart, Stopped, change_to, find_restart
from .positions import epoch_of, training_loaders_of

ResumeData = Literal["exact", "stock"]

KEY = "lightning_ddp_ext"
VERSION = 11

_OF_MID_EPOCH_RESUME = ".*resuming from a checkpoint that ended before the epoch ended"
_REMEDY = (
    "use a map-style dataset with a sampler that draws only from random, NumPy or torch, or a"
    " loader with a state, such as torchdata's StatefulDataLoader"
)
_AT_CHANGES = "save at the end of an epoch before you change the strategy or its release"


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
        known_seed: the seed for the order of samples, once it is known.
        is_training: whether ``on_train_start`` was called.
        restart: where the resumed epoch continues; ``None`` in other epochs.
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
        self.known_seed: int | None = None
        self._keys: list[list[int]] = []  # of each rank, when the seed became known
        self._has_run = False
        self._reset()

    def _reset(self) -> None:
        self.is_training = False
        self.restart: Restart | None = None
        self._saved: Restart | None = None  # its value in the checkpoint
        self._stopped: Stopped | None = None  # where the resumed run did
        self._loops: Mapping[str, Any] = {}  # of the checkpoint, as they were saved
        self._own: dict[str, Any] = {}  # this rank's state in the checkpoint
        self._placed: TrainingLoader | None = None
        self._batches_in_epoch = math.inf  # unless known from the checkpoint
        self._iterator_at_start: Any = None  # of the combined loader, at an epoch's start
        self._before_validation: list[Any] | None = None

    @property
    def _trainer(self) -> Any:
        return self._strategy.current_trainer

    def attach(self, trainer: Any) -> None:
        """Reset the state for a Trainer that has not loaded a checkpoint."""
        self._has_run = True
        if trainer.state.fn == "fit":
            # A checkpoint that is saved after an evaluation has the seed of the fit before it.
            self.known_seed = None
        self._reset()

    @property
    def seed(self) -> int:
        """The seed for the order of samples.

        It is the seed of the resumed run, otherwise rank 0's. Collective the first
        time.
        """
        if self.known_seed is None:
            own = (int(os.environ.get("PL_GLOBAL_SEED", 0)), keys_of())
            by_rank = ranks_of(self._strategy).gather(own)
            self.known_seed = by_rank[0][0]
            self._keys = [keys for _, keys in by_rank]
        return self.known_seed

    def order_of_rank(self, loader: int) -> OrderOfRank:
        """Return what determines this rank's orders. Collective the first time.

        ``loader`` is the number of the loader among the training loaders.
        """
        rank = self._strategy.global_rank
        seed = self.seed
        keys = self._keys[rank] if rank < len(self._keys) else keys_of()  # of a new rank
        return OrderOfRank(seed, keys, rank, self._strategy.world_size, loader)

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

        Collective, unless this rank saves alone. A process that has only started ranks
        has no place.
        """
        if "loops" not in checkpoint or not self._has_run:
            return
        loops = checkpoint["loops"]["fit_loop"]
        fetcher = fetcher_of(self._trainer.fit_loop)
        restart = find_restart(
            loops,
            accumulated=self._trainer.accumulate_grad_batches,
            stopped=self._stops.stopped,
            has_ended=fetcher is not None and fetcher.done,
        )
        own = self.state_at(restart, self._random_state_at(restart, loops))
        ranks = [own] if is_alone else self._checkpoints.to_rank_zero(own, what)
        checkpoint[KEY] = self.make_section(restart, self._stops.stopped, ranks)

    def make_section(self, restart: Restart, stopped: Stopped | None, ranks: Any) -> dict[str, Any]:
        """Return the section of a checkpoint; see the module."""
        return {
            "version": VERSION,
            "seed": self.known_seed,
            "keys": self._keys,
            "restart": vars(restart),
            "stopped": stopped,
            "ranks": ranks,
        }

    def state_at(self, restart: Restart, random: Any) -> dict[str, Any]:
        """Return this rank's state for a checkpoint that continues at ``restart``."""
        loaders = training_loaders_of(self._trainer) if restart.is_within else []
        states = [loader.state_after(restart.done) for loader in loaders]
        return {"rank": self._strategy.global_rank, "random": random, "loaders": states}

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
        """Record the random state, since an interrupted validation runs again."""
        self._before_validation = record_random_state(device_generators(self._strategy))

    # Restoring.

    def restore(self, checkpoint: dict[str, Any]) -> None:
        """Prepare to resume from a checkpoint, and correct its loop state."""
        is_fitting = self._trainer.state.fn == "fit"
        if not is_fitting or "loops" not in checkpoint or self.mode == "stock":
            return
        loops = checkpoint["loops"]["fit_loop"]
        section = checkpoint.get(KEY) or {}
        if section.get("version") == VERSION:
            self.restart = Restart(**section["restart"])
            if section["seed"] is not None:
                self.known_seed = section["seed"]
                self._keys = section["keys"]
            self._stopped = section["stopped"]
            self._own = self._own_state(section["ranks"])
            # Lightning has saved rank 0's states of loaders, but each rank has its own.
            loops = _without_loader_states(loops)
        else:
            self.restart = find_restart(loops, accumulated=self._trainer.accumulate_grad_batches)
            if self.restart.is_within:
                reason = "the checkpoint has no position that this release can read"
                _warn(self.restart.epoch, reason, _AT_CHANGES)
                self.restart = self.restart.from_epoch_start()
            if self.restart.has_started:
                loops = _without_loader_states(loops)
        self._saved = self.restart
        self._loops = loops
        checkpoint["loops"]["fit_loop"] = self._corrected_loops()

    def _own_state(self, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return this rank's state, or what it shares with a rank that saved."""
        own = [state for state in ranks if state["rank"] == self._strategy.global_rank]
        return own[0] if own else {**ranks[0], "random": None}

    def _corrected_loops(self) -> dict[str, Any]:
        """Return a state of the fit loop from which Lightning continues correctly."""
        assert self.restart is not None
        return change_to(self._loops, self.restart, stopped=self._stopped)

    # The resumed epoch.

    @property
    def has_no_batches_left(self) -> bool:
        """Whether the resumed epoch is complete, possibly because of a new limit."""
        if self.restart is None:
            return False
        limit = self._trainer.num_training_batches
        is_cut = self.restart.at == "batch_end" and self.restart.done >= limit > 0
        return self.restart.is_last or is_cut

    def before_iterators(self) -> None:
        """Prepare the training loaders for the iterators of an epoch.

        Collective in the resumed epoch.
        """
        if self.restart is not None and self.epoch > self.restart.epoch:
            self.restart = None
            self._placed = None  # frees the loader
            self._own = {}
        if self.restart is not None:
            self._decide()
        if self.restart is None or not self.restart.is_within:
            for loader in training_loaders_of(self._trainer):
                loader.start_epoch(self.epoch)
        iterator = self._iterator_at_start
        self._iterator_at_start = None
        # Some versions of Lightning create the iterators of this epoch again.
        if iterator is not None and iterator is combined_iterator_of(self._trainer.fit_loop):
            self._draw_worker_seeds()

    def after_iterators(self) -> None:
        """Restore a random state that was saved after the epoch's iterators had started."""
        restart = self.restart
        if restart is None or not self.is_training:
            return
        if restart.at == "batch_end" or restart.has_started:
            self._restore_random_state()

    def _decide(self) -> None:
        """Continue in the resumed epoch on all ranks, or start it again. Collective."""
        assert self.restart is not None
        loaders = training_loaders_of(self._trainer)
        if not self.restart.is_within or self._placed is loaders[0]:
            return
        self._placed = loaders[0]
        problem = self._continue(loaders)
        answers = ranks_of(self._strategy).gather((problem, self.restart.done))
        problems = [problem for problem, _ in answers if problem is not None]
        done_by_rank = [done for _, done in answers]
        if not problems and len(set(done_by_rank)) > 1:
            problems = [
                f"the ranks would continue after different numbers of batches {done_by_rank}"
            ]
        if problems:
            self._start_again(problems[0])

    def _continue(self, loaders: Sequence[TrainingLoader]) -> str | None:
        """Continue in each training loader; return why that is impossible, if it is."""
        assert self.restart is not None
        states = self._own["loaders"]
        if len(states) != len(loaders):
            return f"it began with {len(states)} training loaders, and there are {len(loaders)} now"
        self._count_batches(loaders, states)
        for loader, state in zip(loaders, states, strict=True):
            loader.set_epoch(self.restart.epoch)
            problem = loader.continue_epoch(self.restart.epoch, state, self.restart.done)
            if problem is not None:
                return f"{loader.name} {problem}"
        return None

    def _count_batches(
        self, loaders: Sequence[TrainingLoader], states: Sequence[Mapping[str, Any]]
    ) -> None:
        """Count the epoch's batches, and those of them that are done.

        Both change with the number of ranks and the batch size. Lightning assumes the
        same number of batches in all epochs, so those that are not left are done, but
        not those after the last optimiser step.
        """
        assert self.restart is not None
        combine = min if mode_of(self._trainer.fit_loop) == "min_size" else max
        whole = combine(length_or_inf(loader.loader) for loader in loaders)
        left = combine(
            loader.position.left(state["place"])
            for loader, state in zip(loaders, states, strict=True)
            # A loader that has begun again is shorter, and does not end the epoch.
            if state["number"] == 0
        )
        if math.inf not in (whole, left):
            accumulated = self._trainer.accumulate_grad_batches
            done = int(whole - left) // accumulated * accumulated
            self.restart = replace(self.restart, done=done)
            self._batches_in_epoch = done + left

    def _start_again(self, reason: str) -> None:
        """Start the epoch again, as stock Lightning does."""
        assert self.restart is not None
        _warn(self.restart.epoch, reason)
        for loader in training_loaders_of(self._trainer):
            loader.start_epoch(self.restart.epoch)
        self.restart = self.restart.from_epoch_start()
        self._own["random"] = None

    # Hooks of the fit loop.

    def on_train_start(self, *, has_begun: bool) -> None:
        """Set the counters and the random state with which training continues.

        ``has_begun`` tells whether the epoch's first batch was requested. Collective in
        a resumed run.
        """
        self.is_training = True
        if self.restart is None or self._saved is None:
            return
        done = self._trainer.fit_loop.epoch_loop.batch_progress.current.processed
        if (epoch_of(self._trainer), done) != (self._saved.epoch, self._saved.done):
            self.restart = None  # a `LearningRateFinder` has set the loops to its own file
            return
        self._decide()
        self._correct_loops()
        self._restore_random_state()
        self._prepare_worker_seeds(has_begun=has_begun)
        _warn_of_frozen_parameters(self._trainer)

    def _correct_loops(self) -> None:
        """Change what the checkpoint's loop state did not yet take into account."""
        assert self.restart is not None
        fit_loop = self._trainer.fit_loop
        if self.restart != self._saved and not self.restart.is_within:
            fit_loop.load_state_dict(self._corrected_loops())
            fit_loop.update_restart_stage()
        if self.restart.at == "epoch_start":
            end_restart(fit_loop)
        if self.restart.is_within:
            self._replaced.hide_warning(_OF_MID_EPOCH_RESUME)
            self._set_numbers_of_batches(self.restart)

    def _set_numbers_of_batches(self, restart: Restart) -> None:
        """Set the loops to the numbers of batches, done and in all, on these ranks."""
        current = self._trainer.fit_loop.epoch_loop.batch_progress.current
        current.ready = current.started = current.processed = restart.done
        current.completed = restart.done - 1 if restart.at == "batch_end" else restart.done
        if self._batches_in_epoch < self._trainer.num_training_batches:
            end_epoch_after(self._trainer, int(self._batches_in_epoch))

    def _restore_random_state(self) -> None:
        if self._own.get("random") is not None:
            restore_random_state(self._own["random"], device_generators(self._strategy))

    def _prepare_worker_seeds(self, *, has_begun: bool) -> None:
        """Draw the worker seeds that a whole run draws at the start of this epoch.

        It draws them for loaders that it makes again, before the hooks of the start, and
        for the epoch's iterators, after them.
        """
        assert self.restart is not None
        if self.restart.at != "epoch_start" or self.restart.epoch == 0:
            return
        interval = self._trainer.reload_dataloaders_every_n_epochs
        if interval and self.restart.epoch % interval == 0:
            for loader in training_loaders_of(self._trainer):
                loader.has_seeded_kept_workers = False
            self._draw_worker_seeds()
        if has_begun:
            self._draw_worker_seeds()
        else:
            self._iterator_at_start = combined_iterator_of(self._trainer.fit_loop)

    def _draw_worker_seeds(self) -> None:
        for loader in training_loaders_of(self._trainer):
            loader.draw_worker_seed()

    def on_train_batch_start(self) -> None:
        """Let Lightning's loops continue as usual, once the first batch was read."""
        if self.restart is not None and self.restart.is_within:
            # Otherwise the epoch's end would skip schedulers that monitor a metric.
            end_restart(self._trainer.fit_loop)

    def on_validation_end(self) -> None:
        """Let the epoch end as usual, if the resume began with a validation."""
        is_first = self.restart is not None and self.restart.at == "validation"
        if is_first and not self._trainer.sanity_checking:
            end_restart(self._trainer.fit_loop)


def device_generators(strategy: RankDevicesStrategy) -> list[Any]:
    """Return the generators of this rank's CUDA devices."""
    devices = [device for device in strategy.rank_devices if device.type == "cuda"]
    return [torch.cuda.default_generators[device.index] for device in devices]


def _warn(epoch: int, reason: str, remedy: str = _REMEDY) -> None:
    rank_zero_warn(
        f"epoch {epoch} cannot be resumed in the middle: {reason}, so that epoch starts again;"
        f" {remedy}"
    )


def _without_loader_states(loops: Mapping[str, Any]) -> dict[str, Any]:
    """Return a fit loop's state without the loaders' states."""
    states = dict(loops["state_dict"])
    states.pop("combined_loader", None)
    return {**loops, "state_dict": states}


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
