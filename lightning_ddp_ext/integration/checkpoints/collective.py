"""Save and restore on all ranks of a strategy.

Rank 0 writes, all ranks read, and all ranks raise if one fails. Our strategy calls this
from its hooks; :class:`~lightning_ddp_ext.RankZeroCheckpoint` installs it in a stock
strategy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import nn

from lightning_ddp_ext.checkpoint.load import MapLocation
from lightning_ddp_ext.checkpoint.location import PathOrUrl
from lightning_ddp_ext.errors import CheckpointError, CheckpointSaveError, RankFailedError
from lightning_ddp_ext.forced_exit import delaying_forced_exit

from ..cooperation import CooperatingRanks
from ..private.compat import trainer_of
from ..private.lightning_tree import fabric, pl, rank_zero_warn
from ..private.replaced_methods import ReplacedMethods
from ..strategy_ranks import ranks_of, wait_and_detect_abort
from .background import BackgroundSaves
from .checkpoint_io import RankZeroCheckpointIO, given


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

    Args:
        strategy: our strategy or a stock one.
        ranks: its ranks.
        deadline: time for all ranks to exit after a signal; zero with a stock strategy,
            whose ranks are not stopped together.

    Attributes:
        ranks: the argument.
        background: the strategy's saves in the background.
    """

    def __init__(
        self,
        strategy: pl.strategies.Strategy,
        ranks: CooperatingRanks,
        deadline: timedelta = timedelta(0),
    ) -> None:
        self._strategy = strategy
        self.ranks = ranks
        self.background = BackgroundSaves(strategy, ranks)
        # The time for which a save may delay the exit of this process.
        self._exit_delay = deadline.total_seconds()
        # The file that the Trainer restores, from the start of `restore` until the first `load`.
        self._path_to_restore: str | None = None

    def install(self, trainer: pl.Trainer, replaced: ReplacedMethods) -> None:
        """Make the ranks of a stock strategy save and restore together, by our IO."""
        if type(self._strategy.checkpoint_io) is pl.plugins.TorchCheckpointIO:
            self._strategy.checkpoint_io = RankZeroCheckpointIO()
        replaced.replace(self._strategy, "save_checkpoint", self.save)
        replaced.replace(self._strategy, "remove_checkpoint", self.remove)
        replaced.restore_checkpoint_by(trainer, self.restore)
        io = self.background.foreground_io
        if isinstance(io, RankZeroCheckpointIO):
            replaced.replace(io, "load_checkpoint", self.load)

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
        save = _Save(checkpoint, path, storage_options, add_states)
        if wait_and_detect_abort(self._strategy):
            self._refuse_to_save(path)
        elif self.ranks.can_save_together:
            self._save_together(save)
        else:
            self._save_alone(save)

    def _save_together(self, save: _Save) -> None:
        """Write a checkpoint on rank 0, and take over its record of the best files.

        Collective.
        """
        try:
            save.add_states(is_alone=False)
            records = self.ranks.on_rank_zero(
                lambda: self._write(save), f"saving {os.fspath(save.path)}"
            )
        except RankFailedError:
            # After a fit, a script may save in `if trainer.is_global_zero:`, while the other
            # ranks exit or make other calls. Rank 0 then raises an error that names one of
            # them, but its file is written as with stock.
            if not self.ranks.can_save_together and not save.is_written:
                self._save_alone(save)
            raise
        if not self._strategy.is_global_zero:
            for callback, record in zip(self._callbacks, records, strict=True):
                vars(callback).update(record)  # its keys are the names of attributes

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
        if not self.ranks.is_handling_exception:
            raise CheckpointSaveError(refusal, path=path)
        rank_zero_warn(refusal)

    def _write(self, save: _Save) -> list[dict[str, Any]]:
        """Write a checkpoint on this rank, and return the record of the best files.

        In the background, the write has only begun.
        """
        self.background.wait()
        in_background = self.background.is_in_use
        io = self._strategy.checkpoint_io if in_background else self.background.foreground_io
        try:
            with delaying_forced_exit(self._exit_delay):
                io.save_checkpoint(save.checkpoint, save.path, storage_options=save.storage_options)
        except Exception:
            # It may be an early error of the background save, which the next wait would raise
            # a second time.
            self.background.finish_earlier()
            raise
        save.is_written = True
        records = [pl.callbacks.ModelCheckpoint.state_dict(each) for each in self._callbacks]
        return fabric.utilities.move_data_to_device(records, "cpu")  # type: ignore[no-any-return]

    @property
    def _callbacks(self) -> list[pl.callbacks.ModelCheckpoint]:
        """The Trainer's callbacks that save, if it has not been given another strategy."""
        trainer = trainer_of(self._strategy.lightning_module)
        if trainer is None or trainer.strategy is not self._strategy:
            return []
        callbacks = trainer.checkpoint_callbacks
        return [each for each in callbacks if isinstance(each, pl.callbacks.ModelCheckpoint)]

    def remove(self, path: PathOrUrl) -> None:
        """Remove a checkpoint on rank 0. Collective: every rank must call it."""
        if wait_and_detect_abort(self._strategy):
            return  # the checkpoint that replaces it was not saved
        if self.background.is_in_use:
            self.background.remove_after_save(path)
            return
        io = self._strategy.checkpoint_io
        self.ranks.on_rank_zero(lambda: io.remove_checkpoint(path), f"removing {os.fspath(path)}")

    # Reading. The Trainer's own restore calls `restore`, which names the file on all ranks.
    # Within it, Lightning calls `load`, which reads this file on all ranks together. Any other
    # `load` is a user's, also in a hook of this restore; it may be called on some ranks only,
    # unless saves are in the background.

    def restore(
        self, read: Callable[..., None], path: PathOrUrl | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Call ``read`` on every rank with the file that rank 0 found. Collective.

        Each rank resolves ``"last"``, ``"best"`` and similar values on its own disk
        before the ranks connect. A rank that finds nothing would otherwise skip the
        restore and its collectives.

        Args:
            read: Lightning's own method, which calls :meth:`load`, unless the path is ``None``.
            path: the file that this rank found.
            *args: further arguments of ``read``.
            **kwargs: further arguments of ``read``.
        """
        self._path_to_restore = ranks_of(self._strategy).from_rank_zero(
            None if path is None else os.fspath(path)
        )
        try:
            read(self._path_to_restore, *args, **kwargs)
        finally:
            self._path_to_restore = None  # also if Lightning has read no file

    def load(
        self,
        path: PathOrUrl,
        map_location: MapLocation = None,
        weights_only: bool | None = None,
        *,
        on_restored: Callable[[dict[str, Any]], object] = lambda checkpoint: None,
    ) -> dict[str, Any]:
        """Read a checkpoint: in the Trainer's own restore on all ranks together, else alone.

        If saves are in the background, all ranks first wait for them together.

        Args:
            path: the file.
            map_location: passed to the ``checkpoint_io``, unless ``None``.
            weights_only: passed to the ``checkpoint_io``, unless ``None``.
            on_restored: called with the checkpoint in the Trainer's own restore.

        Raises:
            CheckpointError: the file cannot be read, or the Trainer's own restore reads
                one that was not saved by a Trainer.
        """
        is_restore = self._path_to_restore is not None and os.fspath(path) == self._path_to_restore
        # The restore reads the file before it calls any hook, so a later read is a user's.
        self._path_to_restore = None
        self.background.finish()
        io = self.background.foreground_io
        if is_restore and isinstance(io, RankZeroCheckpointIO):
            checkpoint = self._load_together(io, path, map_location, weights_only)
        else:
            # Not the object's method, which `install` may have replaced by this one.
            checkpoint = type(io).load_checkpoint(
                io, path, **given(map_location=map_location, weights_only=weights_only)
            )
        if is_restore:
            on_restored(checkpoint)
        return checkpoint

    def _load_together(
        self,
        io: RankZeroCheckpointIO,
        path: PathOrUrl,
        map_location: MapLocation,
        weights_only: bool | None,
    ) -> dict[str, Any]:
        """Read a Trainer's checkpoint on all ranks. Collective."""
        module = self._strategy.lightning_module
        with self.ranks.jointly(f"reading {os.fspath(path)}") as ranks:
            map_weights = not _may_be_kept(module, trainer_of(module))
            content = io.read(path, ranks, map_location, weights_only, map_weights=map_weights)
        if not isinstance(content, dict) or "state_dict" not in content:
            raise CheckpointError(
                f"checkpoint {path} was not saved by a Trainer: it has no entry 'state_dict'; to"
                " start with the weights in it, call"
                f" model.load_state_dict(torch.load({str(path)!r})), and leave out ckpt_path"
            )
        return content


# Weights that a restore only copies into the model stay mapped from the file. If a hook or
# module may also change or keep them, they are read into memory first.


def _may_be_kept(module: pl.LightningModule | None, trainer: Any) -> bool:
    """Whether code other than torch's gets the file's weights before the model copies them.

    Args:
        module: the module that is restored; ``None`` if it is not known.
        trainer: the Trainer that restores it; ``None`` without one.
    """
    if module is None:
        return True
    owners: list[tuple[Any, type]] = [(module, pl.LightningModule)]
    if trainer is not None:
        owners += [(callback, pl.Callback) for callback in trainer.callbacks]
        owners.append((trainer.precision_plugin, pl.plugins.Precision))
    return (
        _is_overridden(module, pl.LightningModule, "load_state_dict")
        or any(_is_overridden(owner, base, "on_load_checkpoint") for owner, base in owners)
        or any(_may_keep(part) for part in module.modules())
    )


def _is_overridden(owner: Any, base: type, name: str) -> bool:
    """Whether a class other than ``base`` or ours defines this method of ``owner``.

    Lightning's own subclasses count as well, since WeightAveraging keeps the weights.
    """
    method = getattr(owner, name)
    function = getattr(method, "__func__", method)  # it may be an attribute of the object
    is_ours = str(getattr(function, "__module__", "")).startswith("lightning_ddp_ext.")
    return function is not getattr(base, name) and not is_ours


def _may_keep(module: nn.Module) -> bool:
    """Whether a module does more than copy its entries from a state dict.

    Without a public name for these attributes, a missing one counts as true, which is
    only slower.
    """
    load_method = getattr(type(module), "_load_from_state_dict", None)
    overrides_loading = not getattr(load_method, "__module__", "").startswith("torch.nn.")
    has_hooks = bool(getattr(module, "_load_state_dict_pre_hooks", True))
    has_state = type(module).set_extra_state is not nn.Module.set_extra_state
    return overrides_loading or has_hooks or has_state
