"""Share rank 0's record of the best checkpoints with all ranks."""

from __future__ import annotations

from typing import Any

from ..private.lightning_tree import fabric, pl
from ..strategy_ranks import ranks_of

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
    move = fabric.utilities.move_data_to_device
    own = [{name: getattr(callback, name) for name in _RECORD} for callback in callbacks]
    ranks = ranks_of(trainer.strategy)
    of_rank_zero = ranks.from_rank_zero(move(own, "cpu"))
    if ranks.rank != 0:
        records = move(of_rank_zero, trainer.strategy.root_device)
        for callback, record in zip(callbacks, records, strict=True):
            for name, value in record.items():
                setattr(callback, name, value)
