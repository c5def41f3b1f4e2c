"""A run of stock Lightning that was stopped in the middle of an epoch goes on with ours."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import DataLoader

from tests.integration.continuing import Numbers, Run, Saver, fit
from tests.integration.training import make_strategy, stock_group
from tests.ranks import by_hand_env, run_ranks


def unshuffled() -> DataLoader[torch.Tensor]:
    return DataLoader(Numbers(14), batch_size=2)


def train_with_stock(rank: int, world_size: int, directory: Path) -> Run:
    saver = Saver("train_batch_end", directory)
    with stock_group(rank, world_size, directory):
        strategy = make_strategy("stock", directory)
        return fit(strategy, unshuffled, saver=saver, dropout=False, limit_val_batches=0, overfit_batches=4)


def go_on_with_ours(rank: int, world_size: int, directory: Path, path: str) -> Run:
    strategy = make_strategy("ours", directory)
    return fit(strategy, unshuffled, ckpt_path=path, dropout=False, limit_val_batches=0, overfit_batches=4)


def test_a_checkpoint_of_stock_lightning_begins_its_epoch_again(tmp_path: Path) -> None:
    """It does not say which data are done, so all of the epoch is trained on."""
    (tmp_path / "stock").mkdir()
    (tmp_path / "ours").mkdir()
    stopped = run_ranks(train_with_stock, 2, tmp_path / "stock", env=by_hand_env(2))
    path, _ = stopped[0].saved[1]
    resumed = run_ranks(go_on_with_ours, 2, tmp_path / "ours", path, env=by_hand_env(2))
    for before, after in zip(stopped, resumed, strict=True):
        assert after.steps == before.steps
