"""Metrics of an evaluation on several ranks are those of one process, whatever loaders, samplers and limits it has."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SubsetRandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryRecall

from lightning_ddp_ext.data.samplers import ExactDistributedSampler
from lightning_ddp_ext.errors import SamplingError
from tests.harness.ranks import by_hand_env, run_ranks
from tests.harness.training import Kind, assert_same, make_strategy, make_trainer, on_both
from tests.integration.continuing import KEPT, Net, Numbers

Batch = dict[str, Tensor]


def scores(samples: int) -> Any:
    """Return scores and labels of some samples; always the same for the same number."""
    x, drawn = torch.rand(2, samples, generator=torch.Generator().manual_seed(samples))
    return [{"x": x[i], "label": (drawn[i] < 0.5).long(), "index": torch.tensor(i)} for i in range(samples)]


class InPlace(Metric):
    """Adds to its state in place, as some metrics do."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), "sum")

    def update(self, values: Tensor) -> None:
        self.total += values.sum()

    def compute(self) -> Tensor:
        return self.total


class Measured(Net):
    """Logs values for each of its loaders, of all kinds for the first ones."""

    def __init__(self, loaders: int = 1, *, all_kinds: int = 1) -> None:
        super().__init__(list)
        self.all_kinds, self.trained = all_kinds, InPlace()
        shared = (MetricCollection([BinaryAccuracy(), BinaryRecall()]) for _ in range(loaders))  # of one state
        self.measures = nn.ModuleList(
            nn.ModuleDict(
                {
                    "mean": MeanMetric(),
                    "auroc": BinaryAUROC(),
                    "in place": InPlace(),
                    "seen": CatMetric(),
                    "collection": each,
                }
            )
            for each in shared
        )
        self.seen: list[Any] = []
        self.sizes: list[int] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.trained.update(batch)  # also after an evaluation, which is in inference mode
        return super().training_step(batch, index)

    def measure(self, batch: Batch, loader: int) -> None:
        x, label, measures = batch["x"], batch["label"], self.measures[loader]
        measures["seen"].update(batch["index"])
        self.sizes.append(len(x))
        self.log("mean", x.mean(), on_step=True, on_epoch=True, sync_dist=True)
        self.log("own", x.mean())
        if loader < self.all_kinds:
            self.log_all_kinds(measures, x, label)

    def log_all_kinds(self, measures: Any, x: Tensor, label: Tensor) -> None:
        measures["auroc"].update(x, label)
        measures["collection"].update(x, label)
        measures["mean"].update(x)
        measures["in place"].update(x)
        self.log("in place", measures["in place"])
        self.log("mean_metric", measures["mean"], on_step=True, on_epoch=True)
        self.log("auroc", measures["auroc"])
        self.log_dict(measures["collection"])
        self.log("sum", x.sum(), reduce_fx="sum", sync_dist=True)
        self.log("min", x.min(), reduce_fx="min", sync_dist=True)
        self.log("max", x.max(), reduce_fx="max", sync_dist=True, on_step=True, on_epoch=True)
        self.log("count", len(x), reduce_fx="sum", sync_dist=True)
        self.log("least", label.min(), reduce_fx="min", sync_dist=True)
        everywhere: Any = self.all_gather(torch.tensor(1.0))
        assert everywhere.sum() == self.trainer.world_size

    def validation_step(self, batch: Batch, index: int, dataloader_idx: int = 0) -> None:
        self.measure(batch, dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        seen: list[Any] = [measures["seen"] for measures in self.measures]  # type: ignore[index]
        self.seen = [sorted(each.compute().reshape(-1).tolist()) for each in seen]
        for each in seen:
            each.reset()


class Found(NamedTuple):
    """A rank's record of an evaluation: values and samples over all ranks, and the sizes of its batches."""

    values: dict[str, float]
    seen: list[Any]
    sizes: list[int]


Make = Callable[..., L.Trainer]  # takes what a Trainer takes


def found_by(trainer: L.Trainer, model: Measured) -> Found:
    """Return the logged values, except those that no rank reduces: there even an idle rank has some number."""
    values = {name: float(value) for name, value in trainer.callback_metrics.items() if "_step" not in name}
    own = [values.pop(name) for name in list(values) if name.startswith("own")]
    assert all(isfinite(value) for value in own)
    return Found(values, model.seen, model.sizes)


def validate(trainer: L.Trainer, loaders: Any, model: Measured | None = None) -> Found:
    model = model or Measured()
    trainer.validate(model, loaders, verbose=False)
    return found_by(trainer, model)


def loader(samples: int, batch_size: int | None, **options: Any) -> DataLoader[Any]:
    return DataLoader(scores(samples), batch_size, **options)


def several_loaders(make: Make) -> Found:
    """Return loaders in which not every rank of three can have a batch each time, and random ones."""
    drawn = random.Random(3)
    sizes = [(2, 2), (7, 1), (10, 3), (1, 1), *((drawn.randint(1, 40), drawn.randint(1, 7)) for _ in range(3))]
    found = validate(make(), [loader(*size) for size in sizes], Measured(len(sizes), all_kinds=3))
    assert found.seen == [list(range(samples)) for samples, _ in sizes]
    return found


def fitted(make: Make) -> Found:
    """Two epochs of fit, each with a validation, after a sanity check; one loader has a worker that stays."""
    trainer, model = make(num_sanity_val_steps=2), Measured(3)
    loaders = [loader(2, 1), loader(5, 2), loader(8, 1, **KEPT)]
    trainer.fit(model, DataLoader(Numbers(6), 1), loaders)
    return found_by(trainer, model)


def shuffled_and_of_a_subset(make: Make) -> Found:
    part = SubsetRandomSampler([30, 31, 32, 33, 34, 35, 39])
    return validate(make(), [loader(13, 4, shuffle=True), loader(40, 2, sampler=part)], Measured(2))


class Ragged(BatchSampler):
    """A user's batch sampler: each batch is one larger than the one before."""

    def __iter__(self) -> Iterator[list[int]]:
        samples, size = list(self.sampler), 1
        while samples:
            yield samples[:size]
            samples, size = samples[size:], size + 1

    def __len__(self) -> int:
        return sum(1 for _ in self)


def by_a_users_batch_sampler(make: Make) -> Found:
    """Ranks have 6, 5 and 5 samples, and so 3, 3 and 3 batches; then 4, 3, 3 samples, and so 3, 2 and 2 batches."""
    loaders = [DataLoader(scores(n), batch_sampler=Ragged(range(n), 2, False)) for n in (16, 10)]
    return validate(make(), loaders, Measured(2))


def by_the_users_exact_sampler(make: Make) -> Found:
    """Use loaders twice that Lightning leaves alone, and return whether they are unchanged; one is not copied."""
    for kind in (StatefulDataLoader, DataLoader):
        mine = kind(scores(10), 3, sampler=ExactDistributedSampler(scores(10)))
        batch_sampler = mine.batch_sampler
        validate(make(), mine)
        assert mine.batch_sampler is batch_sampler
        found = validate(make(), mine)
    return found


class Dealt(DistributedSampler[Any]):
    """A user's sampler for several ranks that repeats nothing, so that some have one sample more."""

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]


def by_the_users_own_dealing(make: Make) -> Found:
    trainer = make(use_distributed_sampler=False)
    ranks = trainer.world_size, trainer.global_rank
    return validate(trainer, [loader(n, 1, sampler=Dealt(scores(n), *ranks)) for n in (5, 1)], Measured(2))


SAME = (
    *(several_loaders, fitted, shuffled_and_of_a_subset),
    *(by_a_users_batch_sampler, by_the_users_exact_sampler, by_the_users_own_dealing),
)


def make_on(world_size: int, directory: Path, exact_evaluation: bool = True, **options: Any) -> L.Trainer:
    strategy = make_strategy("ours", directory, exact_evaluation=exact_evaluation) if world_size > 1 else "auto"
    return make_trainer(strategy, devices=world_size, **options)


def evaluate_all(rank: int, world_size: int, directory: Path) -> dict[str, Found]:
    found = {}
    for evaluation in SAME:
        torch.manual_seed(rank)  # as it may be: user's samplers draw differently on each rank
        found[evaluation.__name__] = evaluation(partial(make_on, world_size, directory))
    return found


def test_same_as_on_one_process(tmp_path: Path) -> None:
    """All values on every rank are those of one process, and every rank has made equally many steps."""
    (one,) = run_ranks(evaluate_all, 1, tmp_path, env=by_hand_env(1))
    ranks = run_ranks(evaluate_all, 3, tmp_path, env=by_hand_env(3))
    for name, expected in one.items():
        for rank in ranks:
            assert rank[name].seen == expected.seen, name
            assert rank[name].values == pytest.approx(expected.values, rel=1e-6, abs=1e-6), name
        assert len({len(rank[name].sizes) for rank in ranks}) == 1, name


def choose(rank: int, world_size: int, directory: Path) -> None:
    """Evaluate otherwise than each sample once, by the user's choice."""
    make = partial(make_on, world_size, directory)
    for limit in (2, 0.75):
        trainer = make(limit_val_batches=limit)
        limited = validate(trainer, [loader(19, 3), loader(7, 1)], Measured(2))
        assert (limited.sizes, limited.seen) == ([3, 3, 1, 1], [list(range(18)), list(range(6))])
        assert trainer.num_val_batches == [2, 2]
    dropping = validate(make(), loader(16, 3, drop_last=True))
    assert (dropping.sizes, dropping.seen) == ([3, 3], [[*range(10), 12, 15]])
    mean = sum(float(scores(4)[index]["x"]) for index in (0, 0, 1, 1, 2, 3)) / 6
    stocks = validate(make(exact_evaluation=False), loader(4, 2))
    own = validate(make(), loader(4, 1, sampler=DistributedSampler(scores(4), shuffle=False)))  # type: ignore[arg-type]
    assert stocks.values["mean"] == pytest.approx(mean, rel=1e-6)
    assert own.seen == stocks.seen == [[0, 0, 1, 1, 2, 3]]


def test_limits_and_samplers_that_repeat_can_be_chosen(tmp_path: Path) -> None:
    """A limit leaves each rank that many batches, and the user's own sampler, or stock's, may repeat samples."""
    run_ranks(choose, 3, tmp_path, env=by_hand_env(3))


class Endless(IterableDataset[Any]):
    """Has no sampler."""

    def __iter__(self) -> Iterator[Any]:
        return iter(scores(2))


class Pulls(Measured):
    """Takes batches from an iterator."""

    def validation_step(self, dataloader_iter: Iterator[Any]) -> None:  # type: ignore[override]
        next(dataloader_iter)


class Unsized(Ragged):
    """Has no length."""

    __len__ = None  # type: ignore[assignment]


def refuse(rank: int, world_size: int, directory: Path) -> list[str]:
    make = partial(make_on, world_size, directory)
    uneven = DataLoader(Numbers(4), 1, sampler=ExactDistributedSampler(Numbers(4)))
    calls: list[Callable[[], Any]] = [
        lambda: validate(make(), CombinedLoader([loader(12, 2), loader(2, 2)], "max_size"), Measured(2)),
        lambda: validate(make(), [loader(4, 1), DataLoader(Endless())], Measured(2)),
        lambda: validate(make(), loader(4, 1), Pulls()),
        lambda: validate(make(), DataLoader(scores(4), batch_sampler=Unsized(range(4), 2, False))),
        lambda: make(limit_val_batches=0).fit(Measured(), uneven),
    ]
    messages = []
    for call in calls:
        with pytest.raises(SamplingError) as error:
            call()
        messages.append(str(error.value))
    return messages


def test_what_cannot_work_is_refused_on_every_rank(tmp_path: Path) -> None:
    """If a batch cannot be left out, every rank raises immediately, with a remedy."""
    first, *others = run_ranks(refuse, 3, tmp_path, env=by_hand_env(3))
    starts = [
        *["every rank needs its own batch in every step if a step takes dataloader_iter, loaders are"] * 3,
        "every rank needs its own batch in every step if Data",
        "the ranks have different numbers of training batches (2 on rank 0, 1 on ranks 1, 2)",
    ]
    assert [message[: len(start)] for message, start in zip(first, starts, strict=True)] == starts
    assert others == [first] * 2


class Mean(L.LightningModule):
    """Logs the mean of its numbers, by itself and by a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()
        self.idle: list[bool] = []

    def test_step(self, x: Tensor, index: int) -> None:
        self.idle.append(getattr(self.trainer.strategy, "is_idle", False))
        self.metric.update(x)
        self.log("metric", self.metric)
        self.log("logged", x.mean(), sync_dist=True)


def of_five(kind: Kind, directory: Path) -> tuple[list[Any], list[bool], list[Tensor], list[Any]]:
    """Means of 0 to 4, by the strategy's samplers and by one that repeats nothing; and what its ``reduce`` makes.

    The second result says in which of a model's steps the rank was idle.
    """
    numbers: Any = torch.arange(5.0)
    trainer = make_trainer(make_strategy(kind, directory))
    loaders = [DataLoader(numbers, 1, sampler=sampler) for sampler in (None, ExactDistributedSampler(numbers))]
    model = Mean()
    means = [dict(trainer.test(model, loader, verbose=False)[0]) for loader in loaders]
    rank, reduce = trainer.global_rank, trainer.strategy.reduce
    whole = [reduce(torch.tensor([1 + rank, 4]), reduce_op=op) for op in ("mean", "avg")]
    others = [reduce(torch.tensor(rank + 3), reduce_op=op) for op in ("sum", "min", "max", ReduceOp.SUM)]
    in_place = torch.tensor(float(rank))
    reduce(in_place, reduce_op="mean")
    others += [in_place, reduce(3.0), reduce(torch.tensor(0.5 * rank, dtype=torch.half))]
    return means, model.idle, whole, others


@pytest.mark.lowest
def test_five_samples_on_two_ranks(tmp_path: Path) -> None:
    """The mean of 0 to 4 is 2, also of integers; stock's padding gives 5/3, and its floor division 5/2."""
    ours, stocks = on_both(of_five, tmp_path)
    assert [idle for _, idle, *_ in ours] == [[False] * 6, [False, False, True] * 2]
    for (means, _, whole, others), (padded_and_floored, *_, stock) in zip(ours, stocks, strict=True):
        assert means == [{"metric": 2.0, "logged": 2.0}] * 2
        padded, floored = padded_and_floored
        assert padded == pytest.approx({"metric": 5 / 3, "logged": 5 / 3})
        assert floored == {"metric": 2.0, "logged": 2.5}
        assert_same(whole, [torch.tensor([1.5, 4.0])] * 2)
        assert_same(others, stock)
