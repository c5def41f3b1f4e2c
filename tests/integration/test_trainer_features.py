"""Data modules, the best checkpoint, spawned workers and compiled networks work with
`DDPExtStrategy` as with `ddp`. What else a Trainer offers is in ``test_stock_sweep``.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from tests.harness import training
from tests.harness.environment import skip_because


class Module(L.LightningDataModule):
    """Has its own data, and records the called hooks.

    A spawned worker gets a bound method, and with it this data module and its Trainer.
    """

    def __init__(self, context: str) -> None:
        super().__init__()
        self.context = context
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

    def test_dataloader(self) -> DataLoader[Any]:
        workers: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": self.context}
        return DataLoader(training.data(8), batch_size=4, collate_fn=self.collate, **workers)

    def collate(self, samples: list[Any]) -> training.Batch:
        x, y = zip(*samples, strict=True)
        return [2 * torch.stack(x), torch.stack(y)]


def fit_and_test_the_best(kind: training.Kind, directory: Path, context: str) -> dict[str, Any]:
    L.seed_everything(7)
    checkpoint = ModelCheckpoint(directory / "files", "{epoch}", monitor="val_loss")
    module = Module(context)
    model = training.Net()
    trainer = training.make_trainer(
        training.make_strategy(kind, directory), callbacks=[checkpoint], enable_checkpointing=True
    )
    trainer.fit(model, datamodule=module)
    return {
        "hooks": [*module.calls],
        "best": Path(checkpoint.best_model_path).name,
        "tested": trainer.test(model, module, ckpt_path="best", verbose=False),
    }


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.nightly)])
def test_a_data_module_is_trained_on_and_the_best_checkpoint_tested(
    context: str, tmp_path: Path
) -> None:
    """Hooks, files and metrics are stock's on each rank, also with spawned workers."""
    ours, stock = training.on_both(fit_and_test_the_best, tmp_path, context)
    assert ours == stock
    assert ours[0]["hooks"] == ["prepare_data", "setup", "teardown"]
    assert ours[1]["hooks"] == ["setup", "teardown"]


class Compiled(training.Net):
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
