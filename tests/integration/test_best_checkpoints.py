"""Which checkpoints are the best if each rank logs another monitored value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint

from tests.harness.training import Batch, Kind, Net, fit, on_both


class Monitored(Net):
    """Logs a value that falls on rank 0 and rises on rank 1."""

    def validation_step(self, batch: Batch, index: int) -> None:
        self.log("own", self.current_epoch * (2.0 * self.global_rank - 1))


def monitor(kind: Kind, directory: Path) -> dict[str, Any]:
    """Return what this rank records of the best checkpoints."""
    checkpoint = ModelCheckpoint(directory, "{epoch}-{own:.0f}", monitor="own", save_top_k=2)
    fit(kind, directory, Monitored(), checkpoint, enable_checkpointing=True, max_epochs=3)
    return {
        "scores": {
            Path(path).name: float(value) for path, value in checkpoint.best_k_models.items()
        },
        "best": Path(checkpoint.best_model_path).name,
        "best score": float(checkpoint.best_model_score),
        "worst kept": Path(checkpoint.kth_best_model_path).name,
        "score of the worst kept": float(checkpoint.kth_value),
    }


def test_all_ranks_record_the_best_checkpoints_of_rank_zero(tmp_path: Path) -> None:
    """With stock, each rank records other files."""
    (first, second), stock = on_both(monitor, tmp_path)
    assert stock[0] != stock[1]
    assert second == first
    # The first two are kept: a later one must be better on every rank.
    assert first["best"] == "epoch=1-own=-1.ckpt"
