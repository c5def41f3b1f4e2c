"""`DDPExtStrategy` in place of `ddp`: callbacks, loggers, data modules, checkpoints and tuning work as there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.utils.data import DataLoader

from tests.harness.training import (
    Batch,
    Kind,
    Net,
    Recorder,
    assert_same,
    data,
    make_strategy,
    make_trainer,
    on_both,
    weights,
)


class Module(L.LightningDataModule):
    """Data of its own, and a note of which hooks were called."""

    def __init__(self, batch_size: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append("setup")

    def teardown(self, stage: str) -> None:
        self.calls.append("teardown")

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(data(16), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(data(8), batch_size=2)


class GettingWorse(Net):
    """Its validation loss falls for two epochs, then rises."""

    def validation_step(self, batch: Batch, index: int) -> None:
        self.log("val_loss", abs(self.current_epoch - 1.0), sync_dist=True)


def with_callbacks(kind: Kind, directory: Path) -> dict[str, Any]:
    L.seed_everything(1)
    checkpoint = ModelCheckpoint(directory / "best", "{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    stopping, rates = EarlyStopping("val_loss", patience=2), LearningRateMonitor()
    logger, module, model = CSVLogger(directory, name="logs", version=0), Module(), GettingWorse()
    trainer = make_trainer(
        make_strategy(kind, directory),
        callbacks=[checkpoint, stopping, rates],
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=True,
        max_epochs=9,
    )
    trainer.fit(model, datamodule=module)
    trainer.strategy.barrier()  # rank 0 has written its files
    return {
        "epochs": trainer.current_epoch,
        "stopped at": stopping.stopped_epoch,
        "best": Path(checkpoint.best_model_path).name,
        "kept": sorted(Path(path).name for path in checkpoint.best_k_models),
        "score": checkpoint.best_model_score,
        "rates": rates.lrs,
        "hooks": module.calls,
        "files": sorted(path.name for path in (directory / "best").iterdir()),
        "log": (directory / "logs" / "version_0" / "metrics.csv").read_text(),
    }


def test_callbacks_loggers_and_data_modules_do_what_they_do_with_stock(tmp_path: Path) -> None:
    """Which checkpoints are kept, when training stops, what is logged and which hooks run is as with stock."""
    ours, stock = on_both(with_callbacks, tmp_path)
    assert ours == stock
    assert ours[0]["files"] == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    assert ours[0]["best"] == "epoch=1.ckpt"
    assert [result["epochs"] for result in ours] == [4, 4]
    assert ours[0]["hooks"] == ["prepare_data", "setup", "teardown"]
    assert ours[1]["hooks"] == ["setup", "teardown"], "data is prepared once a host"


def averaged(kind: Kind, directory: Path, callback: str) -> dict[str, Tensor]:
    from lightning.pytorch import callbacks

    L.seed_everything(1)
    made = callbacks.EMAWeightAveraging() if callback == "EMA" else callbacks.StochasticWeightAveraging(0.01, 1)
    model = Net()
    make_trainer(make_strategy(kind, directory), callbacks=[made], max_epochs=3).fit(model)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("callback", ["EMA", "SWA"])
def test_averaged_weights_are_those_of_stock(callback: str, tmp_path: Path) -> None:
    """Callbacks that keep a second model give the same one on every rank, the one of stock."""
    ours, stock = on_both(averaged, tmp_path, callback)
    assert_same(ours, stock)
    assert_same(ours[0], ours[1])


def resumed(kind: Kind, directory: Path) -> dict[str, Any]:
    """An epoch, a checkpoint in mid-epoch and two of ModelCheckpoint; then the rest, from each of them."""
    L.seed_everything(1)
    checkpoint = ModelCheckpoint(directory, "{epoch}", monitor="val_loss", save_last=True)
    trainer = make_trainer(make_strategy(kind, directory), callbacks=[checkpoint], enable_checkpointing=True)
    trainer.fit(Net())
    by_hand = directory / "by-hand.ckpt"
    trainer.save_checkpoint(by_hand)
    found: dict[str, Any] = {}
    for path in ("last", "best", str(by_hand)):
        model, recorder = Net(), Recorder()
        callbacks = [recorder, ModelCheckpoint(directory, monitor="val_loss")]
        callbacks[1].best_model_path = checkpoint.best_model_path
        again = make_trainer(
            make_strategy(kind, directory), callbacks=callbacks, enable_checkpointing=True, max_epochs=4
        )
        again.fit(model, ckpt_path=path)
        found[Path(path).name] = {"weights": weights(model), "metrics": recorder.metrics, "step": again.global_step}
        found[f"test from {Path(path).name}"] = again.test(model, ckpt_path=path, verbose=False)
    content = torch.load(by_hand, weights_only=True)
    return {**found, "file": {name: content[name] for name in ("state_dict", "epoch", "global_step")}}


def test_resuming_goes_on_as_with_stock(tmp_path: Path) -> None:
    """`ckpt_path` takes "last", "best" and a file of `trainer.save_checkpoint`; what follows is stock's, bit by bit."""
    ours, stock = on_both(resumed, tmp_path)
    assert_same(ours, stock)
    assert [result["last"]["step"] for result in ours] == [16, 16]


class Tunable(Net):
    """Has a learning rate that can be set."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def tuned(kind: Kind, directory: Path) -> dict[str, Any]:
    L.seed_everything(1)
    model, module = Tunable(), Module()
    trainer = make_trainer(make_strategy(kind, directory), default_root_dir=directory)
    before = weights(model)
    finder = Tuner(trainer).lr_find(model, datamodule=module, num_training=8, early_stop_threshold=None)
    assert finder is not None
    put_back = weights(model)
    trainer.fit(model, datamodule=module)
    return {"found": finder.results, "lr": model.lr, "before": before, "put back": put_back, "after": weights(model)}


def test_a_learning_rate_is_found_as_with_stock(tmp_path: Path) -> None:
    """`lr_find` ends as it should on all ranks, puts the weights back, and leaves a Trainer that trains."""
    ours, stock = on_both(tuned, tmp_path)
    assert_same(ours, stock)
    assert_same(ours[0]["put back"], ours[0]["before"])
    assert len(ours[0]["found"]["loss"]) == 8


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_scaling_the_batch_size_is_refused_as_with_stock(kind: Kind, tmp_path: Path) -> None:
    """Lightning does not scale batches of distributed strategies, and knows that ours is one."""
    trainer = make_trainer(make_strategy(kind, tmp_path))
    with pytest.raises(ValueError, match="not supported with distributed strategies"):
        Tuner(trainer).scale_batch_size(Net(), datamodule=Module())
