"""Evaluations in which some ranks have fewer batches than others: nobody waits, and each sample counts once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Sampler
from torchmetrics import CatMetric, MeanMetric
from torchmetrics.classification import BinaryAUROC

from lightning_ddp_ext.errors import SamplingError
from tests.integration.evaluating import Scores
from tests.integration.training import make_strategy, make_trainer
from tests.ranks import by_hand_env, run_ranks

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


class Gathers(Measured):
    """Needs all ranks in each of its steps."""

    def validation_step(self, batch: Batch, index: int) -> None:
        super().validation_step(batch, index)
        self.log("step", batch["x"].mean(), on_step=True, on_epoch=True, sync_dist=True)
        everywhere: Any = self.all_gather(torch.tensor(1.0))
        assert everywhere.sum() == self.trainer.world_size

    test_step = validation_step


class Dealt(Sampler[int]):
    """Deals out exactly: with an odd number of samples the first of two ranks has one more."""

    def __init__(self, samples: int, rank: int, world_size: int) -> None:
        self.own = range(rank, samples, world_size)

    def __iter__(self) -> Iterator[int]:
        return iter(self.own)

    def __len__(self) -> int:
        return len(self.own)


class Distributed(DistributedSampler[Any]):
    """The same, as Lightning and others tell a sampler that knows of ranks."""

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]


Loaders = Callable[[int, int], Any]  # of a rank among so many


def loader(samples: int, batch_size: int = 1, **options: Any) -> DataLoader[Any]:
    return DataLoader(Scores(samples), batch_size, **options)


def dealt(samples: int, batch_size: int = 1) -> Loaders:
    return lambda rank, size: loader(samples, batch_size, sampler=Dealt(samples, rank, size))


def distributed(samples: int, batch_size: int = 1) -> Loaders:
    return lambda rank, size: loader(samples, batch_size, sampler=Distributed(Scores(samples), size, rank))


EXACT: dict[str, Loaders] = {
    "a sampler, one sample a batch": dealt(5),
    "a sampler, three samples a batch": dealt(13, 3),
    "a DistributedSampler": distributed(5),
    "a DistributedSampler, nothing for one rank": distributed(1),
}


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


def by_own_sampler(rank: int, world_size: int, directory: Path, name: str) -> Values | str:
    """The values, or the error that a user reads."""
    found: Values = {}
    for run in ("validate", "test"):
        own = EXACT[name](rank, world_size)
        try:
            found |= {run: evaluate(world_size, directory, own, Gathers(), run, shared_out=False)}
        except SamplingError as error:
            return str(error)
    return found


@pytest.mark.parametrize("name", EXACT)
def test_a_sampler_of_the_users_own_that_repeats_nothing_is_exact_or_refused(name: str, tmp_path: Path) -> None:
    """Ranks with different numbers of batches measure what one process does, or are all told that they cannot."""
    found = run_ranks(by_own_sampler, 2, tmp_path, name, env=by_hand_env(2), time_limit=40)
    if isinstance(found[0], str):
        assert found[0] == found[1]
        assert "batches" in found[0]
        return
    (one,) = run_ranks(by_own_sampler, 1, tmp_path, name, env=by_hand_env(1), time_limit=40)
    for values in found:
        for run in ("validate", "test"):
            assert_same_values(values[run], one[run])


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
