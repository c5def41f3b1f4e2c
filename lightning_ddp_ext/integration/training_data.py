"""Where training is in its data: what a checkpoint says about it, and how a resumed run goes on from there.

A checkpoint gets a section of its own, and nothing else of it is changed, so that stock ``ddp`` can resume it, too.
When it is loaded, :meth:`TrainingData.load` changes the state of the loops before Lightning reads it, see
``loop_state``; the loaders are entered when their first batches are asked for.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from itertools import chain, islice
from typing import Any, Literal

import torch

from lightning_ddp_ext.data.loader import DistributedLoader, batches_of, is_stateful
from lightning_ddp_ext.data.position import FROM_THE_EPOCHS_START, LoaderPosition, position_of
from lightning_ddp_ext.data.random_state import RandomState, kept
from lightning_ddp_ext.errors import ResumeError
from lightning_ddp_ext.integration.compat import combined_loader_of, end_epoch_after, end_restart, iterators_of, mode_of
from lightning_ddp_ext.integration.epoch_seeding import epoch_of
from lightning_ddp_ext.integration.lightning_tree import rank_zero_info, rank_zero_warn
from lightning_ddp_ext.integration.loop_state import Restart, Stopped, change_to, find_restart
from lightning_ddp_ext.integration.timed_validation import TimedValidation
from lightning_ddp_ext.integration.uneven import UnevenInputs

ResumeData = Literal["exact", "epoch", "off"]

KEY = "lightning_ddp_ext"
_VERSION = 2


class TrainingData:
    """The training loaders of a strategy's ranks, and how far each is read.

    Args:
        strategy: whose ranks.
        uneven: what happens where ranks have different numbers of batches.
        resume_data: ``"exact"`` goes on with the batch that is due, ``"epoch"`` from the beginning of its epoch, and
            ``"off"`` leaves data and random numbers to Lightning.

    Attributes:
        before_batch: called each time that the Trainer is about to ask for a training batch.
        stopped: whether all ranks are stopping now, and where: a checkpoint says so.
    """

    def __init__(self, strategy: Any, uneven: UnevenInputs, resume_data: ResumeData) -> None:
        self._strategy = strategy
        self._uneven = uneven
        self._resume_data = resume_data
        self.before_batch: Callable[[], object] = _nothing
        self.attach()

    def attach(self) -> None:
        """Begin with a Trainer that has not loaded anything."""
        self.stopped: Stopped | None = None
        self._timed_validation = TimedValidation()
        self._begun_epoch: int | None = None
        self._random_at_epoch: RandomState | None = None
        self._random_at_step: RandomState | None = None
        self._random_at_validation: RandomState | None = None
        self._resume({}, None)

    def _resume(self, section: Mapping[str, Any], restart: Restart | None) -> None:
        self._section = section
        self._restart = restart
        self._is_entered = self._has_restarted = self._is_over = False
        self._done = 0
        self._to_enter: dict[int, Mapping[str, Any]] = {}
        self._ends_first: set[int] = set()
        self._warnings = ExitStack()

    # Loaders.

    def add(self, loader: DistributedLoader) -> None:
        """Track a new training loader."""
        loader.position = position_of(loader.loader, remembered=self._trainer.accumulate_grad_batches + 4)
        self._begun_epoch = None

    @property
    def epoch(self) -> int:
        """The epoch that is trained, or that is trained next, also before Lightning has read its checkpoint."""
        epoch = epoch_of(self._trainer)
        return epoch if self._restart is None else max(epoch, self._restart.epoch)

    # Reading.

    def begin(self, loader: DistributedLoader, epoch: int) -> Iterator[Any]:
        """Begin a pass of the Trainer's over a loader: from its start, or where a checkpoint left it."""
        if epoch == self._begun_epoch:  # a loader that is combined with a longer one begins again
            return self._begin_pass(loader, epoch)
        self._begun_epoch = epoch
        if self._restart is not None and epoch > self._restart.epoch:
            self._restart = None
        return self._begin_epoch(loader, epoch)

    def _begin_epoch(self, loader: DistributedLoader, epoch: int) -> Iterator[Any]:
        """Begin all loaders, as random numbers are drawn then, and after that their first batches."""
        restart = self._restart
        self._uneven.finish()
        if restart is not None and restart.has_started:
            self._restore_random()
        if self._is_within:
            self._enter_data()
        self._random_at_epoch = RandomState.take(self._device)
        with kept() if epoch > 0 and self._has_persistent_workers else nullcontext():  # which draw in epoch 0 alone
            batches = self._begin_pass(loader, epoch)
            for iterator in iterators_of(self._trainer.fit_loop):
                if iterator.loader is not loader:
                    iterator.start()
        if restart is not None and restart.at == "batch_end":
            self._restore_random()
        return batches

    @property
    def _has_persistent_workers(self) -> bool:
        return any(getattr(loader, "persistent_workers", False) for loader in self._loaders)

    def _begin_pass(self, loader: DistributedLoader, epoch: int) -> Iterator[Any]:
        position: LoaderPosition = loader.position
        index = self._loaders.index(loader)
        if self._restart is not None and (self._restart.at == "epoch_end" or self._is_over):
            return iter(())
        if index in self._ends_first:
            self._ends_first.discard(index)
            return iter(())
        state = self._to_enter.pop(index, None)
        if state is None:
            batches = position.begin(epoch)
        else:
            with kept():  # the run that is resumed had this iterator already, and drew nothing here
                batches = position.resume(epoch, self._done, state, self._own("loaders", index), self._world_size)
            batches = _unless_empty(batches, lambda: position.begin(epoch)) if state["number"] else batches
        batches = self._uneven.in_step(loader, batches, self._trainer, given=position.given)
        return position.give(self._announce(batches) if index == 0 else batches)

    def _announce(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Call ``before_batch`` before each batch, and remember the random numbers of the last optimiser step."""
        accumulated = self._trainer.accumulate_grad_batches
        progress = self._trainer.fit_loop.epoch_loop.batch_progress.current
        while True:
            self.before_batch()
            self._timed_validation.before_batch(self._trainer)
            if accumulated > 1 and progress.ready % accumulated == 0:
                self._random_at_step = RandomState.take(self._device)
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    # Saving.

    def save_to(
        self, checkpoint: dict[str, Any], *, seed: int | None, to_rank_zero: Callable[[Any], Any] | None
    ) -> None:
        """Put into a checkpoint where training is in its data. Collective, unless ``to_rank_zero`` is ``None``.

        Args:
            checkpoint: what Lightning has put together.
            seed: of the orders of samples, if there are any.
            to_rank_zero: gives rank 0 the objects of all ranks, by rank; ``None`` where other ranks may not be there.
        """
        trainer = self._trainer
        if "loops" not in checkpoint or combined_loader_of(trainer.fit_loop) is None:
            return
        loops: Mapping[str, Any] = checkpoint["loops"]["fit_loop"]
        batches = None if trainer.num_training_batches == math.inf else trainer.num_training_batches
        accumulated = trainer.accumulate_grad_batches
        restart = find_restart(loops, accumulated=accumulated, batches=batches, stopped=self.stopped)
        is_within = restart.at in ("batch_end", "validation")
        positions = [loader.position for loader in self._loaders] if is_within else []
        own = {
            "random": self._random_of(restart, loops).to_dict(),
            "loaders": [
                position.own_state_dict(restart.done, now)
                for position, now in zip(positions, self._own_states(loops), strict=False)
            ],
        }
        checkpoint[KEY] = {
            "version": _VERSION,
            "world_size": self._world_size,
            "seed": seed,
            "accumulate_grad_batches": accumulated,
            "batches": batches,
            "limit_train_batches": trainer.limit_train_batches,
            "stopped": self.stopped,
            "loaders": [position.state_dict(restart.done, self._world_size) for position in positions],
            "ranks": None if to_rank_zero is None else to_rank_zero(own),
        }

    def _own_states(self, loops: Mapping[str, Any]) -> list[Any]:
        """By loader, the state that it has just given for the checkpoint, if it keeps one."""
        states = iter(loops["state_dict"].get("combined_loader", ()))
        return [next(states, None) if is_stateful(loader) else None for loader in self._loaders]

    def _random_of(self, restart: Restart, loops: Mapping[str, Any]) -> RandomState:
        """The random numbers with which training goes on at a restart."""
        processed = loops["epoch_loop.batch_progress"]["current"]["processed"]
        remembered = None
        if restart.has_started and restart.epoch == self._begun_epoch:
            remembered = self._random_at_epoch
        elif restart.at == "validation":
            remembered = self._random_at_validation
        elif restart.at == "batch_end" and restart.done < processed:
            remembered = self._random_at_step
        return remembered or RandomState.take(self._device)

    # Resuming.

    @property
    def resumed_seed(self) -> int | None:
        """The seed of the run that is resumed."""
        return self._section.get("seed")

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Prepare to go on where a checkpoint was saved, and change the state of its loops for that.

        Raises:
            ResumeError: the checkpoint's section is of another version, and it was saved in the middle of an epoch.
        """
        if "loops" not in checkpoint or self._resume_data == "off":
            return
        section = checkpoint.get(KEY) or {}
        loops = checkpoint["loops"]["fit_loop"]
        accumulated = section.get("accumulate_grad_batches", self._trainer.accumulate_grad_batches)
        stopped = section.get("stopped")
        restart = find_restart(loops, accumulated=accumulated, batches=section.get("batches"), stopped=stopped)
        if restart.at in ("batch_end", "validation"):
            if self._resume_data == "epoch":
                restart, section = Restart("epoch_start", restart.epoch, has_started=True), {**section, "ranks": None}
            elif section.get("version", _VERSION) != _VERSION:
                raise ResumeError(
                    f"the checkpoint was saved in the middle of epoch {restart.epoch} by a version of "
                    f"lightning_ddp_ext that described the data in another way; {FROM_THE_EPOCHS_START}"
                )
        checkpoint["loops"]["fit_loop"] = changed = change_to(loops, restart, stopped=stopped)
        if "ranks" in section and (section["ranks"] is not None or restart.at == "epoch_start"):
            changed["state_dict"].pop("combined_loader", None)  # those of rank 0; each rank has its own
        self._warn_of_foreign_states(restart, changed)
        self._resume(section, restart)

    def _warn_of_foreign_states(self, restart: Restart, loops: Mapping[str, Any]) -> None:
        if restart.at != "epoch_start" and loops["state_dict"].get("combined_loader") and self._world_size > 1:
            rank_zero_warn(
                "the checkpoint has only rank 0's state of the training loader, and every rank gets that one: ranks "
                "that read data of their own do not go on where they were; save with strategy='ddp_ext'"
            )

    def on_train_start(self) -> None:
        """Set the random numbers and counters with which training goes on, before anything of it happens.

        Raises:
            ResumeError: the checkpoint is of other data.
        """
        restart = self._restart
        if restart is None:
            return
        if restart.at == "epoch_start":
            end_restart(self._trainer.fit_loop)
        if self._is_within:
            self._enter_data()
            # Lightning says next that the loaders cannot be resumed.
            self._warnings.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", message=".*resuming from a checkpoint that ended before the epoch ended")
        if restart.at == "batch_end":
            self._set_counters(restart.done)
            self._is_over = self._done >= self._trainer.num_training_batches  # by a limit that is another one now
        if not restart.has_started:
            self._restore_random()

    def on_train_batch_start(self) -> None:
        """The first batch of a resumed epoch is there: from now on Lightning's loops are like any others'."""
        if self._is_within and self._restart is not None and not self._has_restarted:
            self._has_restarted = True
            self._warnings.close()
            end_restart(self._trainer.fit_loop)  # else the epoch's end leaves out schedulers that watch a metric

    def on_validation_start(self) -> None:
        """Remember the random numbers with which the validation could begin again."""
        if self._trainer.state.fn == "fit":
            self._random_at_validation = RandomState.take(self._device)

    def detach(self) -> None:
        """Let warnings be what they were."""
        self._warnings.close()

    def _enter_data(self) -> None:
        """Find out where each loader goes on."""
        if self._is_entered:
            return
        self._is_entered = True
        assert self._restart is not None
        positions = [loader.position for loader in self._loaders]
        states = self._section.get("loaders")
        if states is None:  # of a checkpoint that was not saved by us
            cycles = self._mode == "max_size_cycle"
            states = [position.assume(self._restart.done, self._world_size, cycles=cycles) for position in positions]
        if len(states) != len(positions):
            raise ResumeError(
                f"the checkpoint is of the middle of epoch {self._restart.epoch} over {len(states)} training loaders, "
                f"and there are {len(positions)}; resume with the same ones, or {FROM_THE_EPOCHS_START}"
            )
        for position, state in zip(positions, states, strict=True):
            position.check(state, self._world_size)
            if position.kind == "batches" and state["at"]:
                rank_zero_info(f"reading {state['at']} batches that are done, as {position.name} has no sampler")
        self._done = self._count_done(positions, states)
        self._to_enter = dict(enumerate(states))
        # Lightning has to see the pass before come to its end, to know when all loaders have ended.
        self._ends_first = {index for index, state in enumerate(states) if state["number"]}

    def _count_done(self, positions: list[LoaderPosition], states: list[Mapping[str, Any]]) -> int:
        """Count the batches that lie before the states on this number of ranks, from an optimiser step on.

        Loops count batches from the beginning of an epoch that has as many as others; so it is this count that differs
        on another number of ranks, or with batches of another size.
        """
        assert self._restart is not None
        done = self._restart.done
        first = [pair for pair in zip(positions, states, strict=True) if not pair[1]["number"]]
        if all(position.done_before(state, done) == done for position, state in first):
            return done
        whole = [batches_of(position.loader) for position, _ in first]
        left = [position.left_after(state, done) for position, state in first]
        combine = min if self._mode == "min_size" else max
        if combine(whole) == math.inf:
            return done
        count = int(combine(whole) - combine(left))
        accumulated: int = self._trainer.accumulate_grad_batches
        return count - count % accumulated

    def _set_counters(self, saved: int) -> None:
        """Have the loops count from the batches that are done on this number of ranks."""
        if self._done == saved:
            return
        current = self._trainer.fit_loop.epoch_loop.batch_progress.current
        current.ready = current.started = current.processed = self._done
        current.completed = self._done - 1
        batches = self._done + self._count_left(saved)
        if batches < self._trainer.num_training_batches:
            end_epoch_after(self._trainer, int(batches))

    def _count_left(self, saved: int) -> float:
        """Count the batches that are left of the epoch, as far as its limit went when the checkpoint was saved."""
        states = list(self._to_enter.values())
        left = [loader.position.left_after(state, saved) for loader, state in zip(self._loaders, states, strict=True)]
        limit = self._trainer.limit_train_batches
        batches = self._section.get("batches")
        if batches is not None and self._section.get("limit_train_batches") == limit:
            then = batches - saved
            left = [
                min(most, loader.position.as_many_as(then, state))
                for most, loader, state in zip(left, self._loaders, states, strict=True)
            ]
        return float(min(left) if self._mode == "min_size" else max(left))

    def _own(self, name: str, index: int | None = None) -> Any:
        """What this rank itself has saved, if that is known."""
        ranks = self._section.get("ranks") or []
        rank = self._strategy.global_rank
        own = ranks[rank][name] if rank < len(ranks) else None
        return own if index is None or own is None else own[index]

    def _restore_random(self) -> None:
        own = self._own("random")
        if own is not None:
            RandomState.from_dict(own).restore(self._device)

    # What the Trainer and the strategy have.

    @property
    def _is_within(self) -> bool:
        return self._restart is not None and self._restart.at in ("batch_end", "validation")

    @property
    def _trainer(self) -> Any:
        return self._strategy.lightning_module.trainer

    @property
    def _loaders(self) -> list[Any]:
        combined = combined_loader_of(self._trainer.fit_loop)
        return [] if combined is None else combined.flattened

    @property
    def _mode(self) -> str:
        return mode_of(combined_loader_of(self._trainer.fit_loop))

    @property
    def _world_size(self) -> int:
        return int(self._strategy.world_size)

    @property
    def _device(self) -> torch.device:
        return self._strategy.root_device  # type: ignore[no-any-return]


def _unless_empty(batches: Iterator[Any], begin_again: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    first = list(islice(batches, 1))
    return chain(first, batches) if first else begin_again()


def _nothing() -> None:
    pass
