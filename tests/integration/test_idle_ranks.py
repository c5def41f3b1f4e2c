"""Evaluations in which some ranks have fewer batches than others: none waits, and each sample counts once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import CatMetric
from torchmetrics.classification import BinaryAUROC

from tests.harness.ranks import by_hand_env, run_ranks
from tests.harness.training import make_strategy, make_trainer
from tests.integration.continuing import scores

Batch = dict[str, Tensor]
Values = dict[str, Any]


class Measured(L.LightningModule):
    """Measures in its steps and in a hook, and keeps which samples its steps have had."""

    def __init__(self) -> None:
        super().__init__()
        self.auroc, self.hooked = BinaryAUROC(), CatMetric()
        self.found: dict[str, list[float]] = {"stepped": []}

    def validation_step(self, batch: Batch, index: int) -> None:
        x, label = batch["x"], batch["label"]
        self.found["stepped"] += batch["index"].tolist()
        self.auroc.update(x, label)
        self.log("auroc", self.auroc)
        for reduction, value in {"mean": x.mean(), "sum": x.sum(), "min": x.min(), "max": x.max()}.items():
            self.log(reduction, value, reduce_fx=reduction, sync_dist=True)

    test_step = validation_step

    def on_validation_batch_end(self, outputs: Any, batch: Batch, index: int) -> None:
        self.hooked.update(batch["index"])

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self) -> None:
        self.found["hooked"] = sorted(torch.as_tensor(self.hooked.compute()).reshape(-1).tolist())
        self.hooked.reset()

    on_test_epoch_end = on_validation_epoch_end


def evaluate(rank: int, world_size: int, directory: Path, idle_ranks: str | None) -> list[Values]:
    """What evaluations of odd numbers of samples find, with one sample a batch."""
    options = {"idle_ranks": idle_ranks} if idle_ranks else {}
    found = []
    for samples in (3, 5, 9):
        for run in ("validate", "test"):
            strategy = make_strategy("ours", directory, **options) if world_size > 1 else "auto"
            model, loader = Measured(), DataLoader(scores(samples), 1)
            (values,) = getattr(make_trainer(strategy, devices=world_size), run)(model, loader, verbose=False)
            found.append({**values, **model.found})
    return found


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> list[Values]:
    """What one process finds."""
    (found,) = run_ranks(evaluate, 1, tmp_path_factory.mktemp("one"), None, env=by_hand_env(1), time_limit=40)
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("idle_ranks", [None, "skip"])
def test_an_odd_number_of_samples_is_measured_as_by_one_process(
    idle_ranks: str | None, one: list[Values], tmp_path: Path
) -> None:
    """An idle rank repeats a counted sample; with "skip" it makes no step, and what a hook counts is right, too."""
    ranks = run_ranks(evaluate, 2, tmp_path, idle_ranks, env=by_hand_env(2), time_limit=40)
    for rank, found in enumerate(ranks):
        for mine, alone in zip(found, one, strict=True):
            stepped, hooked = mine.pop("stepped"), mine.pop("hooked")
            expected = {name: value for name, value in alone.items() if name not in ("stepped", "hooked")}
            assert mine == pytest.approx(expected, abs=1e-6)
            assert sorted(set(hooked)) == alone["hooked"]
            assert len(hooked) == len(alone["hooked"]) + (idle_ranks is None)
            own = alone["stepped"][rank::2]
            assert stepped[: len(own)] == own
            assert len(stepped) == len(own) + (rank == 1 and idle_ranks is None)
