"""Go on where a checkpoint was saved: what it says about the data, and what Lightning's loops have to be told."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lightning_ddp_ext.data.generators import restore_random
from lightning_ddp_ext.data.loader import batches_of
from lightning_ddp_ext.data.position import FROM_THE_EPOCHS_START, LoaderPosition
from lightning_ddp_ext.errors import ResumeError

from .compat import combined_loader_of, end_epoch_after, end_restart, mode_of
from .lightning_tree import rank_zero_info, rank_zero_warn
from .loop_state import Restart, change_to, find_restart

ResumeData = Literal["exact", "epoch", "off"]

KEY = "lightning_ddp_ext"
VERSION = 4
_NO_RESTART = Restart("epoch_start", epoch=-1)


def positions_of(trainer: Any) -> list[LoaderPosition]:
    """How far each training loader is read, in the order in which they are combined."""
    combined = combined_loader_of(trainer.fit_loop)
    return [] if combined is None else [loader.position for loader in combined.flattened]


def in_common(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rank has saved, without that which is of no use to any other rank."""
    return {"random": None, "loaders": [{**each, "random": None, "own": None} for each in own["loaders"]]}


class Resume:
    """One resume of a Trainer's training; of a Trainer that loads nothing, one that changes nothing.

    The state of the loops in the checkpoint is changed to one from which Lightning goes on rightly.

    Attributes:
        restart: where training goes on.
        seed: of the orders of samples in the run that is resumed; ``None`` if that is not known.
        done: batches of the epoch that are done, as the ranks count them that there are now.
    """

    def __init__(self, strategy: Any, checkpoint: dict[str, Any] | None = None, data: ResumeData = "exact") -> None:
        self._strategy = strategy
        self._ranks: Sequence[Mapping[str, Any]] = ()  # what each rank has saved
        self._states: Sequence[Mapping[str, Any]] | None = None  # in which this rank's loaders begin
        self.restart = _NO_RESTART
        self.has_restored_random = False
        self.seed: int | None = None
        if checkpoint is not None:
            self._load(checkpoint, data)
        self.done = self.restart.done

    def _load(self, checkpoint: dict[str, Any], data: ResumeData) -> None:
        section = checkpoint.get(KEY) or {}
        loops, stopped = checkpoint["loops"]["fit_loop"], section.get("stopped")
        accumulated = section.get("accumulate_grad_batches", self._strategy.current_trainer.accumulate_grad_batches)
        restart = find_restart(loops, accumulated=accumulated, stopped=stopped)
        self.seed, self._ranks = section.get("seed"), section.get("ranks") or ()
        if restart.is_within and section.get("version") != VERSION:
            rank_zero_warn(f"the checkpoint does not say which data of epoch {restart.epoch} are done; it begins again")
            data = "epoch"
        if restart.is_within and data == "epoch":
            restart, self._ranks = Restart("epoch_start", restart.epoch, has_started=True), ()
        changed = change_to(loops, restart, stopped=stopped)
        if self._knows_each_rank or restart.has_started or (section and restart.at == "epoch_start"):
            changed["state_dict"].pop("combined_loader", None)  # those of rank 0; each rank has its own
        checkpoint["loops"]["fit_loop"] = changed
        self.restart = restart

    @property
    def _knows_each_rank(self) -> bool:
        return bool(self._ranks) and self._ranks[0]["random"] is not None

    @property
    def _own(self) -> Mapping[str, Any]:
        """What this rank has saved; of rank 0 what all have in common, if there were fewer ranks."""
        rank: int = self._strategy.global_rank
        return self._ranks[rank] if rank < len(self._ranks) else in_common(self._ranks[0])

    def restore_random(self) -> None:
        """Set this rank's random numbers to where they were, if it has saved them."""
        self.has_restored_random = True
        if self._ranks and self._own["random"] is not None:
            restore_random(self._own["random"], self._strategy.root_device)

    # Lightning's loops.

    def on_train_start(self) -> None:
        """Set the random numbers and counters with which training goes on, before anything of it happens."""
        if self.restart is _NO_RESTART:
            return
        if self.restart.at == "epoch_start":
            end_restart(self._strategy.current_trainer.fit_loop)
        if self.restart.is_within:
            self.find_data()
            # Lightning says next that the loaders cannot be resumed.
            warnings.filterwarnings("ignore", message=".*resuming from a checkpoint that ended before the epoch ended")
        if self.restart.at == "batch_end" and self.done != self.restart.done:
            self._set_counters()
        has_begun = self.restart.at == "epoch_start" and (self.restart.has_started or self.has_restored_random)
        if not has_begun:
            self.restore_random()

    def on_train_batch_start(self) -> None:
        """Have Lightning's loops go on like any others', once the first batch of a resumed epoch is there."""
        if self.restart.is_within:  # else the epoch's end would leave out schedulers that watch a metric
            end_restart(self._strategy.current_trainer.fit_loop)

    def on_validation_end(self) -> None:
        """Have the epoch's end be like any other's, once the validation that was due has been run as a whole."""
        if self.restart.at == "validation" and not self._strategy.current_trainer.sanity_checking:
            end_restart(self._strategy.current_trainer.fit_loop)

    def _set_counters(self) -> None:
        """Have the loops count from the batches that are done on this number of ranks."""
        current = self._strategy.current_trainer.fit_loop.epoch_loop.batch_progress.current
        current.ready = current.started = current.processed = self.done
        current.completed = self.done - 1
        last = self.done + self._strategy.data.uneven.most(self._count_left())
        if last < self._strategy.current_trainer.num_training_batches:
            end_epoch_after(self._strategy.current_trainer, int(last))

    # The data of the epoch that goes on.

    @property
    def is_over(self) -> bool:
        """Whether nothing is left of the epoch, also because another limit holds now."""
        is_cut = self.restart.at == "batch_end" and self.done >= self._strategy.current_trainer.num_training_batches > 0
        return self.restart.at == "epoch_end" or is_cut

    def state_of(self, index: int) -> Mapping[str, Any] | None:
        """The state in which a loader begins; ``None`` for the beginning of its epoch."""
        return None if self._states is None else self._states[index]

    def find_data(self) -> None:
        """Find out where each training loader goes on, or refuse other data; a second call does nothing."""
        if self._states is not None:
            return
        positions, states = positions_of(self._strategy.current_trainer), self._own["loaders"]
        if len(states) != len(positions):
            raise ResumeError(
                f"epoch {self.restart.epoch} cannot go on in its middle: it was read from {len(states)} training "
                f"loaders, and there are {len(positions)}; resume with the same ones, or {FROM_THE_EPOCHS_START}"
            )
        for position, state in zip(positions, states, strict=True):
            position.check(state)
            if position.kind == "batches" and state["at"]:
                rank_zero_info(f"reading {state['at']} batches that are done, as {position.name} has no sampler")
            if position.is_by_rank and state["at"] and not self._knows_each_rank:
                rank_zero_warn(
                    f"the checkpoint does not say where each rank was in {position.name}, as it was saved by one rank "
                    f"alone or by another strategy; batches may be read twice or left out in epoch "
                    f"{self.restart.epoch}; {FROM_THE_EPOCHS_START}"
                )
        self._states = states
        self.done = self._count_done()

    def _count_done(self) -> int:
        """Count the batches that are done on this number of ranks, from an optimiser step on.

        Loops take all epochs to have equally many batches. So on another number of ranks, or with batches of another
        size, it is the count of those that are done that differs.
        """
        whole = self._combined(
            [batches_of(position.loader) for position in positions_of(self._strategy.current_trainer)]
        )
        left = self._count_left()
        if math.inf in (whole, left):
            return self.restart.done
        accumulated: int = self._strategy.current_trainer.accumulate_grad_batches
        return int(self._strategy.data.uneven.most(whole - left)) // accumulated * accumulated

    def _count_left(self) -> float:
        """Count the batches that are left of the whole epoch.

        A loader that is read again is left out: the longest one, which ends the epoch, is read once.
        """
        pairs = zip(positions_of(self._strategy.current_trainer), self._states or (), strict=True)
        return self._combined([position.left_after(state["at"]) for position, state in pairs if not state["number"]])

    def _combined(self, batches: Sequence[float]) -> float:
        """The number of batches of combined loaders that have so many each."""
        mode = mode_of(combined_loader_of(self._strategy.current_trainer.fit_loop))
        return min(batches) if mode == "min_size" else max(batches)
