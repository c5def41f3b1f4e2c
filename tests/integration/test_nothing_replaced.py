"""What training leaves of itself in a Trainer and in the objects of its user: nothing."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from lightning_ddp_ext import RankConsistency, RankZeroCheckpoint, SamplerEpochSeeding, SyncBatchNormConversion
from tests.harness.training import (
    Kind,
    Net,
    assert_same,
    data,
    make_strategy,
    make_trainer,
    on_both,
    on_ranks,
)
from tests.harness.training import weights as weights_of
from tests.integration.replaced import of_data, replaced, shadowed

AT_MOST = 4


class Looks(L.Callback):
    """Looks for what is replaced at each point at which a user's code runs."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}

    def look(self, trainer: L.Trainer, point: str) -> None:
        self.found[point] = replaced(trainer, trainer.lightning_module)

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.look(trainer, "train_start")

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.look(trainer, "train_batch_start")

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.look(trainer, "train_batch_end")

    def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.look(trainer, "validation_start")

    def on_validation_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.look(trainer, "validation_batch_end")

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.look(trainer, "train_epoch_end")

    def on_test_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.look(trainer, "test_batch_end")

    def on_predict_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.look(trainer, "predict_batch_end")


class TwoLoaders(Net):
    """Reads two loaders at once, one of them with a worker that stays."""

    def training_step(self, batch: Any, index: int) -> Any:
        return super().training_step(batch[0], index)

    def train_dataloader(self) -> Any:
        kept = {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}
        return CombinedLoader([DataLoader(data(), 3, shuffle=True, **kept), DataLoader(data(), 3)], "min_size")  # type: ignore[arg-type]


def look(kind: Kind, directory: Path, model: type[Net], with_callbacks: bool) -> dict[str, list[str]]:
    """What is replaced before, while and after a Trainer does all that it can do."""
    warnings.simplefilter("ignore")
    looks = Looks()
    more: list[L.Callback] = []
    if with_callbacks:
        more = [SyncBatchNormConversion(), SamplerEpochSeeding(), RankConsistency(), RankZeroCheckpoint(directory)]
    options = {"callbacks": [looks, *more], "enable_checkpointing": with_callbacks, "val_check_interval": 2}
    trainer, net = make_trainer(make_strategy(kind, directory), **options), model()
    found = {"before": replaced(trainer, net)}
    for run in ("fit", "validate", "test", "predict"):
        getattr(trainer, run)(net, **({"return_predictions": False} if run == "predict" else {}))
        found[f"after {run}"] = replaced(trainer, net)
    return {**found, **looks.found}


MODELS = {"one loader": Net, "two loaders": TwoLoaders}


@pytest.fixture(scope="module", params=[*MODELS, "callbacks"])
def ours(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    """By rank, what our strategy replaces."""
    model, with_callbacks = MODELS.get(request.param, Net), request.param == "callbacks"
    return on_ranks("ours", look, tmp_path_factory.mktemp("ours"), model, with_callbacks, time_limit=60)


def test_nothing_is_replaced_after_a_run(ours: list[dict[str, list[str]]]) -> None:
    """No object of Lightning's has a method or a class that is not its own, before and after each call."""
    points = ["before", *(f"after {run}" for run in ("fit", "validate", "test", "predict"))]
    for found in ours:
        assert {point: found[point] for point in points} == {point: [] for point in points}


def test_hardly_anything_is_replaced_in_a_run(ours: list[dict[str, list[str]]]) -> None:
    """At most four methods are, however many objects have them, at each point at which a user's code runs."""
    for found in ours:
        assert {point: names for point, names in found.items() if len(set(names)) > AT_MOST} == {}


def test_data_flow_through_methods_as_they_are_written(ours: list[dict[str, list[str]]]) -> None:
    """No loader, fetcher or result has a replaced method or class."""
    for found in ours:
        assert {point: names for point, names in found.items() if of_data(names)} == {}


def test_stock_replaces_nothing(tmp_path: Path) -> None:
    """So whatever is found with our strategy is its own doing."""
    for found in on_ranks("stock", look, tmp_path, Net, False, time_limit=60):
        assert {point: names for point, names in found.items() if names} == {}


def test_what_is_replaced_is_found() -> None:
    """A method that stands before one of the class, and a class that was made for one object."""
    loader: Any = DataLoader(data(), 3)
    assert replaced([loader]) == []
    loader.__iter__ = loader.__len__
    assert shadowed(loader) == ["__iter__"]
    assert replaced({"a": [loader]}) == ["DataLoader.__iter__"]
    other: Any = DataLoader(data(), 3)
    other.__class__ = type("Other", (DataLoader,), {"__module__": "lightning_ddp_ext.data"})
    assert replaced(other) == ["class of Other"]
    assert of_data(replaced(loader, other)) == ["DataLoader.__iter__"]


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda each: pickle.loads(pickle.dumps(each))}


def copy_fitted(kind: Kind, directory: Path) -> dict[str, Any]:
    """What copies of a fitted Trainer and of its parts are, and do."""
    warnings.simplefilter("ignore")
    trainer = make_trainer(make_strategy(kind, directory))
    trainer.fit(Net())
    parts = {
        "trainer": trainer,
        "strategy": trainer.strategy,
        "fit loop": trainer.fit_loop,
        "model": trainer.lightning_module,
        "loader": trainer.train_dataloader,
    }
    found: dict[str, Any] = {}
    for how, copied in COPIES.items():
        for name, part in parts.items():
            try:
                copied(part)
            except Exception as error:
                found[f"{how} of {name}"] = repr(error)
        other = found.get(f"{how} of trainer") or copied(trainer)
        if isinstance(other, L.Trainer):
            found[f"{how} goes on"] = go_on(other)
    return found


def go_on(trainer: L.Trainer) -> Any:
    """A copy of a Trainer tests its model, and trains it for another epoch."""
    model: Any = trainer.lightning_module
    values = trainer.test(model, verbose=False)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(model)
    return values, trainer.current_epoch, trainer.global_step, weights_of(model)


def test_a_fitted_trainer_is_copied_and_pickled_as_with_stock(tmp_path: Path) -> None:
    """It, its strategy, its loops, its model and its loader; and a copy tests and trains as the stock one's does."""
    for mine, expected in zip(*on_both(copy_fitted, tmp_path, time_limit=60), strict=True):
        assert mine.keys() == expected.keys(), {name: mine[name] for name in mine.keys() - expected.keys()}
        assert_same(mine, expected)
