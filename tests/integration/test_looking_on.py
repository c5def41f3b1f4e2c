"""Batches that somebody else looks at, and what a rank is told of the batch that it has."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ddp_ext import ScalableDistributedSampler
from tests.harness.ranks import by_hand_env, run_ranks
from tests.harness.training import make_strategy, make_trainer
from tests.integration.continuing import Numbers, Saver, fit


class Looking(L.LightningModule):
    """Evaluates five samples one by one, and looks at a batch of its own before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.idle: list[tuple[bool, ...]] = []
        self.looked_at: list[float] = []

    def on_validation_batch_start(self, *_: Any) -> None:
        self.now = [self.trainer.strategy.is_idle]  # type: ignore[attr-defined]
        self.looked_at.append(float(next(iter(self.trainer.val_dataloaders))))  # type: ignore[arg-type]

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.now.append(self.trainer.strategy.is_idle)  # type: ignore[attr-defined]
        self.log("count", 1.0, reduce_fx="sum", sync_dist=True)

    def on_validation_batch_end(self, *_: Any) -> None:
        self.idle.append((*self.now, self.trainer.strategy.is_idle))  # type: ignore[attr-defined]

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        assert not self.trainer.strategy.is_idle  # type: ignore[attr-defined]
        loss: Tensor = self.layer(batch).sum()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def look(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    model = Looking()
    trainer = make_trainer(make_strategy("ours", directory), num_sanity_val_steps=0, max_epochs=1)
    trainer.fit(model, DataLoader(Numbers(4), 1), DataLoader(Numbers(5), 1))
    found = {"count": float(trainer.callback_metrics["count"]), "idle": model.idle, "looked at": model.looked_at}
    return {**found, "afterwards": float(next(iter(trainer.val_dataloaders)))}  # type: ignore[arg-type]


def test_who_looks_at_a_batch_of_an_evaluation_changes_nothing(tmp_path: Path) -> None:
    """Metrics count each sample once, hooks know whether their rank is idle, and a fitted Trainer has its loaders."""
    for rank, found in enumerate(run_ranks(look, 2, tmp_path, env=by_hand_env(2))):
        assert found["count"] == 5.0
        assert found["looked at"] == [float(rank)] * 3
        assert found["afterwards"] == float(rank)
        assert found["idle"] == [(False,) * 3, (False,) * 3, (rank == 1,) * 3]


def from_an_exception(rank: int, world_size: int, directory: Path, draws: bool) -> list[str]:
    def loaders() -> DataLoader[Any]:
        return DataLoader(Numbers(12), 2, shuffle=draws)

    options: dict[str, Any] = {"use_distributed_sampler": False, "limit_val_batches": 0}
    saver = Saver("exception", directory)
    stopped = fit(make_strategy("ours", directory), loaders, saver=saver, fail_at=(1, 3), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(make_strategy("ours", directory), loaders, ckpt_path=stopped.saved[0][0], **options)
    return [str(each.message) for each in caught if "resume_data" in str(each.message)]


def test_an_order_that_nobody_knows_any_more_is_said_to_be_so(tmp_path: Path) -> None:
    """A checkpoint of an exception has no random numbers; rank 0 warns where an order was drawn from them."""
    (tmp_path / "drawn").mkdir()
    (message,), others = run_ranks(from_an_exception, 2, tmp_path / "drawn", True, env=by_hand_env(2))
    assert "does not say where each rank was in BatchSampler over RandomSampler" in message
    assert others == []
    (tmp_path / "listed").mkdir()
    assert run_ranks(from_an_exception, 2, tmp_path / "listed", False, env=by_hand_env(2)) == [[], []]


class Planning(Looking):
    """Has Lightning make its training loader in the middle of the sanity check."""

    def on_validation_batch_start(self, *_: Any) -> None:
        self.now = [False]

    def on_validation_start(self) -> None:
        assert self.trainer.estimated_stepping_batches == 2


def plan(rank: int, world_size: int, directory: Path) -> int:
    trainer = make_trainer(make_strategy("ours", directory), num_sanity_val_steps=1, max_epochs=1)
    saver = Saves(directory / "middle.ckpt")
    trainer.callbacks.append(saver)
    trainer.fit(Planning(), DataLoader(Numbers(4), 1), DataLoader(Numbers(5), 1))
    again = make_trainer(make_strategy("ours", directory), num_sanity_val_steps=0, max_epochs=1)
    again.fit(Planning(), DataLoader(Numbers(4), 1), DataLoader(Numbers(5), 1), ckpt_path=str(saver.path))
    return again.global_step


class Saves(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, i: int
    ) -> None:
        if i == 0:
            trainer.save_checkpoint(self.path)


def test_loaders_of_training_that_are_made_in_a_sanity_check_can_be_resumed(tmp_path: Path) -> None:
    """They are loaders of training whatever the Trainer is doing when it makes them."""
    assert run_ranks(plan, 2, tmp_path, env=by_hand_env(2)) == [2, 2]


class Counting(L.LightningModule):
    """Counts what it validates, of the loader that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.validated: list[int] = []

    def on_validation_start(self) -> None:
        self.validated.append(0)

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.validated[-1] += len(batch)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss: Tensor = self.layer(batch).sum()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def share_a_sampler(rank: int, world_size: int, directory: Path) -> list[int]:
    options: dict[str, Any] = {"num_sanity_val_steps": 0, "max_epochs": 1, "val_check_interval": 3}
    path = directory / "middle.ckpt"
    for ckpt_path in (None, str(path)):
        loader = DataLoader(Numbers(24), 2, sampler=ScalableDistributedSampler(Numbers(24), seed=1))
        model = Counting()
        trainer = make_trainer(make_strategy("ours", directory), callbacks=[Saves(path)], **options)
        trainer.fit(model, loader, loader, ckpt_path=ckpt_path)
    return model.validated


def test_a_sampler_that_training_has_entered_in_the_middle_is_validated_whole(tmp_path: Path) -> None:
    """Validation reads all of it, in an epoch that is resumed after its first batch, too."""
    assert run_ranks(share_a_sampler, 2, tmp_path, env=by_hand_env(2)) == [[12, 12]] * 2
