"""What people do with a Trainer, its callbacks, loggers and data modules works with
`DDPExtStrategy` as with `ddp`.
"""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import SimpleProfiler
from torch import nn
from torch.utils.data import DataLoader

from tests.harness import training
from tests.harness.environment import skip_because
from tests.harness.training import Net

Result = dict[str, Any]


def trainer_in(kind: training.Kind, directory: Path, **options: Any) -> L.Trainer:
    """Return a Trainer that writes to the directory; ranks connect in its parent."""
    L.seed_everything(7)
    return training.make_trainer(
        training.make_strategy(kind, directory.parent), default_root_dir=directory, **options
    )


def fit(kind: training.Kind, directory: Path, model: Net | None = None, **options: Any) -> Result:
    """Train with these options of the Trainer, and return where that has led."""
    trainer = trainer_in(kind, directory, **options)
    model = Net() if model is None else model
    trainer.fit(model)
    torch.distributed.barrier()  # rank 0 has written its files
    return {
        "weights": training.weights(model),
        "step": trainer.global_step,
        "epoch": trainer.current_epoch,
    }


# Options of the Trainer, made in the rank.
OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "fast_dev_run": lambda: {"fast_dev_run": 2},
    "detect_anomaly": lambda: {"detect_anomaly": True},
    "max_time": lambda: {"max_time": timedelta(microseconds=1), "max_epochs": -1},
    "accumulation": lambda: {
        "callbacks": [callbacks.GradientAccumulationScheduler({0: 1, 1: 2})],
        "max_epochs": 3,
    },
    "stochastic average": lambda: {
        "callbacks": [callbacks.StochasticWeightAveraging(0.01, 1)],
        "max_epochs": 3,
    },
    "moving average": lambda: {"callbacks": [callbacks.EMAWeightAveraging(decay=0.5)]},
}


class Writer(callbacks.BasePredictionWriter):
    """Keeps what it would write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.written: list[Any] = []

    def write_on_batch_end(
        self,
        trainer: Any,
        module: Any,
        prediction: Any,
        indices: Any,
        batch: Any,
        index: int,
        loader: int,
    ) -> None:
        self.written.append((prediction, list(indices)))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.written.append((predictions, indices))


def prediction_writer(kind: training.Kind, directory: Path) -> Result:
    writer = Writer()
    predictions = trainer_in(kind, directory, callbacks=[writer]).predict(
        Net(), return_predictions=True
    )
    return {"returned": predictions, "written": writer.written}


def loggers(kind: training.Kind, directory: Path) -> Result:
    board = TensorBoardLogger(directory, name="board", version=0, log_graph=False)
    chosen = [CSVLogger(directory, name="csv", version=0), board]
    result = fit(
        kind,
        directory,
        logger=chosen,
        log_every_n_steps=1,
        callbacks=[callbacks.LearningRateMonitor()],
    )
    with (directory / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = [
            {name: float(value or "nan") for name, value in row.items()}
            for row in csv.DictReader(file)
        ]
    events = list((directory / "board" / "version_0").glob("events.out.tfevents.*"))
    return {**result, "csv": rows, "event files": len(events)}


class Profiled(Net):
    """Profiles a part of its step, as users do."""

    def training_step(self, batch: training.Batch, index: int) -> Any:
        with self.trainer.profiler.profile("a part"):
            return super().training_step(batch, index)


def profiler(kind: training.Kind, directory: Path) -> Result:
    times = SimpleProfiler()
    result = fit(kind, directory, Profiled(), profiler=times)
    return {**result, "calls": len(times.recorded_durations["a part"])}


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


def checkpoints_and_early_stopping(kind: training.Kind, directory: Path) -> Result:
    checkpoint = callbacks.ModelCheckpoint(
        directory, "{epoch}", monitor="val_loss", save_top_k=2, save_last=True
    )
    stopping = callbacks.EarlyStopping("val_loss", patience=2)
    module = Module()
    trainer = trainer_in(
        kind, directory, callbacks=[checkpoint, stopping], enable_checkpointing=True, max_epochs=9
    )
    model = GettingWorse()
    trainer.fit(model, datamodule=module)
    trainer.strategy.barrier()  # rank 0 has written its files
    return {
        "epochs": trainer.current_epoch,
        "stopped at": stopping.stopped_epoch,
        "best": Path(checkpoint.best_model_path).name,
        "kept": sorted(Path(path).name for path in checkpoint.best_k_models),
        "score": checkpoint.best_model_score,
        "hooks": [*module.calls],
        "files": sorted(path.name for path in directory.iterdir()),
        "tested": trainer.test(model, ckpt_path="best", verbose=False),
    }


class Counting(Net):
    """Asks for the number of steps in the first hook, and records the batches that it
    is trained on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Any] = []

    def configure_callbacks(self) -> list[L.Callback]:
        self.estimated = self.trainer.estimated_stepping_batches
        return []

    def on_train_batch_start(self, batch: training.Batch, index: int) -> None:
        self.batches.append(batch)


def steps_in_configure_callbacks(kind: training.Kind, directory: Path) -> Result:
    model = Counting()
    result = fit(kind, directory, model)
    assert result["step"] == model.estimated
    return {**result, "batches": model.batches}


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


def bound_collate_function(kind: training.Kind, directory: Path) -> Result:
    trainer = trainer_in(kind, directory)
    return {
        "validated": trainer.validate(Net(), Collating(), verbose=False),
        "tested": trainer.test(Net(), Collating(), verbose=False),
        "predicted": trainer.predict(Net(), Collating()),
    }


FEATURES: dict[str, Callable[[training.Kind, Path], Result]] = {
    feature.__name__: feature
    for feature in (
        prediction_writer,
        loggers,
        profiler,
        checkpoints_and_early_stopping,
        steps_in_configure_callbacks,
        bound_collate_function,
    )
}


def use_all(kind: training.Kind, directory: Path) -> dict[str, Result]:
    results = {name: fit(kind, directory / name, **options()) for name, options in OPTIONS.items()}
    for name, feature in FEATURES.items():
        (directory / name).mkdir(exist_ok=True)  # the other rank may have made it
        results[name] = feature(kind, directory / name)
        torch.distributed.barrier()
    return results


def test_features_do_what_they_do_with_stock(tmp_path: Path) -> None:
    """Weights, metrics, files and the numbers of calls are equal on each rank, to the
    last bit.
    """
    ours, stock = training.on_both(use_all, tmp_path)
    for mine, theirs in zip(ours, stock, strict=True):
        for name in (*OPTIONS, *FEATURES):
            assert_same_result(mine[name], theirs[name])
    found = ours[0]["checkpoints_and_early_stopping"]
    assert found["files"] == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    assert (found["best"], found["epochs"]) == ("epoch=1.ckpt", 4)
    assert found["hooks"] == ["prepare_data", "setup", "teardown"]
    assert ours[1]["checkpoints_and_early_stopping"]["hooks"] == ["setup", "teardown"]


def assert_same_result(ours: Result, stock: Result) -> None:
    names = {
        key
        for key, value in ours.items()
        if isinstance(value, str) or key in ("kept", "hooks", "files")
    }
    assert {key: ours[key] for key in names} == {key: stock[key] for key in names}
    training.assert_same(
        {key: ours[key] for key in ours.keys() - names},
        {key: stock[key] for key in stock.keys() - names},
    )


class Compiled(Net):
    def configure_model(self) -> None:
        self.layers = torch.compile(nn.Linear(4, 1))  # each further kernel takes seconds


def compiled(kind: training.Kind, directory: Path) -> Result:
    return fit(kind, directory / "compiled", Compiled(), max_epochs=1, limit_val_batches=0)


@pytest.mark.nightly
def test_a_compiled_network_learns_what_it_learns_with_stock(tmp_path: Path) -> None:
    """This holds for torch's own compiler, inductor."""
    skip_because(
        None if shutil.which(os.environ.get("CXX", "g++")) else "inductor needs a C++ compiler"
    )
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    ours, stock = (training.on_ranks(kind, compiled, tmp_path, env=env) for kind in training.KINDS)
    training.assert_same(ours, stock)
