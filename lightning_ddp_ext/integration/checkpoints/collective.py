"""Save and restore on all ranks of a strategy.

Rank 0 writes, all ranks read, and all ranks raise if one fails. Our strategy calls this
from its hooks; :class:`~lightning_ddp_ext.RankZeroCheckpoint` installs it in a stock
strategy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lightning_ddp_ext.checkpoint.load import MapLocation
from lightning_ddp_ext.checkpoint.location import PathOrUrl
from lightning_ddp_ext.errors import (
    CheckpointError,
    CheckpointSaveError,
    DDPExtError,
    RankFailedError,
)
from lightning_ddp_ext.forced_exit import delaying_forced_exit
from lightning_ddp_ext.ranks import Ranks
from lightning_ddp_ext.rendezvous.runs import Run
from lightning_ddp_ext.supervision.failure import explain, may_be_echo

from ..cooperation import Cooperation, cooperation_of
from ..private.compat import trainer_of
from ..private.lightning_tree import TrainerStatus, fabric, pl, rank_zero_warn
from ..private.replaced_methods import ReplacedMethods
from ..strategy_ranks import enter_work, ranks_of, wait_and_detect_abort
from .checkpoint_io import RankZeroCheckpointIO, given
from .kept_weights import may_be_kept

AsyncCheckpointIO = pl.plugins.AsyncCheckpointIO


@dataclass
class _Save:
    """One call of :meth:`Checkpoints.save` on this rank.

    Attributes:
        checkpoint, path, storage_options, add_states: the arguments.
        is_written: whether this rank has written the file, or begun to in the background.
    """

    checkpoint: dict[str, Any]
    path: PathOrUrl
    storage_options: Any
    add_states: Callable[..., object]
    is_written: bool = False


class Checkpoints:
    """Saves and restores on all ranks with the strategy's ``checkpoint_io``.

    Every rank raises an error that occurs on any rank. After an exception that ends the
    run, rank 0 works without the others, which may never make the next call.

    With Lightning's ``AsyncCheckpointIO``, a save continues in the background while the
    Trainer trains. The next save, or the end, waits for it, and then raises its error or
    removes the checkpoints that it replaces.

    Args:
        strategy: our strategy or a stock one.
        deadline: time for all ranks to exit after a signal; ``None`` with a stock
            strategy, whose runs are not tracked.

    Attributes:
        run: the Trainer's current run, or its last one; the strategy's stop controller
            sets it. ``None`` with a stock strategy.
    """

    def __init__(self, strategy: pl.strategies.Strategy, deadline: timedelta | None = None) -> None:
        self._strategy = strategy
        # The time for which a save may delay the exit of this process.
        self._seconds = 0.0 if deadline is None else deadline.total_seconds()
        self.run = None if deadline is None else Run(is_outermost=False)
        # From the start of `restore` until the first `load`: the file to read, see "Reading".
        self._path_to_restore: str | None = None
        # On rank 0, the files that the save in the background replaces, until it has ended.
        self._to_remove: list[PathOrUrl] = []

    def install(self, trainer: pl.Trainer, replaced: ReplacedMethods) -> None:
        """Make the ranks of a stock strategy save and restore together, by our IO."""
        if type(self._strategy.checkpoint_io) is pl.plugins.TorchCheckpointIO:
            self._strategy.checkpoint_io = RankZeroCheckpointIO()
        replaced.replace(self._strategy, "save_checkpoint", self.save)
        replaced.replace(self._strategy, "remove_checkpoint", self.remove)
        replaced.restore_checkpoint_by(trainer, self.restore)
        if isinstance(self.foreground_io, RankZeroCheckpointIO):
            replaced.replace(self.foreground_io, "load_checkpoint", self.load)

    # Writing.

    def save(
        self,
        checkpoint: dict[str, Any],
        path: PathOrUrl,
        storage_options: Any = None,
        *,
        add_states: Callable[..., object] = lambda *, is_alone: None,
    ) -> None:
        """Write a checkpoint on rank 0.

        The ``ModelCheckpoint`` callbacks of all ranks get rank 0's record of the best
        files, since ranks that monitor different values would record different ones.
        Collective: every rank must call it, unless the Trainer is interrupted.

        Args:
            checkpoint: the content.
            path: the file.
            storage_options: passed to the ``checkpoint_io``.
            add_states: called once or, if another rank fails meanwhile, twice on each rank
                before the content is written. With ``is_alone=True`` it must not wait for
                other ranks.

        Raises:
            CheckpointSaveError: an abort of NCCL may have made the weights wrong.
            Exception: the error of rank 0's save, on every rank.
        """
        if wait_and_detect_abort(self._strategy):
            self._refuse_to_save(path)
            return
        save = _Save(checkpoint, path, storage_options, add_states)
        if self.cooperation <= Cooperation.NO_SAVES:
            self._save_alone(save)
            return
        try:
            self._save_together(save)
        except RankFailedError:
            # As with stock, a save in `if trainer.is_global_zero:` after a fit writes its file.
            if self.cooperation <= Cooperation.NO_SAVES and not save.is_written:
                self._save_alone(save)
            raise

    def _save_together(self, save: _Save) -> None:
        """Write a checkpoint on rank 0, and take over its record of the best files.

        Collective.
        """
        save.add_states(is_alone=False)
        records = self.on_rank_zero(lambda: self._write(save), f"saving {os.fspath(save.path)}")
        if not self._strategy.is_global_zero:
            for callback, record in zip(self._callbacks, records, strict=True):
                vars(callback).update(record)

    def _save_alone(self, save: _Save) -> None:
        """Write a checkpoint if this is rank 0; the other ranks may not make this call."""
        save.add_states(is_alone=True)
        if self._strategy.is_global_zero:
            self._write(save)

    def _refuse_to_save(self, path: PathOrUrl) -> None:
        """Raise that the weights may be wrong, or warn if the user already sees an error."""
        refusal = (
            f"cannot save checkpoint {os.fspath(path)}: NCCL was aborted after a failure, and a"
            " queued optimiser step may have used the gradients of only some ranks; an existing"
            " file is left untouched, so continue from the last checkpoint"
        )
        if not self.is_handling_exception:
            raise CheckpointSaveError(refusal, path=path)
        rank_zero_warn(refusal)

    def _write(self, save: _Save) -> list[dict[str, Any]]:
        """Write a checkpoint on this rank, and return the record of the best files.

        In the background, the write has only begun.
        """
        self._wait()
        io = self._strategy.checkpoint_io if self._saves_in_background else self.foreground_io
        try:
            with delaying_forced_exit(self._seconds):
                io.save_checkpoint(save.checkpoint, save.path, storage_options=save.storage_options)
        except Exception:
            self.finish_earlier()  # so that a background error is not raised a second time
            raise
        save.is_written = True
        return self._records()

    def _records(self) -> list[dict[str, Any]]:
        """Return the ``ModelCheckpoint`` callbacks' records of the best files, on the CPU."""
        records = [pl.callbacks.ModelCheckpoint.state_dict(each) for each in self._callbacks]
        return fabric.utilities.move_data_to_device(records, "cpu")  # type: ignore[no-any-return]

    @property
    def _callbacks(self) -> list[pl.callbacks.ModelCheckpoint]:
        """The Trainer's callbacks that save, if it has not been given another strategy."""
        trainer = self._trainer
        if trainer is None or trainer.strategy is not self._strategy:
            return []
        callbacks = trainer.checkpoint_callbacks
        return [each for each in callbacks if isinstance(each, pl.callbacks.ModelCheckpoint)]

    def remove(self, path: PathOrUrl) -> None:
        """Remove a checkpoint on rank 0. Collective: every rank must call it."""
        if wait_and_detect_abort(self._strategy):
            return  # the checkpoint that replaces it was not saved
        if not self._saves_in_background:
            io = self._strategy.checkpoint_io
            self.on_rank_zero(lambda: io.remove_checkpoint(path), f"removing {os.fspath(path)}")
        elif self._strategy.is_global_zero:
            self._to_remove.append(path)

    # Saving in the background.

    def finish(self) -> None:
        """Wait until everything is saved and removed, or raise the error.

        Collective, unless the Trainer is interrupted.
        """
        if not isinstance(self._strategy.checkpoint_io, AsyncCheckpointIO):
            return
        try:
            self.on_rank_zero(self._wait, "saving in the background")
        except Exception as error:
            if not self.is_interrupted:
                raise
            # The user already sees another error.
            rank_zero_warn(f"a background save also failed: {error}")

    def finish_earlier(self) -> None:
        """Wait for this rank's saves, whose errors must not prevent the next one."""
        with suppress(Exception):
            self._wait()

    def _wait(self) -> None:
        """Wait for the save in the background, and then remove files, or raise its error."""
        io = self._strategy.checkpoint_io
        if not isinstance(io, AsyncCheckpointIO):
            return
        to_remove = self._to_remove
        self._to_remove = []
        try:
            io.teardown()
        finally:
            # HACK: Lightning never clears an error that it has raised.
            AsyncCheckpointIO.__init__(io, io.checkpoint_io)
        for path in to_remove:
            io.remove_checkpoint(path)

    @property
    def foreground_io(self) -> pl.plugins.CheckpointIO:
        """The IO that writes and reads, which may be wrapped to save in the background."""
        io = self._strategy.checkpoint_io
        inner = io.checkpoint_io if isinstance(io, AsyncCheckpointIO) else io
        assert inner is not None, "the strategy has set it"
        return inner

    @property
    def _saves_in_background(self) -> bool:
        """Whether saves continue in the background after the call.

        They do so with an ``AsyncCheckpointIO``, with two exceptions: a callback that links
        to a file needs it immediately, and outside of the Trainer's functions nothing waits for
        the end of the save.
        """
        trainer = self._trainer
        is_running = trainer is not None and trainer.state.status == TrainerStatus.RUNNING
        if not is_running or not isinstance(self._strategy.checkpoint_io, AsyncCheckpointIO):
            return False
        callbacks = trainer.checkpoint_callbacks
        return all(getattr(callback, "save_last", None) != "link" for callback in callbacks)

    # Working together.

    def on_rank_zero(self, work: Callable[[], Any], what: str) -> Any:
        """Run ``work`` on rank 0, and return its result on every rank.

        If it raises, raise its error on every rank. Collective, unless the Trainer is
        interrupted: rank 0 then works alone, and the other ranks return ``None``.
        """
        if self.is_interrupted or self._ranks.world_size == 1:
            return work() if self._strategy.is_global_zero else None
        with self._naming_absent_rank(what):
            return self._ranks.on_rank_zero(work, what)

    def to_rank_zero(self, value: Any, what: str) -> list[Any] | None:
        """Return the values of all ranks on rank 0, and ``None`` on the others.

        The values are in rank order. Collective.
        """
        with self._naming_absent_rank(what):
            return self._ranks.to_rank_zero(value)

    @contextmanager
    def _naming_absent_rank(self, what: str) -> Iterator[None]:
        """Run a block that every rank must run, after a barrier.

        An error names a rank that does not reach the block or that fails in it.
        """
        try:
            if self._ranks.world_size > 1:
                enter_work(what)
            yield
        except (DDPExtError, OSError):  # they name the rank or the file
            raise
        except Exception as error:
            if not may_be_echo(error):
                raise
            # Outside the Trainer's functions, nothing else names the rank that failed.
            explanation: BaseException = explain(error)
            raise explanation from explanation.__cause__

    # Reading. When the Trainer restores a checkpoint, these calls follow each other:
    #
    # 1. Lightning's restore is replaced by `restore`, which names the file on all ranks.
    # 2. Lightning's own method calls the strategy's `load_checkpoint`, which asks
    #    `is_restoring` before it calls `load`.
    # 3. `load` reads the file on all ranks together.
    #
    # Any other `load` is a user's, which may call it on some ranks only, also in a hook of
    # this restore.

    def restore(
        self, read: Callable[..., None], path: PathOrUrl | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Call ``read`` on every rank with the file that rank 0 found. Collective.

        Each rank resolves ``"last"``, ``"best"`` and similar values on its own disk
        before the ranks connect. A rank that finds nothing would otherwise skip the
        restore and its collectives.
        """
        self._path_to_restore = self._ranks.from_rank_zero(
            None if path is None else os.fspath(path)
        )
        try:
            read(self._path_to_restore, *args, **kwargs)
        finally:
            self._path_to_restore = None  # also if Lightning has read no file

    def is_restoring(self, path: PathOrUrl) -> bool:
        """Whether the Trainer's own restore is about to read this file.

        The restore reads it before it calls any hook, so a later read is a user's.
        """
        return self._path_to_restore is not None and os.fspath(path) == self._path_to_restore

    def load(
        self, path: PathOrUrl, map_location: MapLocation = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint: in the Trainer's own restore on all ranks together, else alone.

        If saves are in the background, all ranks first wait for them together.

        Raises:
            CheckpointError: the file cannot be read, or the Trainer's own restore reads
                one that was not saved by a Trainer.
        """
        is_restore = self.is_restoring(path)
        self._path_to_restore = None  # a hook that reads the file again does so alone
        self.finish()
        io = self.foreground_io
        if is_restore and isinstance(io, RankZeroCheckpointIO):
            return self._load_together(io, path, map_location, weights_only)
        # Not the object's method, which `install` may have replaced by this one.
        return type(io).load_checkpoint(
            io, path, **given(map_location=map_location, weights_only=weights_only)
        )

    def _load_together(
        self,
        io: RankZeroCheckpointIO,
        path: PathOrUrl,
        map_location: MapLocation,
        weights_only: bool | None,
    ) -> dict[str, Any]:
        """Read a Trainer's checkpoint on all ranks. Collective."""
        with self._naming_absent_rank(f"reading {os.fspath(path)}"):
            content = io.read(
                path,
                self._ranks,
                map_location,
                weights_only,
                # Weights that are only copied into the model need not be read into memory.
                map_weights=not may_be_kept(self._strategy.lightning_module, self._trainer),
            )
        if not isinstance(content, dict) or "state_dict" not in content:
            raise CheckpointError(
                f"checkpoint {path} was not saved by a Trainer: it has no entry 'state_dict'; to"
                " start with the weights in it, call"
                f" model.load_state_dict(torch.load({str(path)!r})), and leave out ckpt_path"
            )
        return content

    # State of the strategy and the Trainer, read anew at each use. `cooperation` is the
    # state; the two properties after it name ranges of it.

    @property
    def _ranks(self) -> Ranks:
        return ranks_of(self._strategy)

    @property
    def _trainer(self) -> Any:
        return trainer_of(self._strategy.lightning_module)

    @property
    def cooperation(self) -> Cooperation:
        """How far this rank still cooperates with the others."""
        return cooperation_of(self._trainer, self.run)

    @property
    def is_interrupted(self) -> bool:
        """Whether an exception ended the Trainer's run, so ranks may make different calls."""
        return self.cooperation <= Cooperation.ONLY_VALUES

    @property
    def is_handling_exception(self) -> bool:
        """Whether an exception ended the run and has not been caught yet."""
        return self.cooperation is Cooperation.NONE
