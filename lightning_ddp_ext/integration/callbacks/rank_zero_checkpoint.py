"""A ``ModelCheckpoint`` whose ranks agree, on any data-parallel strategy."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_ddp_ext.errors import ConfigurationError

from ..checkpoint_io import RankZeroCheckpointIO
from ..checkpoints import Checkpoints
from ..lightning_tree import pl, rank_zero_warn, refuse_missing
from ..replaced_methods import ReplacedMethods
from ..strategy import DDPExtStrategy

# What ModelCheckpoint remembers of a save before it has succeeded.
_REMEMBERED = (
    "_last_checkpoint_saved",
    "_last_global_step_saved",
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "current_score",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
)

refuse_missing(
    pl.callbacks.ModelCheckpoint,
    "_monitor_candidates",
    "_save_topk_checkpoint",
    "_save_last_checkpoint",
    "_link_checkpoint",
)


class RankZeroCheckpoint(pl.callbacks.ModelCheckpoint):
    """Lightning's ``ModelCheckpoint``, with ranks that save, fail and resume together.

    It brings :class:`~lightning_ddp_ext.RankZeroCheckpointIO` along, unless the Trainer has a checkpoint IO of the
    user's own. With a stock ``ddp`` strategy it also makes every save, removal and restore of the Trainer one that all
    ranks do together: an error on rank 0 is raised on every rank, ``ckpt_path="last"`` and ``"best"`` mean what rank 0
    finds, and a file that rank 0 alone can see restores every rank. Scores, and the names made from them, are rank 0's
    on every rank. A save that failed leaves no trace in what it remembers.

    Its state in a checkpoint is ``ModelCheckpoint``'s: files go from one to the other.

    Args:
        *args: see ``ModelCheckpoint``.
        checkpoint_io: the IO to bring along, where its defaults do not suit.
        **kwargs: see ``ModelCheckpoint``.

    Raises:
        ConfigurationError: two of these callbacks bring along different IOs.

    Example::

        trainer = L.Trainer(strategy="ddp", devices=2, callbacks=[RankZeroCheckpoint(save_last=True)])
    """

    def __init__(self, *args: Any, checkpoint_io: RankZeroCheckpointIO | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._checkpoint_io = checkpoint_io
        self._checkpoints: Checkpoints | None = None
        self._replaced = ReplacedMethods()
        self._unconfirmed: dict[str, Any] | None = None  # what was remembered before a save that may fail yet

    @property
    @override
    def state_key(self) -> str:
        return super().state_key.replace(type(self).__qualname__, pl.callbacks.ModelCheckpoint.__qualname__, 1)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._replaced.put_back()
        self._checkpoints = _checkpoints_of(trainer, self._checkpoint_io, self._replaced)
        super().setup(trainer, pl_module, stage)

    @override
    def _monitor_candidates(self, trainer: pl.Trainer) -> dict[str, Tensor]:
        mine = super()._monitor_candidates(trainer)
        if self._checkpoints is None or self._checkpoints.is_interrupted:
            return mine
        agreed: Mapping[str, Any] = trainer.strategy.broadcast({name: _on_cpu(value) for name, value in mine.items()})
        device = trainer.strategy.root_device
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in agreed.items()}

    @override
    def _save_topk_checkpoint(self, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        with self._forgetting_failures():
            super()._save_topk_checkpoint(trainer, monitor_candidates)

    @override
    def _save_last_checkpoint(self, trainer: pl.Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        with self._forgetting_failures():
            super()._save_last_checkpoint(trainer, monitor_candidates)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._forget_failed_save()  # the strategy has waited for it
        super().teardown(trainer, pl_module, stage)
        self._replaced.put_back()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._forget_failed_save()
        super().on_exception(trainer, pl_module, exception)

    @contextmanager
    def _forgetting_failures(self) -> Iterator[None]:
        """Put back what was remembered before, if there is no checkpoint in the end."""
        if self._checkpoints is not None and self._unconfirmed is not None:
            self._checkpoints.join()  # what to do next depends on what has come of the last save
        self._forget_failed_save()
        before = {name: copy.copy(getattr(self, name)) for name in _REMEMBERED}
        try:
            yield
        except BaseException:
            vars(self).update(before)
            raise
        self._unconfirmed = before
        if self._checkpoints is not None and not self._checkpoints.saves_in_background:
            self._forget_failed_save()

    def _forget_failed_save(self) -> None:
        failed = frozenset() if self._checkpoints is None else self._checkpoints.failed_saves
        if self._unconfirmed is not None and self._last_checkpoint_saved in failed:
            vars(self).update(self._unconfirmed)
        self._unconfirmed = None

    @override
    def _link_checkpoint(self, trainer: pl.Trainer, filepath: str, linkpath: str) -> None:  # type: ignore[override]
        io = trainer.strategy.checkpoint_io
        if self._checkpoints is None or not isinstance(io, RankZeroCheckpointIO):
            super()._link_checkpoint(trainer, filepath, linkpath)
            return
        self._checkpoints.on_rank_zero(lambda: io.link(filepath, linkpath), f"linking {linkpath}")


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _checkpoints_of(
    trainer: pl.Trainer, io: RankZeroCheckpointIO | None, replaced: ReplacedMethods
) -> Checkpoints | None:
    """What saves and restores together; put into a stock strategy where it is not yet."""
    strategy = trainer.strategy
    found = getattr(strategy, "checkpoints", None)
    if not isinstance(found, Checkpoints):
        if type(strategy).save_checkpoint is not pl.strategies.Strategy.save_checkpoint:
            rank_zero_warn(
                f"{type(strategy).__name__} saves in a way of its own: RankZeroCheckpoint leaves it to that, and is an "
                "ordinary ModelCheckpoint here"
            )
            return None
        found = _install(strategy)
    if not isinstance(strategy, DDPExtStrategy):
        replaced.restore_what_rank_zero_does(trainer)
    _bring_along(strategy, io)
    return found


def _bring_along(strategy: pl.strategies.Strategy, io: RankZeroCheckpointIO | None) -> None:
    there = strategy.checkpoint_io
    is_default = type(there) is pl.plugins.TorchCheckpointIO or getattr(there, "is_default", False)
    if is_default:
        strategy.checkpoint_io = io or RankZeroCheckpointIO()
    elif io is not None and io is not there:
        raise ConfigurationError(
            f"RankZeroCheckpoint(checkpoint_io={type(io).__name__}) would take the place of the {type(there).__name__} "
            "that the Trainer has already; give it one of them, in plugins or in one callback"
        )


def _install(strategy: pl.strategies.Strategy) -> Checkpoints:
    """Have a stock strategy's own hooks do what ours do."""
    checkpoints = Checkpoints(strategy)
    load_weights, teardown = strategy.load_model_state_dict, strategy.teardown

    def finish_and_teardown() -> None:
        checkpoints.finish()
        teardown()

    strategy.checkpoints = checkpoints  # type: ignore[attr-defined]
    hooks = {
        "save_checkpoint": checkpoints.save,
        "remove_checkpoint": checkpoints.remove,
        "load_checkpoint": checkpoints.load,
        "load_model_state_dict": partial(checkpoints.load_weights, load_weights),
        "teardown": finish_and_teardown,
    }
    vars(strategy).update(hooks)
    return checkpoints
