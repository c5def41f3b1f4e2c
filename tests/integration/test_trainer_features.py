"""What people do with a Trainer, its callbacks, loggers and data modules works with
`DDPExtStrategy` as with `ddp`.
"""

import os
import shutil
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

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


class Result(NamedTuple):
    """What a feature leads to on a rank."""

    numbers: Any  # compared to the last bit, including types and shapes
    facts: Any = None


def trainer_in(kind: training.Kind, directory: Path, **options: Any) -> L.Trainer:
    """Return a Trainer that writes to the directory; ranks connect in its parent."""
    L.seed_everything(7)
    return training.make_trainer(
        training.make_strategy(kind, directory.parent), default_root_dir=directory, **options
    )


def fit(
    kind: training.Kind, directory: Path, model: Net | None = None, **options: Any
) -> dict[str, Any]:
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


ACCUMULATION = callbacks.GradientAccumulationScheduler({0: 1, 1: 2})
OPTIONS: dict[str, dict[str, Any]] = {
    "fast_dev_run": {"fast_dev_run": 2},
    "detect_anomaly": {"detect_anomaly": True},
    "max_time": {"max_time": timedelta(microseconds=1), "max_epochs": -1},
    "accumulation": {"callbacks": [ACCUMULATION], "max_epochs": 3},
    "stochastic average": {
        "callbacks": [callbacks.StochasticWeightAveraging(0.01, 1)],
        "max_epochs": 3,
    },
    "moving average": {"callbacks": [callbacks.EMAWeightAveraging(decay=0.5)]},
}


def use_options(kind: training.Kind, directory: Path) -> dict[str, Any]:
    return {name: fit(kind, directory / name, **options) for name, options in OPTIONS.items()}


def test_options_of_the_trainer_do_what_they_do_with_stock(tmp_path: Path) -> None:
    """Weights and the numbers of steps and epochs are equal on each rank, to the last bit."""
    ours, stock = training.on_both(use_options, tmp_path)
    training.assert_same(ours, stock)


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
    trainer = trainer_in(kind, directory, callbacks=[writer])
    predictions = trainer.predict(Net(), return_predictions=True)
    return Result({"returned": predictions, "written": writer.written})


def loggers(kind: training.Kind, directory: Path) -> Result:
    board = TensorBoardLogger(directory, name="board", version=0, log_graph=False)
    table = CSVLogger(directory, name="csv", version=0)
    monitor = callbacks.LearningRateMonitor()
    options = {"logger": [table, board], "log_every_n_steps": 1, "callbacks": [monitor]}
    trained = fit(kind, directory, **options)
    written = (directory / "csv" / "version_0" / "metrics.csv").read_text()
    events = list((directory / "board" / "version_0").glob("events.out.tfevents.*"))
    return Result(trained, {"csv": written, "event files": len(events)})


class Profiled(Net):
    """Profiles a part of its step, as users do."""

    def training_step(self, batch: training.Batch, index: int) -> Any:
        with self.trainer.profiler.profile("a part"):
            return super().training_step(batch, index)


def profiler(kind: training.Kind, directory: Path) -> Result:
    times = SimpleProfiler()
    trained = fit(kind, directory, Profiled(), profiler=times)
    return Result(trained, {"calls": len(times.recorded_durations["a part"])})


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
    facts = {
        "epochs": trainer.current_epoch,
        "stopped at": stopping.stopped_epoch,
        "best": Path(checkpoint.best_model_path).name,
        "kept": sorted(Path(path).name for path in checkpoint.best_k_models),
        "hooks": [*module.calls],
        "files": sorted(path.name for path in directory.iterdir()),
    }
    tested = trainer.test(model, ckpt_path="best", verbose=False)
    return Result({"score": checkpoint.best_model_score, "tested": tested}, facts)


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
    trained = fit(kind, directory, model)
    assert trained["step"] == model.estimated
    return Result({**trained, "batches": model.batches})


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
    return Result(
        {
            "validated": trainer.validate(Net(), Collating(), verbose=False),
            "tested": trainer.test(Net(), Collating(), verbose=False),
            "predicted": trainer.predict(Net(), Collating()),
        }
    )


FEATURES: list[Callable[[training.Kind, Path], Result]] = [
    prediction_writer,
    loggers,
    profiler,
    checkpoints_and_early_stopping,
    steps_in_configure_callbacks,
    bound_collate_function,
]


def use_features(kind: training.Kind, directory: Path) -> dict[str, Result]:
    results = {}
    for feature in FEATURES:
        own = directory / feature.__name__
        own.mkdir(exist_ok=True)  # the other rank may have made it
        results[feature.__name__] = feature(kind, own)
        torch.distributed.barrier()
    return results


def test_features_do_what_they_do_with_stock(tmp_path: Path) -> None:
    """Weights, metrics, files and the numbers of calls are equal on each rank, to the
    last bit.
    """
    ours, stock = training.on_both(use_features, tmp_path)
    for mine, theirs in zip(ours, stock, strict=True):
        for feature, result in mine.items():
            training.assert_same(result.numbers, theirs[feature].numbers)
            assert result.facts == theirs[feature].facts
    first, second = (results["checkpoints_and_early_stopping"].facts for results in ours)
    assert first["files"] == ["epoch=0.ckpt", "epoch=1.ckpt", "last.ckpt"]
    assert (first["best"], first["epochs"]) == ("epoch=1.ckpt", 4)
    assert first["hooks"] == ["prepare_data", "setup", "teardown"]
    assert second["hooks"] == ["setup", "teardown"]


class Compiled(Net):
    def configure_model(self) -> None:
        self.layers = torch.compile(nn.Linear(4, 1))  # each further kernel takes seconds


def compiled(kind: training.Kind, directory: Path) -> dict[str, Any]:
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
