"""Evaluations in which some ranks have fewer batches than others: nobody waits, and each sample counts once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import CatMetric, MeanMetric
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
        self.mean, self.auroc, self.seen, self.hooked = MeanMetric(), BinaryAUROC(), CatMetric(), CatMetric()
        self.stepped: list[int] = []
        self.found: dict[str, list[float]] = {}

    def validation_step(self, batch: Batch, index: int) -> None:
        x, label = batch["x"], batch["label"]
        self.stepped += batch["index"].tolist()
        self.seen.update(batch["index"])
        self.mean.update(x)
        self.auroc.update(x, label)
        self.log("mean_metric", self.mean)
        self.log("auroc", self.auroc)
        for reduction, value in {"mean": x.mean(), "sum": x.sum(), "min": x.min(), "max": x.max()}.items():
            self.log(reduction, value, reduce_fx=reduction, sync_dist=True)
        self.log("count", len(x), reduce_fx="sum", sync_dist=True)

    test_step = validation_step

    def on_validation_batch_end(self, outputs: Any, batch: Batch, index: int) -> None:
        self.hooked.update(batch["index"])

    on_test_batch_end = on_validation_batch_end

    def on_validation_epoch_end(self) -> None:
        for name in ("seen", "hooked"):
            metric: Any = getattr(self, name)
            self.found[name] = sorted(torch.as_tensor(metric.compute()).reshape(-1).tolist())
            metric.reset()

    on_test_epoch_end = on_validation_epoch_end


def loader(samples: int, batch_size: int = 1, **options: Any) -> DataLoader[Any]:
    return DataLoader(scores(samples), batch_size, **options)


def evaluate(
    world_size: int,
    directory: Path,
    loaders: Any,
    model: Measured,
    run: str = "validate",
    *,
    shared_out: bool = True,
    **options: Any,
) -> Values:
    strategy = make_strategy("ours", directory, **options) if world_size > 1 else "auto"
    trainer = make_trainer(strategy, devices=world_size, use_distributed_sampler=shared_out)
    (values,) = getattr(trainer, run)(model, loaders, verbose=False)
    return {**values, **model.found, "stepped": model.stepped}


def assert_same_values(mine: Values, one: Values) -> None:
    assert mine["seen"] == one["seen"]
    others = {"seen", "hooked", "stepped"}
    expected = {name: value for name, value in one.items() if name not in others}
    assert {name: value for name, value in mine.items() if name not in others} == pytest.approx(expected, abs=1e-6)


def odd(rank: int, world_size: int, directory: Path, samples: list[int], idle_ranks: str | None) -> list[Values]:
    options = {"idle_ranks": idle_ranks} if idle_ranks and world_size > 1 else {}
    return [
        evaluate(world_size, directory, loader(number), Measured(), run, **options)
        for number in samples
        for run in ("validate", "test")
    ]


ODD = [3, 5, 9]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> list[Values]:
    """What one process finds."""
    found: list[Values] = run_ranks(
        odd, 1, tmp_path_factory.mktemp("one"), ODD, None, env=by_hand_env(1), time_limit=40
    )[0]
    return found


@pytest.mark.parametrize("idle_ranks", [None, "skip"])
def test_an_odd_number_of_samples_is_measured_as_by_one_process(
    idle_ranks: str | None, one: list[Values], tmp_path: Path
) -> None:
    """With one sample a batch every metric and logged value is one process's, whether an idle rank steps or not."""
    for found in run_ranks(odd, 2, tmp_path, ODD, idle_ranks, env=by_hand_env(2), time_limit=40):
        for mine, expected in zip(found, one, strict=True):
            assert_same_values(mine, expected)


def test_what_a_hook_counts_is_exact_where_idle_ranks_make_no_step(one: list[Values], tmp_path: Path) -> None:
    """on_validation_batch_end and on_test_batch_end are called for a repeated sample, and not with "skip"."""
    for found in run_ranks(odd, 2, tmp_path, ODD, "skip", env=by_hand_env(2), time_limit=40):
        assert [values["hooked"] for values in found] == [values["hooked"] for values in one]
    for found in run_ranks(odd, 2, tmp_path, ODD, None, env=by_hand_env(2), time_limit=40):
        assert all(set(values["hooked"]) == set(alone["hooked"]) for values, alone in zip(found, one, strict=True))
        assert any(len(values["hooked"]) > len(alone["hooked"]) for values, alone in zip(found, one, strict=True))


@pytest.mark.parametrize(("idle_ranks", "steps"), [(None, 3), ("skip", 2)])
def test_an_idle_rank_repeats_a_sample_or_makes_no_step(idle_ranks: str | None, steps: int, tmp_path: Path) -> None:
    """The last step is made on a sample that has been counted already; with "skip" lists are right, too."""
    first, second = run_ranks(odd, 2, tmp_path, [5], idle_ranks, env=by_hand_env(2), time_limit=40)
    assert [values["stepped"] for values in first] == [[0, 2, 4]] * 2
    assert [values["stepped"][:2] for values in second] == [[1, 3]] * 2
    assert [len(values["stepped"]) for values in second] == [steps] * 2
