"""Save a surviving rank's state after another rank died or failed, so that training continues with the next step.

Parameters and optimiser need no copy: with automatic optimisation an aborted collective raises before they change.
Each rank notes its random states, and one also notes the buffers; a survivor writes them to an ordinary checkpoint.
"""

from __future__ import annotations

import copy
import pickle
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lightning_ddp_ext.at_exit import delaying_forced_end
from lightning_ddp_ext.checkpoint.location import PathLike, locate
from lightning_ddp_ext.checkpoint.noted_buffers import NotedBuffers
from lightning_ddp_ext.checkpoint.rank_notes import Kind, Note, RankNotes, lock_of, open_notes, save_if_furthest
from lightning_ddp_ext.data.random_state import RandomStateBytes, random_state_in, record_random_state
from lightning_ddp_ext.data.seeding import mix, seeded
from lightning_ddp_ext.rank_lists import ranks_in_words
from lightning_ddp_ext.ranks import reason_of
from lightning_ddp_ext.rendezvous.process_context import current

from .checkpoint_io import RankZeroCheckpointIO
from .checkpoint_paths import modified, place_of
from .compat import dump_checkpoint, is_in_closure, is_in_optimizer_step, validates_next
from .lightning_tree import TrainerStatus, pl
from .loop_state import Restart, Stopped, find_restart
from .named_calls import ranks_of
from .resume import KEY, positions_of, shared_state, training_generators

# Events of a rank that leave the others in a state from which training can continue.
_SURVIVED = ("died", "failed", "hung")
_OF_STATES = [kind for kind in Kind if kind != Kind.BUFFERS]


class Refused(Exception):
    """The reason why nothing is saved."""


class Rescue:
    """Saves the last optimiser step of a strategy after another rank died or failed.

    Args:
        strategy: the strategy, which passes on each training hook.
        name: name of the file beside the other checkpoints, or a path; ``None`` to save nothing.
    """

    def __init__(self, strategy: Any, name: PathLike | None) -> None:
        self._strategy = strategy
        self.name = name
        self._forget()

    # A strategy is pickled for spawned ranks, without the state of this process.

    def __getstate__(self) -> dict[str, Any]:
        return {"strategy": self._strategy, "name": self.name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def _forget(self) -> None:
        self._trainer: Any = None  # the watched one
        self._refusal: str | None = None
        self._notes: dict[int, RankNotes] = {}  # of the ranks on this host
        self._own: RankNotes | None = None
        self._weights: Any = None  # their versions after the last optimiser step; `None` before the first one
        self._evaluations = 0  # of the closure in this batch
        self._stepped = 0  # optimiser steps before this batch, as Lightning's loggers count them
        self._generators: list[Any] = []  # besides the global ones
        self._lost: list[int] = []  # ranks that are saved without their own random states
        self._has_new_iterator = False
        self._is_superseded = False  # whether training resumed from the checkpoint at the path, or from a newer one
        self._validated = -1  # after how many batches the last validation ended

    def start(self) -> None:
        """Start to note states, if the Trainer fits on several ranks. Collective: every rank must call it."""
        self._close()
        strategy, trainer, context = self._strategy, self._strategy.current_trainer, current()
        is_fit = trainer.state.fn == "fit" and not trainer.fast_dev_run
        if self.name is None or context is None or strategy.world_size == 1 or not is_fit:
            return
        self._is_on_gpu = strategy.root_device.type != "cpu"
        self._trainer, self._peers = trainer, context.peers
        ranks, rank = ranks_of(strategy), strategy.global_rank
        # Loggers name their directories on rank 0.
        self._path, self._run = ranks.from_rank_zero((str(place_of(self.name, trainer)), secrets.token_hex(8)))
        self._refusal = self._why_never()
        if self._refusal is not None:
            return
        written = modified(self._path)
        resumed = modified(trainer.ckpt_path) if written and trainer.ckpt_path else None
        self._is_superseded = bool(written and resumed and written <= resumed)
        try:
            self._notes = open_notes(ranks.gather, rank)
        except OSError as error:
            self._refusal = f"the ranks cannot note their states ({error})"
            return
        self._own = self._notes[rank]
        self._random = RandomStateBytes()
        self._buffers = NotedBuffers(strategy.lightning_module)
        is_first = rank == min(self._notes)  # rank 0, or the first rank of another host
        self._notes_buffers = is_first and self._buffers.are_any
        self._progress = trainer.fit_loop.epoch_loop.batch_progress
        self._parameter = next(each for each in strategy.model.parameters() if each.requires_grad)

    def _why_never(self) -> str | None:
        strategy = self._strategy
        if strategy._model_averaging_period is not None:
            return "model_averaging_period lets the ranks have different weights"
        kinds = {base.__name__ for each in strategy.optimizers for base in type(each).__mro__}  # importing it is slow
        if "ZeroRedundancyOptimizer" in kinds:
            return "each rank has only a shard of the optimiser's state (ZeroRedundancyOptimizer)"
        if locate(self._path).local is None:
            return f"{self._path} is not on a file system with locks"
        if strategy.data.training.resume_data == "stock":
            return 'with resume_data="stock" training would not continue with the next step'
        return None

    def end(self) -> None:
        """Close the notes; remove the checkpoint after a finished run that resumed from it, or from a newer one."""
        trainer, is_superseded = self._trainer, self._is_superseded
        self._close()
        has_finished = (
            trainer is not None and trainer.state.status != TrainerStatus.INTERRUPTED and not trainer.should_stop
        )
        if has_finished and is_superseded and trainer.is_global_zero:
            for path in (self._path, lock_of(self._path)):
                Path(path).unlink(missing_ok=True)

    def _close(self) -> None:
        for notes in self._notes.values():
            notes.close()
        self._forget()

    # Hooks of training.

    def note(self, moment: Kind) -> None:
        """Note this rank's random states, and the buffers where they have changed."""
        if self._own is None:
            return
        if moment == Kind.EPOCH:
            self._generators = training_generators(self._strategy)
        batches = self._progress.total.ready
        self._write(moment, batches, *self._random.read(self._generators))
        if self._notes_buffers and (content := self._buffers.read(even_if_same=moment == Kind.BACKWARD)):
            self._write(Kind.BUFFERS, batches, content)

    def _write(self, kind: Kind, batches: int, *parts: Any) -> None:
        if self._own is None:
            return
        try:
            self._own.write(kind, batches, *parts)
        except OSError as error:  # training continues
            self._own, self._refusal = None, f"the ranks' states are no longer recorded ({error})"

    def on_iterator_start(self) -> None:
        """Note a new iterator over training data, once its first batch has been read."""
        self._has_new_iterator = True

    def on_train_batch_start(self) -> None:
        """Start a batch; note the random states from which new iterators drew."""
        if self._own is not None:
            self._evaluations = 0
            self._stepped = self._trainer.fit_loop.epoch_loop._batches_that_stepped
            if self._has_new_iterator:
                self._has_new_iterator = False
                positions = positions_of(self._trainer)
                self._write(Kind.LOADERS, positions[0].epoch, pickle.dumps([each.starts() for each in positions]))

    def on_step(self) -> None:
        """Count a forward pass; raise if a rank failed, before the next collective does.

        Raises:
            RankFailedError: one of its kinds.
        """
        if self._own is not None:
            self._evaluations += 1
            self._raise_cause()

    @contextmanager
    def validation_step(self) -> Iterator[None]:
        """Note the random states after the step; raise if a rank failed, before the next collective does.

        Raises:
            RankFailedError: one of its kinds.
        """
        if self._own is not None:
            self._raise_cause()
        yield
        self.note(Kind.VALIDATED)

    def on_validation_end(self) -> None:
        """Record that a validation within training is done."""
        if self._own is not None and not self._trainer.sanity_checking:
            self.note(Kind.VALIDATED)
            self._validated = self._progress.total.ready

    def before_backward(self) -> None:
        """Note the state for the next step, in a pass that averages gradients."""
        if self._own is not None and not self._is_on_gpu and self._averages_gradients:
            self.note(Kind.BACKWARD)

    def after_backward(self) -> None:
        """Do the same on a GPU, after its gradients are averaged.

        Otherwise the optimiser step would be queued behind an all-reduce, and use partial sums after its abort.

        Raises:
            RankFailedError: a rank has failed; on a GPU.
        """
        if self._own is not None and self._is_on_gpu and self._averages_gradients:
            torch.cuda.current_stream(self._strategy.root_device).synchronize()
            self._raise_cause()
            self.note(Kind.BACKWARD)

    @property
    def _averages_gradients(self) -> bool:
        return bool(getattr(self._strategy.model, "require_backward_grad_sync", True))

    def after_optimizer_step(self) -> None:
        """Record the weights' versions after an optimiser step."""
        if self._own is not None:
            self._weights = self._fingerprint()

    def _fingerprint(self) -> tuple[int, int]:
        """Return a cheap value that changes when a callback swaps the weights."""
        return self._parameter._version, self._parameter.data_ptr()

    def _raise_cause(self) -> None:
        if self._peers.cause is not None:
            raise self._peers.cause.to_error()

    # After a failure.

    def save(self, exception: BaseException) -> None:
        """Save the last finished step, unless another survivor did, and print a line.

        Args:
            exception: the exception with which this rank exits because of another one.
        """
        cause = None if self._trainer is None else self._peers.cause
        if cause is None or cause.kind not in _SURVIVED or cause.rank == self._strategy.global_rank:
            return
        try:
            with delaying_forced_end(self._seconds):
                line = self._save(exception)
        except Refused as refusal:
            line = f"no checkpoint of the last step: {refusal}"
        except Exception as error:
            line = f"no checkpoint of the last step: {reason_of(error)}"
        self._close()
        if line:
            sys.stderr.write(f"[rank {self._strategy.global_rank}] {line}\n")
            sys.stderr.flush()

    @property
    def _seconds(self) -> float:
        return float(self._strategy.stops.deadline.total_seconds())

    def _save(self, exception: BaseException) -> str:
        trainer = self._trainer
        refusal = self._refusal or self._why_not(exception)
        if refusal is not None:
            raise Refused(refusal)
        loops = copy.deepcopy(trainer.fit_loop.state_dict())
        stopped = self._correct(loops)
        accumulated, has_ended = trainer.accumulate_grad_batches, trainer.fit_loop._data_fetcher.done
        restart = find_restart(loops, accumulated=accumulated, stopped=stopped, has_ended=has_ended)
        batches = _batches_at(restart, loops["epoch_loop.batch_progress"])

        def write() -> None:
            io, checkpoint = self._strategy.checkpoint_io, self._checkpoint(loops, restart, stopped, batches)
            if isinstance(io, RankZeroCheckpointIO):
                io.saver.deadline = self._seconds
            io.save_checkpoint(checkpoint, self._path)
            io.teardown()  # waits for a save in the background

        Path(self._path).parent.mkdir(parents=True, exist_ok=True)
        if not save_if_furthest(self._path, self._run, batches, write, self._seconds):
            return ""
        lost = f"; the random states of {ranks_in_words(self._lost)} are unknown on this host, and follow from the seed"
        return (
            f"step {trainer.global_step} is saved to {self._path}; continue with trainer.fit(..., ckpt_path='last') "
            f"or ckpt_path={self._path!r}{lost if self._lost else ''}"
        )

    def _why_not(self, exception: BaseException) -> str | None:
        trainer = self._trainer
        if self._weights is None:
            return "no step has been finished since the start"
        current = self._progress.current
        if current.ready > current.processed:
            if not trainer.lightning_module.automatic_optimization:
                return "the failure happened in the middle of a batch of manual optimisation"
            if is_in_optimizer_step(trainer) and self._evaluations > 1:
                return "the optimiser calls its closure several times a step"
            if is_in_optimizer_step(trainer) and not is_in_closure(exception):
                return "the next one had started to change the weights"
        elif self._weights != self._fingerprint():
            return "the weights are not those that the optimiser left, as after a swap by weight averaging"
        return None

    def _correct(self, loops: dict[str, Any]) -> Stopped | None:
        """Change the loops' state to one between two batches, or before a due validation."""
        batch, loop = loops["epoch_loop.batch_progress"], loops["epoch_loop.state_dict"]
        epoch, counts, total = loops["epoch_progress"]["current"], batch["current"], batch["total"]
        done, is_last = counts["processed"], batch["is_last_batch"]
        if counts["ready"] > done or not done:
            return None
        loop["_batches_that_stepped"] = self._stepped
        if epoch["started"] > epoch["processed"]:
            total["completed"] += done - counts["completed"]
            counts["completed"] = done
            validates = validates_next(self._trainer)
            if validates and self._validated != total["ready"]:
                return "validation"
            if validates and is_last:
                return None  # Lightning would skip the validation, and count the step after it
        if is_last or done % self._trainer.accumulate_grad_batches == 0:
            loop["_batches_that_stepped"] += 1
        return "batch"

    def _checkpoint(
        self, loops: dict[str, Any], restart: Restart, stopped: Stopped | None, batches: int
    ) -> dict[str, Any]:
        trainer = self._trainer
        states = self._states_of_ranks(restart, batches)
        known = [note for note in self._notes[min(self._notes)].read(Kind.BUFFERS) if note.batches <= batches]
        if not self._buffers.restore(known[0].content if known else b""):
            raise Refused(
                "a buffer changed that is too big to be recorded in every step, or that was None at the start"
            )
        checkpoint = dump_checkpoint(trainer)
        checkpoint["loops"]["fit_loop"] = loops
        checkpoint[KEY] = self._strategy.data.training.section(restart, stopped, states)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, pl.callbacks.ModelCheckpoint) and callback.state_key in checkpoint["callbacks"]:
                forget_missing_files(checkpoint["callbacks"][callback.state_key], callback.mode)
        return checkpoint

    def _states_of_ranks(self, restart: Restart, batches: int) -> list[dict[str, Any]]:
        """Return the state of each rank; a rank without notes gets the shared state, and its own random state."""
        positions = positions_of(self._trainer) if restart.is_within else []
        if any(position.kind == "state" for position in positions):
            raise Refused("each rank's training loader keeps a state that only this rank has")
        shared = shared_state({"loaders": [position.state_dict(restart.done) for position in positions]})
        states = []
        for rank in range(self._strategy.world_size):
            notes = self._notes[rank].read(*_OF_STATES) if rank in self._notes else []
            state = _state_in(notes, restart, batches, shared["loaders"])
            if state is None and any(position.is_by_rank for position in positions):
                raise Refused(f"the order in which rank {rank} reads its samples is not known on this host")
            if state is None:
                self._lost.append(rank)
                with seeded(mix(self._strategy.data.training._seed or 0, rank, restart.epoch, batches)):
                    state = {**shared, "random": record_random_state()}
            states.append(state)
        return states


def _batches_at(restart: Restart, batch: Mapping[str, Any]) -> int:
    """Return the batches of all epochs that are done at a restart."""
    total: int = batch["total"]["processed"]
    is_dropped = restart.at == "batch_end" or restart.has_started
    return total - batch["current"]["processed"] + restart.done if is_dropped else total


def _state_in(
    notes: Sequence[Note], restart: Restart, batches: int, loaders: Sequence[Mapping[str, Any]]
) -> dict[str, Any] | None:
    """Return the state of a rank at a restart, from its notes, the newest first; ``None`` if no note has it."""
    moment = {"batch_end": Kind.WINDOW, "validation": Kind.VALIDATION}.get(restart.at, Kind.VALIDATED)
    latest = Kind.EPOCH if restart.has_started else moment
    random = next((note for note in notes if note.kind <= latest and note.batches == batches), None)
    starts = next((note for note in notes if note.kind == Kind.LOADERS and note.batches == restart.epoch), None)
    if random is None or (loaders and starts is None):
        return None
    started = pickle.loads(starts.content) if starts else ()
    return {
        "random": random_state_in(random.content),
        "loaders": [
            {**loader, "random": dict(each).get(loader["number"], [])}
            for loader, each in zip(loaders, started, strict=False)
        ],
    }


def forget_missing_files(state: dict[str, Any], mode: str) -> None:
    """Remove unfinished files from a ``ModelCheckpoint``'s state, which rank 0 was writing when it died."""

    def is_missing(path: str) -> bool:
        location = Path(path)
        return bool(path) and location.parent.is_dir() and not location.exists()

    best = {path: score for path, score in state.get("best_k_models", {}).items() if not is_missing(path)}
    if len(best) < len(state.get("best_k_models", {})):
        choose = min if mode == "min" else max
        state["best_k_models"] = best  # the callback finds the worst one when it has as many as it keeps
        state["best_model_path"] = choose(best, key=best.__getitem__, default="")
        state["best_model_score"] = best.get(state["best_model_path"])
    for name in ("best_model_path", "last_model_path"):
        if is_missing(state.get(name, "")):
            state[name] = ""
