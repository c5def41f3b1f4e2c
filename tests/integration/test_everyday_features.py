"""Features of the Trainer that people switch on every day give with `DDPExtStrategy` what they give with `ddp`."""

from __future__ import annotations

import csv
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, GradientAccumulationScheduler
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import PyTorchProfiler, SimpleProfiler
from torch import Tensor
from torch.utils.data import DataLoader

from tests.harness.training import (
    KINDS,
    Kind,
    Net,
    assert_same,
    data,
    make_strategy,
    make_trainer,
    on_both,
    on_ranks,
    weights,
)

Result = dict[str, Any]


def fit(kind: Kind, directory: Path, model: Net | None = None, **options: Any) -> Result:
    """Train with these options of the Trainer, and return where that has led."""
    L.seed_everything(7)
    model = Net() if model is None else model
    trainer = make_trainer(make_strategy(kind, directory.parent), default_root_dir=directory, **options)
    trainer.fit(model)
    return {"weights": weights(model), "step": trainer.global_step, "epoch": trainer.current_epoch}


def fast_dev_run(kind: Kind, directory: Path) -> Result:
    return fit(kind, directory, fast_dev_run=2)


def detect_anomaly(kind: Kind, directory: Path) -> Result:
    return fit(kind, directory, detect_anomaly=True)


def max_time(kind: Kind, directory: Path) -> Result:
    return fit(kind, directory, max_time=timedelta(microseconds=1), max_epochs=-1)


def accumulation_by_epoch(kind: Kind, directory: Path) -> Result:
    return fit(kind, directory, callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})], max_epochs=3)


class Pinned(Net):
    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(data(), batch_size=3, shuffle=True, pin_memory=True, num_workers=1, persistent_workers=True)


def pinned_memory(kind: Kind, directory: Path) -> Result:
    return fit(kind, directory, Pinned())


class Writer(BasePredictionWriter):
    """Keeps what it would write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[tuple[Tensor, list[int]]] = []
        self.epoch: Any = None

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, batch: Any, index: int, loader: int
    ) -> None:
        self.batches.append((prediction, list(indices)))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.epoch = (predictions, indices)


def prediction_writer(kind: Kind, directory: Path) -> Result:
    L.seed_everything(7)
    writer = Writer()
    trainer = make_trainer(make_strategy(kind, directory.parent), callbacks=[writer])
    predictions = trainer.predict(Net(), return_predictions=True)
    return {"returned": predictions, "batches": writer.batches, "epoch": writer.epoch}


def loggers(kind: Kind, directory: Path) -> Result:
    chosen = [
        CSVLogger(directory, name="csv", version=0),
        TensorBoardLogger(directory, name="board", version=0, log_graph=False),
    ]
    result = fit(kind, directory, logger=chosen, log_every_n_steps=1)
    torch.distributed.barrier()  # rank 0 has written its files
    events = list((directory / "board" / "version_0").glob("events.out.tfevents.*"))
    with (directory / "csv" / "version_0" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {
        **result,
        "csv": [{name: float(value or "nan") for name, value in row.items()} for row in rows],
        "event files": len(events),
    }


def simple_profiler(kind: Kind, directory: Path) -> Result:
    profiler = SimpleProfiler(dirpath=directory, filename="simple")
    return {**fit(kind, directory, profiler=profiler), "profiled": _steps(profiler.recorded_durations)}


def pytorch_profiler(kind: Kind, directory: Path) -> Result:
    profiler = PyTorchProfiler(dirpath=directory, filename="torch", emit_nvtx=False)
    result = fit(kind, directory, profiler=profiler, max_epochs=1)
    return {**result, "files": len(list(directory.glob("fit-torch*")))}


def _steps(durations: dict[str, list[float]]) -> dict[str, int]:
    """How often each action of the loops and the strategy was recorded, whatever the strategy's class is called."""
    return {
        name.split(".")[-1]: len(times)
        for name, times in durations.items()
        if name.startswith(("[Strategy]", "[_TrainingEpochLoop]")) or name == "run_training_batch"
    }


FEATURES: dict[str, Callable[[Kind, Path], Result]] = {
    function.__name__: function
    for function in (
        fast_dev_run,
        detect_anomaly,
        max_time,
        accumulation_by_epoch,
        pinned_memory,
        prediction_writer,
        loggers,
        simple_profiler,
        pytorch_profiler,
    )
}


def use_all(kind: Kind, directory: Path) -> dict[str, Result]:
    results = {}
    for name, feature in FEATURES.items():
        (directory / name).mkdir(exist_ok=True)  # the other rank may have made it
        results[name] = feature(kind, directory / name)
        torch.distributed.barrier()
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Result]], list[dict[str, Result]]]:
    return on_both(use_all, tmp_path_factory.mktemp("features"), time_limit=90)


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_does_what_it_does_with_stock(
    name: str, results: tuple[list[dict[str, Result]], list[dict[str, Result]]]
) -> None:
    ours, stock = ([by_name[name] for by_name in by_rank] for by_rank in results)
    assert_same(ours, stock)


class Compiled(Net):
    def configure_model(self) -> None:
        self.layers = torch.compile(self.layers)


def compiled(kind: Kind, directory: Path) -> Result:
    return fit(kind, directory, Compiled(), max_epochs=1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_compiled_network_learns_what_it_learns_with_stock(tmp_path: Path) -> None:
    """With torch's own compiler, inductor."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    ours, stock = (on_ranks(kind, compiled, tmp_path, time_limit=140, env=env) for kind in KINDS)
    assert_same(ours, stock)
