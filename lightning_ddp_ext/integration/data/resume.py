"""Continue where a checkpoint was saved.

Restore random states, find the data, and correct Lightning's counters.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any, Literal

import torch

from lightning_ddp_ext.data.loader import DistributedLoader, batches_of
from lightning_ddp_ext.data.loader_kinds import OrderPosition
from lightning_ddp_ext.data.position import FROM_THE_EPOCHS_START, LoaderPosition
from lightning_ddp_ext.data.proxy import iterable_of
from lightning_ddp_ext.data.random_state import restore_random_state
from lightning_ddp_ext.errors import ResumeError
from lightning_ddp_ext.rank_lists import ranks_in_words

from ..host import Host
from ..named_calls import ranks_of, refuse
from ..private.compat import combined_loader_of, end_epoch_after, end_restart, mode_of
from ..private.lightning_tree import rank_zero_warn
from .loop_state import Restart, change_to, find_restart

ResumeData = Literal["exact", "strict", "epoch", "stock"]
InEpoch = Callable[[DistributedLoader], AbstractContextManager[None]]

KEY = "lightning_ddp_ext"
VERSION = 7
_NO_RESTART = Restart("epoch_start", epoch=-1)  # of a run without a checkpoint


def positions_of(trainer: Any) -> list[LoaderPosition]:
    """Return each training loader's position, in the order of the combined loader."""
    return [loader.position for loader in _loaders_of(trainer)]


def _loaders_of(trainer: Any) -> list[DistributedLoader]:
    combined = combined_loader_of(trainer.fit_loop)
    return [] if combined is None else [iterable_of(loader) for loader in combined.flattened]


def training_generators(strategy: Host, *, with_loaders: bool = True) -> list[Any]:
    """Return the non-global generators of this rank's training.

    These are the generators of its CUDA devices and its loaders.
    """
    positions = positions_of(strategy.current_trainer) if with_loaders else []
    devices = [device for device in strategy.rank_devices if device.type == "cuda"]
    on_device = [torch.cuda.default_generators[device.index] for device in devices]
    return [*on_device, *(each for position in positions for each in position.generators)]


def without_random_state(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank's saved state without random states and loaders' own states.

    Only an uninterrupted save of all ranks can restore these.
    """
    return {
        "random": None,
        "loaders": [{**each, "random": None, "own": None} for each in own["loaders"]],
    }


def shared_state(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a rank's saved state that is the same on all ranks."""
    shared = without_random_state(own)
    for each in shared["loaders"]:
        if each["data"]["loader"] != OrderPosition.kind:
            each["drawn"] = None
    return shared


class Resume:
    """A resume of a Trainer's training; without a checkpoint it changes nothing.

    It changes the checkpoint's loop state to one from which Lightning continues
    correctly.

    Args:
        strategy: our strategy.
        in_epoch: returns a context manager within which iterators over a loader belong
            to the current epoch.
        checkpoint: the checkpoint that the Trainer resumes from, if any.
        mode: the strategy's ``resume_data``.

    Attributes:
        restart: the point where training continues.
        seed: the seed for the order of samples in the resumed run; ``None`` if the
            checkpoint has none.
        done: the number of the epoch's batches that are done, converted to the current
            number of ranks.
    """

    def __init__(
        self,
        strategy: Host,
        in_epoch: InEpoch,
        checkpoint: dict[str, Any] | None = None,
        mode: ResumeData = "exact",
    ) -> None:
        self._strategy = strategy
        self._in_epoch = in_epoch
        self._ranks: Sequence[Mapping[str, Any]] = ()  # the saved state of each rank
        self._found: Sequence[LoaderPosition] = ()  # the positions in the loaders that continue
        self._end = math.inf  # the number of the epoch's batches, if the number of ranks changed
        # Whether the epoch starts again after all, and the loops' state for it.
        self._starts_again = False
        self._loops_at_epoch_start: dict[str, Any] = {}
        self._is_strict = mode == "strict"
        self._warnings = ExitStack()
        self._has_restored_random = False
        self.restart = _NO_RESTART
        self.seed: int | None = None
        if checkpoint is not None:
            section = self._load_section(checkpoint)
            self.restart = self._choose_restart(checkpoint, section, mode)
            self._change_loops(checkpoint, section)
        self.done = self.restart.done

    def _load_section(self, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the checkpoint's section; empty if this release cannot read it."""
        section = checkpoint.get(KEY) or {}
        if section.get("version") != VERSION:
            return {}
        self.seed = section["seed"]
        self._ranks = section["ranks"]
        return section

    def _choose_restart(
        self, checkpoint: Mapping[str, Any], section: Mapping[str, Any], mode: ResumeData
    ) -> Restart:
        if section:
            restart = Restart(**section["restart"])
        else:
            restart = find_restart(
                checkpoint["loops"]["fit_loop"], accumulated=self._trainer.accumulate_grad_batches
            )
        if not restart.is_within or (section and mode != "epoch"):
            return restart
        if not section and checkpoint.get(KEY):
            rank_zero_warn(
                f"the checkpoint's data position in epoch {restart.epoch} has version"
                f" {checkpoint[KEY].get('version')}, but this release reads version {VERSION}, so"
                " that epoch starts again"
            )
        elif not section:
            rank_zero_warn(
                f"the checkpoint has no data position in epoch {restart.epoch}, so that epoch"
                " starts again"
            )
        self._ranks = ()
        return restart.from_epoch_start()

    def _change_loops(self, checkpoint: dict[str, Any], section: Mapping[str, Any]) -> None:
        """Change the loops' state in the checkpoint to one at the restart."""
        loops = checkpoint["loops"]["fit_loop"]
        stopped = section.get("stopped")
        if section or self.restart.has_started:
            # `combined_loader` has rank 0's states, but each rank has its own or none.
            loops["state_dict"].pop("combined_loader", None)
        if self.restart.is_within:
            self._loops_at_epoch_start = change_to(
                loops, self.restart.from_epoch_start(), stopped=stopped
            )
        checkpoint["loops"]["fit_loop"] = change_to(loops, self.restart, stopped=stopped)

    @property
    def _trainer(self) -> Any:
        return self._strategy.current_trainer

    @property
    def _has_own_states(self) -> bool:
        """Whether the checkpoint has a separate state for each rank that saved it."""
        return bool(self._ranks) and self._ranks[0]["random"] is not None

    @property
    def _own(self) -> Mapping[str, Any]:
        """This rank's saved state.

        On a rank that did not exist in that run, it is the state that all ranks share.
        """
        rank = self._strategy.global_rank
        return self._ranks[rank] if rank < len(self._ranks) else shared_state(self._ranks[0])

    def restore_random_state(self) -> None:
        """Restore this rank's random state, if one was saved."""
        self._has_restored_random = True
        if not self._ranks or self._own["random"] is None:
            return
        reloads = self._trainer.reload_dataloaders_every_n_epochs > 0
        has_new_loaders = self.restart.begins_epoch and reloads
        restore_random_state(
            self._own["random"],
            training_generators(self._strategy, with_loaders=not has_new_loaders),
        )

    # Lightning's loops.

    def on_train_start(self) -> None:
        """Set the random state and counters with which training continues.

        It is called before Lightning uses them.
        """
        if self.restart is _NO_RESTART:
            return
        self.find_data()
        fit_loop = self._trainer.fit_loop
        if self._starts_again:
            fit_loop.load_state_dict(self._loops_at_epoch_start)
            fit_loop.update_restart_stage()
        if self.restart.at == "epoch_start":
            end_restart(fit_loop)
        if self.restart.is_within:
            self._warnings.enter_context(
                _ignoring(".*resuming from a checkpoint that ended before the epoch ended")
            )
            if self.done != self.restart.done:
                self._set_counters()
        # Without a length, Lightning has already read the epoch's first batch.
        has_read = self.restart.at == "epoch_start" and self._has_restored_random
        if not has_read:
            self.restore_random_state()

    def on_epoch_start(self) -> None:
        """Restore the random state before the epoch's iterators start, if it is due."""
        is_first = self.restart.at == "epoch_start" and not self._has_restored_random
        if self.restart.has_started or is_first:
            self.restore_random_state()

    def end(self) -> None:
        """Show Lightning's warnings again."""
        self._warnings.close()

    def on_train_batch_start(self) -> None:
        """Let Lightning's loops continue as usual in a resumed epoch.

        It is called once the epoch's first batch was read.
        """
        self.end()
        if self.restart.is_within:
            # Otherwise the epoch's end would skip schedulers that monitor a metric.
            end_restart(self._trainer.fit_loop)

    def on_validation_end(self) -> None:
        """Let the epoch end as usual after a validation that began the resume."""
        if self.restart.at == "validation" and not self._trainer.sanity_checking:
            end_restart(self._trainer.fit_loop)

    def _set_counters(self) -> None:
        """Set the loops' counters to the batches done on this number of ranks."""
        current = self._trainer.fit_loop.epoch_loop.batch_progress.current
        current.ready = current.started = current.processed = self.done
        current.completed = self.done - 1 if self.restart.at == "batch_end" else self.done
        if self._end < self._trainer.num_training_batches:
            end_epoch_after(self._trainer, int(self._end))

    # The data of the epoch that continues.

    @property
    def is_over(self) -> bool:
        """Whether the epoch has no batches left, possibly because of a new limit."""
        is_cut = (
            self.restart.at == "batch_end" and self.done >= self._trainer.num_training_batches > 0
        )
        return self.restart.is_last or is_cut

    def find_data(self) -> None:
        """Continue in each training loader, or let the epoch start again.

        Collective the first time.

        Raises:
            ResumeError: the data differs from the resumed run's; or its order does,
                with ``resume_data="strict"``.
        """
        positions = positions_of(self._trainer)
        if not self.restart.is_within or (self._found and self._found[0] is positions[0]):
            return
        self._found = positions
        ranks = ranks_of(self._strategy)
        try:
            ranks.on_every_rank(self._check_data, "the resume")
            self._count_batches()
            different = ranks.on_every_rank(self._continue_loaders, "the resume")
        except ResumeError as error:
            refuse(self._strategy, error)
        by_rank = {
            rank: name for rank, name in enumerate(ranks.gather(different)) if name is not None
        }
        if by_rank:
            self._repeat_epoch(by_rank)

    def _check_data(self) -> None:
        positions = positions_of(self._trainer)
        states = self._own["loaders"]
        if len(states) != len(positions):
            raise ResumeError(
                f"epoch {self.restart.epoch} cannot be resumed in the middle: it began with"
                f" {len(states)} training loaders, but there are {len(positions)} now; use the same"
                f" loaders, or {FROM_THE_EPOCHS_START}"
            )
        for position, state in zip(positions, states, strict=True):
            position.check(state)

    def _continue_loaders(self) -> str | None:
        """Continue in each loader.

        Return the name of the first one that does not draw the same as the resumed run.
        """
        found = []
        for loader, state in zip(_loaders_of(self._trainer), self._own["loaders"], strict=True):
            position = loader.position
            if position.is_by_rank and state["at"] and not self._has_own_states:
                found.append(position.name)
                continue
            with self._in_epoch(loader):
                if not position.continue_epoch(self.restart.epoch, state, done=self.done):
                    found.append(position.name)
        return found[0] if found else None

    def _repeat_epoch(self, by_rank: Mapping[int, str]) -> None:
        """Start the epoch again, as stock Lightning does.

        It is called when loaders do not draw the same as the resumed run.
        """
        names = " and ".join(dict.fromkeys(by_rank.values()))
        message = (
            f"epoch {self.restart.epoch} cannot be resumed in the middle: {names} on"
            f" {ranks_in_words(by_rank)} does not yield the samples that it yielded before the"
            " checkpoint was saved"
        )
        remedy = (
            "derive its order from the epoch that set_epoch() gets, or draw it from a generator"
            " that is an attribute of the loader or sampler, and save with trainer.save_checkpoint"
            " or ModelCheckpoint"
        )
        if self._is_strict:
            refuse(self._strategy, ResumeError(f"{message}; {remedy}, or {FROM_THE_EPOCHS_START}"))
        rank_zero_warn(
            f'{message}, so that epoch starts again; {remedy} (resume_data="strict" raises instead)'
        )
        self._starts_again = True
        self.restart = self.restart.from_epoch_start()
        self.done = 0
        self._ranks = ()

    def _count_batches(self) -> None:
        """Compute the number of batches done and the epoch's end.

        Both are for this number of ranks. Batches after the last optimiser step are not
        done. Loops assume the same number of batches in all epochs. On a different
        number of ranks, or with another batch size, the number of done batches
        therefore changes. Loaders that restarted within the epoch are ignored for the
        remaining batches, because the longest loader, which ends the epoch, is read
        only once.
        """
        pairs = list(zip(positions_of(self._trainer), self._own["loaders"], strict=True))
        combine = min if mode_of(combined_loader_of(self._trainer.fit_loop)) == "min_size" else max
        whole = combine(batches_of(position.loader) for position, _ in pairs)
        left = combine(
            position.left_after(state["at"]) for position, state in pairs if not state["number"]
        )
        if math.inf not in (whole, left):
            accumulated = self._trainer.accumulate_grad_batches
            self.done = int(whole - left) // accumulated * accumulated
            self._end = self.done + int(left)


@contextmanager
def _ignoring(message: str) -> Iterator[None]:
    """Ignore warnings within the block.

    Unlike ``catch_warnings``, this does not undo other changes of the filters.
    """
    warnings.filterwarnings("ignore", message)
    added = warnings.filters[0]
    try:
        yield
    finally:
        with suppress(ValueError):
            warnings.filters.remove(added)  # type: ignore[attr-defined]
