"""Data modules, the best checkpoint, spawned workers and compiled networks work with
`DDPExtStrategy` as with `ddp`. What else a Trainer offers is in ``test_stock_sweep``.
"""

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from torch import nn
from torch.utils.data import DataLoader

from tests.harness import training
from tests.harness.environment import skip_because
from tests.harness.training import Net


class Module(L.LightningDataModule):
    """Has its own data, and records the called hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append("setup")

    def teardown(self, stage: str) -> None:
        self.calls.append("teardown")

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(training.data(16), batch_size=2, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(training.data(8), batch_size=2)


class GettingWorse(Net):
    """Its validation loss falls for two epochs, then rises."""

    def validation_step(self, batch: training.Batch, index: int) -> None:
        self.log("val_loss", abs(self.current_epoch - 1.0), sync_dist=True)


def stop_early_and_test_the_best(kind: training.Kind, directory: Path) -> dict[str, Any]:
    L.seed_everything(7)
    checkpoint = callbacks.ModelCheckpoint(
        directory / "files", "{epoch}", monitor="val_loss", save_top_k=2, save_last=True
    )
    stopping = callbacks.EarlyStopping("val_loss", patience=2)
    trainer = training.make_trainer(
        training.make_strategy(kind, directory),
        callbacks=[checkpoint, stopping, callbacks.GradientAccumulationScheduler({0: 1, 1: 2})],
        enable_checkpointing=True,
        max_epochs=9,
    )
    module = Module()
    model = GettingWorse()
    trainer.fit(model, datamodule=module)
    trainer.strategy.barrier()  # rank 0 has written its files
    return {
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "stopped at": stopping.stopped_epoch,
        "best": Path(checkpoint.best_model_path).name,
        "kept": sorted(Path(path).name for path in checkpoint.best_k_models),
        "hooks": [*module.calls],
        "files": sorted(path.name for path in (directory / "files").iterdir()),
        "score": float(checkpoint.best_model_score),
        "tested": trainer.test(model, ckpt_path="best", verbose=False),
    }


def test_a_run_with_a_data_module_stops_early_and_tests_its_best_checkpoint(
    tmp_path: Path,
) -> None:
    """Hooks, files, epochs and metrics are stock's on each rank."""
    ours, stock = training.on_both(stop_early_and_test_the_best, tmp_path)
    assert ours == stock
    first, second = ours
    assert first["files"] == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    assert (first["best"], first["epochs"]) == ("epoch=1.ckpt", 4)
    assert first["steps"] == 4 + 3 * 2, "two batches a step after the first epoch"
    assert first["hooks"] == ["prepare_data", "setup", "teardown"]
    assert second["hooks"] == ["setup", "teardown"]


class Collating(Module):
    """Its spawned worker gets a bound method, and with it this data module and its
    Trainer.
    """

    def val_dataloader(self) -> DataLoader[Any]:
        workers: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn"}
        return DataLoader(training.data(8), batch_size=4, collate_fn=self.collate, **workers)

    test_dataloader = predict_dataloader = val_dataloader

    def collate(self, samples: list[Any]) -> training.Batch:
        x, y = zip(*samples, strict=True)
        return [2 * torch.stack(x), torch.stack(y)]


def use_spawned_workers(kind: training.Kind, directory: Path) -> list[Any]:
    L.seed_everything(7)
    trainer = training.make_trainer(training.make_strategy(kind, directory))
    return [
        trainer.validate(Net(), Collating(), verbose=False),
        trainer.test(Net(), Collating(), verbose=False),
        trainer.predict(Net(), Collating()),
    ]


def test_a_spawned_worker_may_get_a_method_of_a_data_module(tmp_path: Path) -> None:
    """Each evaluation has stock's results, to the last bit."""
    ours, stock = training.on_both(use_spawned_workers, tmp_path)
    training.assert_same(ours, stock)


class Compiled(Net):
    def configure_model(self) -> None:
        self.layers = torch.compile(nn.Linear(4, 1))  # each further kernel takes seconds


def train_compiled(kind: training.Kind, directory: Path) -> dict[str, Any]:
    L.seed_everything(7)
    model = Compiled()
    training.fit(kind, directory, model, max_epochs=1, limit_val_batches=0)
    return training.weights(model)


@pytest.mark.nightly
def test_a_compiled_network_learns_what_it_learns_with_stock(tmp_path: Path) -> None:
    """This holds for torch's own compiler, inductor."""
    skip_because(
        None if shutil.which(os.environ.get("CXX", "g++")) else "inductor needs a C++ compiler"
    )
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    ours, stock = (
        training.on_ranks(kind, train_compiled, tmp_path, env=env) for kind in training.KINDS
    )
    training.assert_same(ours, stock)


class CopyingTrainer(L.Callback):
    """Copies the Trainer in each batch, as some loggers and callbacks do."""

    def __init__(self) -> None:
        self.copies: list[L.Trainer] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.copies.append(copy.deepcopy(trainer))


def copy_a_running_trainer(kind: training.Kind, directory: Path) -> list[tuple[type, int]]:
    """Return the class of each copy's loader, and the number of batches that it reads."""
    copying = CopyingTrainer()
    training.fit(kind, directory, Net(), copying, max_epochs=1)
    return [
        (type(each.train_dataloader), len(list(each.train_dataloader))) for each in copying.copies
    ]


def test_a_running_trainer_can_be_copied(tmp_path: Path) -> None:
    """Its copies have the user's loaders, without the place in them."""
    ours, stock = training.on_both(copy_a_running_trainer, tmp_path)
    assert ours == stock
    assert ours[0]
