"""Find the Trainer's epoch, and the loaders of its loops."""

from __future__ import annotations

from typing import Any

from lightning_ddp_ext.data.loader import DistributedLoader, TrainingLoader
from lightning_ddp_ext.data.proxy import iterable_of

from ..private.compat import combined_loader_of


def epoch_of(trainer: Any) -> int:
    """Return the current or next epoch.

    With ``max_steps``, ``trainer.current_epoch`` lags behind.
    """
    return int(trainer.fit_loop.epoch_progress.current.processed)


def training_loaders_of(trainer: Any) -> list[TrainingLoader]:
    """Return the training loaders, in the order of the combined loader."""
    return _loaders_of(trainer.fit_loop)


def validation_loaders_of(trainer: Any) -> list[DistributedLoader]:
    """Return the loaders of the fit's validation, in the order of the combined loader."""
    return _loaders_of(trainer.fit_loop.epoch_loop.val_loop)


def _loaders_of(loop: Any) -> list[Any]:
    combined = combined_loader_of(loop)
    return [] if combined is None else [iterable_of(loader) for loader in combined.flattened]
