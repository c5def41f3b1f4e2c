"""Continue where a checkpoint was saved: restore random states, find the data, and correct Lightning's counters."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from lightning_ddp_ext.data.loader import batches_of
from lightning_ddp_ext.data.position import FROM_THE_EPOCHS_START, LoaderPosition
from lightning_ddp_ext.data.proxy import iterable_of
from lightning_ddp_ext.data.random_state import restore_random_state
from lightning_ddp_ext.errors import ResumeError

from .compat import combined_loader_of, end_epoch_after, end_restart, mode_of
from .lightning_tree import rank_zero_warn
from .loop_state import Restart, change_to, find_restart
from .named_calls import ranks_of, refuse

ResumeData = Literal["exact", "epoch", "stock"]

KEY = "lightning_ddp_ext"
VERSION = 6
_NO_RESTART = Restart("epoch_start", epoch=-1)


def positions_of(trainer: Any) -> list[LoaderPosition]:
    """Return the position of each training loader, in the order of the combined loader."""
    combined = combined_loader_of(trainer.fit_loop)
    return [] if combined is None else [iterable_of(loader).position for loader in combined.flattened]


def training_generators(strategy: Any, *, with_loaders: bool = True) -> list[Any]:
    """Return the non-global generators of this rank's training: those of its CUDA device and its loaders."""
    device, positions = strategy.root_device, positions_of(strategy.current_trainer) if with_loaders else []
    on_device = [torch.cuda.default_generators[device.index]] if device.type == "cuda" else []
    return [*on_device, *(each for position in positions for each in position.generators)]


def shared_state(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a rank's saved state that is the same on all ranks."""
    return {"random": None, "loaders": [{**each, "random": None, "own": None} for each in own["loaders"]]}


class Resume:
    """A resume of a Trainer's training; without a checkpoint it changes nothing.

    It changes the checkpoint's loop state to one from which Lightning continues correctly.

    Attributes:
        restart: the point where training continues.
        seed: the seed for the order of samples in the resumed run; ``None`` if the checkpoint has none.
        states: the states in which this rank's loaders start; empty until :meth:`find_data` sets them.
        done: the number of the epoch's batches that are done, converted to the current number of ranks.
        has_restored_random: whether random states were already restored.
    """

    def __init__(self, strategy: Any, checkpoint: dict[str, Any] | None = None, data: ResumeData = "exact") -> None:
        self._strategy = strategy
        self._ranks: Sequence[Mapping[str, Any]] = ()  # the saved state of each rank
        self.states: Sequence[Mapping[str, Any]] = ()
        self.restart = _NO_RESTART
        self.has_restored_random = False
        self.seed: int | None = None
        if checkpoint is not None:
            self._load(checkpoint, data)
        self.done = self.restart.done

    def _load(self, checkpoint: dict[str, Any], data: ResumeData) -> None:
        section, loops = checkpoint.get(KEY) or {}, checkpoint["loops"]["fit_loop"]
        if section.get("version") == VERSION:
            restart, self.seed, self._ranks = Restart(**section["restart"]), section["seed"], section["ranks"]
        else:
            section, restart = {}, find_restart(loops, accumulated=self._trainer.accumulate_grad_batches)
        if restart.is_within and not section:
            rank_zero_warn(f"the checkpoint has no data position in epoch {restart.epoch}, so that epoch starts again")
            data = "epoch"
        if restart.is_within and data == "epoch":
            restart, self._ranks = Restart("epoch_start", restart.epoch, has_started=True), ()
        changed = change_to(loops, restart, stopped=section.get("stopped"))
        if self._has_own_states or restart.has_started or (section and restart.at == "epoch_start"):
            changed["state_dict"].pop("combined_loader", None)  # has rank 0's states, but each rank has its own
        checkpoint["loops"]["fit_loop"] = changed
        self.restart = restart

    @property
    def _trainer(self) -> Any:
        return self._strategy.current_trainer

    @property
    def _has_own_states(self) -> bool:
        """Whether the checkpoint has a separate state for each rank that saved it."""
        return bool(self._ranks) and self._ranks[0]["random"] is not None

    @property
    def _own(self) -> Mapping[str, Any]:
        """This rank's saved state; on a rank that did not exist in that run, the state that all ranks share."""
        rank: int = self._strategy.global_rank
        return self._ranks[rank] if rank < len(self._ranks) else shared_state(self._ranks[0])

    def restore_random_state(self) -> None:
        """Restore this rank's random state, if one was saved."""
        self.has_restored_random = True
        if not self._ranks or self._own["random"] is None:
            return
        begins_epoch = self.restart.at == "epoch_start" and not self.restart.has_started
        has_new_loaders = begins_epoch and self._trainer.reload_dataloaders_every_n_epochs > 0
        restore_random_state(self._own["random"], training_generators(self._strategy, with_loaders=not has_new_loaders))

    # Lightning's loops.

    def on_train_start(self) -> None:
        """Set the random state and counters with which training continues, before Lightning uses them."""
        if self.restart is _NO_RESTART:
            return
        if self.restart.at == "epoch_start":
            end_restart(self._trainer.fit_loop)
        if self.restart.is_within:
            self.find_data()
            # Lightning would warn that the loaders cannot be resumed.
            warnings.filterwarnings("ignore", message=".*resuming from a checkpoint that ended before the epoch ended")
            if self.done != self.restart.done:
                self._set_counters()
        if not (self.restart.at == "epoch_start" and self.has_restored_random):
            self.restore_random_state()

    def on_train_batch_start(self) -> None:
        """Let Lightning's loops continue as usual after the first batch of a resumed epoch was read."""
        if self.restart.is_within:  # otherwise the end of the epoch would skip schedulers that monitor a metric
            end_restart(self._trainer.fit_loop)

    def on_validation_end(self) -> None:
        """Let the epoch end as usual after the validation with which the resume began."""
        if self.restart.at == "validation" and not self._trainer.sanity_checking:
            end_restart(self._trainer.fit_loop)

    def _set_counters(self) -> None:
        """Set the loops' counters to the number of batches that are done, for this number of ranks."""
        current = self._trainer.fit_loop.epoch_loop.batch_progress.current
        current.ready = current.started = current.processed = self.done
        current.completed = self.done - 1 if self.restart.at == "batch_end" else self.done
        if self._end < self._trainer.num_training_batches:
            end_epoch_after(self._trainer, self._end)

    # The data of the epoch that continues.

    @property
    def is_over(self) -> bool:
        """Whether the epoch has no batches left, possibly because of a new limit."""
        is_cut = self.restart.at == "batch_end" and self.done >= self._trainer.num_training_batches > 0
        return self.restart.is_last or is_cut

    def find_data(self) -> None:
        """Find where each training loader continues, or raise if the data differs. Collective the first time."""
        if self.states:
            return
        try:
            ranks_of(self._strategy).on_every_rank(self._check_data, "the resume")
        except ResumeError as error:
            refuse(self._strategy, error)
        self.states = self._own["loaders"]
        self._count_batches()

    def _check_data(self) -> None:
        positions, states = positions_of(self._trainer), self._own["loaders"]
        if len(states) != len(positions):
            raise ResumeError(
                f"epoch {self.restart.epoch} cannot be resumed in the middle: it began with {len(states)} training "
                f"loaders, but there are {len(positions)} now; use the same loaders, or {FROM_THE_EPOCHS_START}"
            )
        for position, state in zip(positions, states, strict=True):
            position.check(state)
            if position.is_by_rank and state["at"] and not self._has_own_states:
                rank_zero_warn(
                    f"the checkpoint lacks each rank's position in {position.name}, because a single rank or another "
                    f"strategy saved it, so epoch {self.restart.epoch} may repeat or skip batches; "
                    f"{FROM_THE_EPOCHS_START}"
                )

    def _count_batches(self) -> None:
        """Compute the number of batches done, up to an optimiser step, and the epoch's end, for this number of ranks.

        Loops assume the same number of batches in all epochs. On a different number of ranks, or with another batch
        size, the number of done batches therefore changes. Loaders that restarted within the epoch are ignored for the
        remaining batches, because the longest loader, which ends the epoch, is read only once.
        """
        pairs = list(zip(positions_of(self._trainer), self.states, strict=True))
        combine = min if mode_of(combined_loader_of(self._trainer.fit_loop)) == "min_size" else max
        whole = combine(batches_of(position.loader) for position, _ in pairs)
        left = combine(position.left_after(state["at"]) for position, state in pairs if not state["number"])
        if math.inf not in (whole, left):
            accumulated = self._trainer.accumulate_grad_batches
            self.done = int(whole - left) // accumulated * accumulated
            self._end = self.done + int(left)
