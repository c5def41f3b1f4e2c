"""A ``ModelCheckpoint`` that makes all ranks act together."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from ..checkpoints.collective import Checkpoints
from ..cooperation import CooperatingRanks
from ..private.lightning_tree import fabric, pl, rank_zero_warn
from ..private.replaced_methods import ReplacedMethods
from ..strategy import DDPExtStrategy


class RankZeroCheckpoint(pl.callbacks.ModelCheckpoint):
    """Use this callback instead of ``ModelCheckpoint`` to make all ranks of ``ddp`` act together.

    All ranks save, remove and restore together: every rank raises rank 0's error,
    ``ckpt_path="last"`` and ``"best"`` mean the file that rank 0 finds, and every rank is
    restored even if only rank 0 sees that file. All ranks use rank 0's scores and the
    file names made from them, also with :class:`~lightning_ddp_ext.DDPExtStrategy`, which
    does all else by itself. With a strategy that overrides ``save_checkpoint``, such as
    FSDP, the callback warns and behaves like ``ModelCheckpoint``.

    In a stock strategy it puts a :class:`~lightning_ddp_ext.RankZeroCheckpointIO` in the
    place of Lightning's ``TorchCheckpointIO``; another checkpoint IO stays. Its state in a
    checkpoint is the same as ``ModelCheckpoint``'s, so each can read the other's
    checkpoints.

    Args:
        *args: see ``ModelCheckpoint``.
        **kwargs: see ``ModelCheckpoint``.

    Example::

        callback = RankZeroCheckpoint(save_last=True)
        trainer = L.Trainer(strategy="ddp", devices=2, callbacks=[callback])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Saves and restores on all ranks, from `setup` on: our strategy's own object, or one
        # that is installed in a stock strategy for the run. ``None`` with a strategy that
        # saves in its own way.
        self._checkpoints: Checkpoints | None = None
        # What is installed in a stock strategy, until `teardown` or an exception.
        self._replaced = ReplacedMethods()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to a Trainer's run; scripts copy callbacks for the next."""
        return {**vars(self), "_checkpoints": None, "_replaced": ReplacedMethods()}

    @property
    @override
    def state_key(self) -> str:
        # Lightning puts the name of the class into the key. With the stock one, this callback
        # and ModelCheckpoint find each other's states in a checkpoint.
        return super().state_key.replace(
            type(self).__qualname__, pl.callbacks.ModelCheckpoint.__qualname__, 1
        )

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._checkpoints = None
        strategy = trainer.strategy
        if isinstance(strategy, DDPExtStrategy):
            self._checkpoints = strategy._checkpoints  # it is private to this package
        elif type(strategy).save_checkpoint is pl.strategies.Strategy.save_checkpoint:
            self._checkpoints = Checkpoints(strategy, CooperatingRanks(strategy))
            self._checkpoints.install(trainer, self._replaced)
        else:
            rank_zero_warn(
                f"{type(strategy).__name__} overrides save_checkpoint, so RankZeroCheckpoint leaves"
                " saving to it and behaves like an ordinary ModelCheckpoint"
            )
        super().setup(trainer, pl_module, stage)

    def _finish(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.background.finish()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._finish()

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        super().on_exception(trainer, pl_module, exception)
        self._finish()
        self._replaced.undo_all()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        self._replaced.undo_all()

    @override
    def _monitor_candidates(self, trainer: pl.Trainer) -> dict[str, Tensor]:
        """Return rank 0's values, from which all ranks compute scores and file names.

        Lightning calls this before each save, and has no public method for it. So it is
        collective when a save is: not after an exception that ended the run, since other
        ranks may then not save, and not if the strategy saves in its own way.
        """
        values: dict[str, Tensor] = fabric.utilities.move_data_to_device(
            super()._monitor_candidates(trainer), "cpu"
        )
        if self._checkpoints is None or self._checkpoints.ranks.is_interrupted:
            return values
        return trainer.strategy.broadcast(values)
