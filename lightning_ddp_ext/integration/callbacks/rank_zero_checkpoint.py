"""A ``ModelCheckpoint`` that makes all ranks act together."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_ddp_ext.errors import ConfigurationError

from ..checkpoints.checkpoint_io import RankZeroCheckpointIO
from ..checkpoints.collective import Checkpoints
from ..private.lightning_tree import fabric, pl, rank_zero_warn
from ..private.replaced_methods import ReplacedMethods
from ..strategy import DDPExtStrategy


class RankZeroCheckpoint(pl.callbacks.ModelCheckpoint):
    """Lightning's ``ModelCheckpoint``, with ranks that save, fail and resume together.

    It installs a :class:`~lightning_ddp_ext.RankZeroCheckpointIO` unless the user has
    set another checkpoint IO. With a strategy that overrides ``save_checkpoint``, such
    as FSDP, it warns and behaves like ``ModelCheckpoint``. With a stock ``ddp``
    strategy, all ranks save, remove and restore together: every rank raises rank 0's
    error, ``ckpt_path="last"`` and ``"best"`` mean the file that rank 0 finds, and
    every rank is restored even if only rank 0 sees that file. All ranks use rank 0's
    scores and the file names made from them.

    Its state in a checkpoint is the same as ``ModelCheckpoint``'s, so each can read the
    other's checkpoints.

    Args:
        *args: see ``ModelCheckpoint``.
        checkpoint_io: the IO to install instead of one with default arguments.
        **kwargs: see ``ModelCheckpoint``.

    Raises:
        ConfigurationError: ``checkpoint_io`` differs from the IO of the Trainer or of
            another of these callbacks.

    Example::

        callback = RankZeroCheckpoint(save_last=True)
        trainer = L.Trainer(strategy="ddp", devices=2, callbacks=[callback])
    """

    def __init__(
        self, *args: Any, checkpoint_io: RankZeroCheckpointIO | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._checkpoint_io = checkpoint_io
        self._checkpoints: Checkpoints | None = None
        self._replaced = ReplacedMethods()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to a Trainer's run; scripts copy callbacks for the next."""
        return {**vars(self), "_checkpoints": None, "_replaced": ReplacedMethods()}

    @property
    @override
    def state_key(self) -> str:
        return super().state_key.replace(
            type(self).__qualname__, pl.callbacks.ModelCheckpoint.__qualname__, 1
        )

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._replaced.undo_all()
        self._checkpoints = self._install_in(trainer)
        super().setup(trainer, pl_module, stage)

    def _install_in(self, trainer: pl.Trainer) -> Checkpoints | None:
        """Make the ranks save and restore together.

        Return ``None`` if the strategy overrides ``save_checkpoint``.
        """
        strategy = trainer.strategy
        has_own_save = type(strategy).save_checkpoint is not pl.strategies.Strategy.save_checkpoint
        if has_own_save and not isinstance(strategy, DDPExtStrategy):
            rank_zero_warn(
                f"{type(strategy).__name__} overrides save_checkpoint, so RankZeroCheckpoint leaves"
                " saving to it and behaves like an ordinary ModelCheckpoint"
            )
            return None
        self._install_io(trainer)
        if isinstance(strategy, DDPExtStrategy):
            return strategy.checkpoints
        return _replace_methods(trainer, self._replaced)

    def _install_io(self, trainer: pl.Trainer) -> None:
        strategy = trainer.strategy
        present = strategy.checkpoint_io
        is_default = getattr(present, "is_default", False)
        if is_default or type(present) is pl.plugins.TorchCheckpointIO:
            strategy.checkpoint_io = _io_of_callbacks(trainer) or RankZeroCheckpointIO()
        own = self._checkpoint_io
        if own is not None and own is not strategy.checkpoint_io:
            raise ConfigurationError(
                f"RankZeroCheckpoint(checkpoint_io={type(own).__name__}) would replace the"
                f" Trainer's {type(present).__name__}; pass only one checkpoint IO, either in"
                " plugins or in one callback"
            )

    @override
    def _monitor_candidates(self, trainer: pl.Trainer) -> dict[str, Tensor]:
        own_values = super()._monitor_candidates(trainer)
        if self._checkpoints is None or self._checkpoints.is_interrupted:
            return own_values
        move = fabric.utilities.move_data_to_device
        of_rank_zero = trainer.strategy.broadcast(move(own_values, "cpu"))
        values: dict[str, Tensor] = move(of_rank_zero, trainer.strategy.root_device)
        return values

    @override
    def _link_checkpoint(  # type: ignore[override]
        self, trainer: pl.Trainer, filepath: str, linkpath: str
    ) -> None:
        io = trainer.strategy.checkpoint_io
        if self._checkpoints is None or not isinstance(io, RankZeroCheckpointIO):
            super()._link_checkpoint(trainer, filepath, linkpath)
            return
        self._checkpoints.on_rank_zero(lambda: io.link(filepath, linkpath), f"linking {linkpath}")


def _io_of_callbacks(trainer: pl.Trainer) -> RankZeroCheckpointIO | None:
    """Return the IO that a callback was given, if any."""
    ios = [
        callback._checkpoint_io
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, RankZeroCheckpoint)
    ]
    return next((io for io in ios if io is not None), None)


def _replace_methods(trainer: pl.Trainer, replaced: ReplacedMethods) -> Checkpoints:
    """Make the ranks of a stock strategy save and restore together.

    The strategy's teardown undoes this.
    """
    strategy = trainer.strategy
    io = strategy.checkpoint_io
    checkpoints = Checkpoints(strategy)
    teardown = io.teardown

    def finish_and_undo() -> None:
        try:
            checkpoints.finish()
            teardown()
        finally:
            replaced.undo_all()

    replaced.replace(strategy, "save_checkpoint", checkpoints.save)
    replaced.replace(strategy, "remove_checkpoint", checkpoints.remove)
    replaced.restore_checkpoint_by(trainer, checkpoints.restore)
    # The strategy calls these methods of its IO on every rank.
    replaced.replace(io, "teardown", finish_and_undo)
    if isinstance(io, RankZeroCheckpointIO):
        replaced.replace(io, "load_checkpoint", checkpoints.load)
    return checkpoints
