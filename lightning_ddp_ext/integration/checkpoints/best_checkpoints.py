"""Share rank 0's record of the best checkpoints with all ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..named_calls import ranks_of
from ..private.lightning_tree import pl

# What a ModelCheckpoint records; each rank computes it from its own values.
_RECORD = (
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "current_score",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
)


def share_best_checkpoints(trainer: Any) -> None:
    """Give the checkpoint callbacks of every rank rank 0's record.

    Ranks that monitor different values would otherwise record different files.
    Collective if the Trainer has such callbacks.
    """
    callbacks = [
        each
        for each in trainer.checkpoint_callbacks
        if isinstance(each, pl.callbacks.ModelCheckpoint)
    ]
    if not callbacks:
        return
    ranks = ranks_of(trainer.strategy)
    records = ranks.from_rank_zero([_record_of(callback) for callback in callbacks])
    if ranks.rank != 0:
        for callback, record in zip(callbacks, records, strict=True):
            for name, value in record.items():
                setattr(callback, name, _moved(value, trainer.strategy.root_device))


def _record_of(callback: Any) -> dict[str, Any]:
    return {name: _moved(getattr(callback, name), "cpu") for name in _RECORD}


def _moved(value: Any, device: Any) -> Any:
    """Return a record with its tensors on a device."""
    if isinstance(value, dict):
        return {name: _moved(each, device) for name, each in value.items()}
    return value.to(device) if isinstance(value, Tensor) else value
