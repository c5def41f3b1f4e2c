"""Metrics of an evaluation on several ranks are those of one process, whatever loaders, samplers and limits it has."""

from __future__ import annotations

import random
from collections import Counter
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
from torchmetrics import CatMetric, ExplainedVariance, MeanMetric, Metric, MetricCollection
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryRecall

from lightning_ddp_ext.data.samplers import ExactDistributedSampler
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
    """Each of three ranks has 5 samples, in batches of 1, 2 and 2; then 3, in batches of 1 and 2; and a last one."""
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


SAME = (
    *(several_loaders, fitted, shuffled_and_of_a_subset),
    *(by_a_users_batch_sampler, by_the_users_exact_sampler),
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
    """All values on every rank are those of one process, and every rank has batches of the same sizes."""
    (one,) = run_ranks(evaluate_all, 1, tmp_path, env=by_hand_env(1))
    ranks = run_ranks(evaluate_all, 3, tmp_path, env=by_hand_env(3))
    for name, expected in one.items():
        for rank in ranks:
            assert rank[name].seen == expected.seen, name
            assert rank[name].values == pytest.approx(expected.values, rel=1e-6, abs=1e-6), name
        assert all(rank[name].sizes == ranks[0][name].sizes for rank in ranks), name


def choose(rank: int, world_size: int, directory: Path) -> None:
    """Evaluate otherwise than each sample once, by the user's choice."""
    make = partial(make_on, world_size, directory)
    for limit in (2, 0.75):
        trainer = make(limit_val_batches=limit)
        limited = validate(trainer, [loader(19, 3), loader(7, 1)], Measured(2))
        assert (limited.sizes, limited.seen) == ([3, 3, 1, 1], [list(range(18)), list(range(6))])
        assert trainer.num_val_batches == [2, 2]
    dropping = validate(make(), loader(16, 3, drop_last=True))
    assert (dropping.sizes, dropping.seen) == ([3, 3], [sorted([0, 1, *range(16)])])
    mean = sum(float(scores(4)[index]["x"]) for index in (0, 0, 1, 1, 2, 3)) / 6
    stocks = validate(make(exact_evaluation=False), loader(4, 2))
    own = validate(make(), loader(4, 1, sampler=DistributedSampler(scores(4), shuffle=False)))  # type: ignore[arg-type]
    assert stocks.values["mean"] == pytest.approx(mean, rel=1e-6)
    assert own.seen == stocks.seen == [[0, 0, 1, 1, 2, 3]]


def test_limits_and_samplers_that_repeat_can_be_chosen(tmp_path: Path) -> None:
    """A limit leaves each rank that many batches; ``drop_last``, the user's own sampler or stock's repeat samples."""
    run_ranks(choose, 3, tmp_path, env=by_hand_env(3))


class Dealt(DistributedSampler[Any]):
    """A user's sampler for several ranks that repeats nothing, so that some have more samples or none."""

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]


class Part(IterableDataset[Any]):
    """A stream of a rank's part of the samples, without a length."""

    def __init__(self, samples: int, rank: int, world_size: int) -> None:
        self.samples, self.part = samples, slice(rank, None, world_size)

    def __iter__(self) -> Iterator[Any]:
        return iter(scores(self.samples)[self.part])


class Unsized(Ragged):
    """Has no length."""

    __len__ = None  # type: ignore[assignment]


class AtTheEnd(L.LightningModule):
    """Logs at the end of the epoch only, and remembers what its own hooks saw."""

    def __init__(self, loaders: int = 1) -> None:
        super().__init__()
        self.aurocs = nn.ModuleList(BinaryAUROC() for _ in range(loaders))
        self.sizes: list[int] = []

    def validation_step(self, batch: Batch, index: int, dataloader_idx: int = 0) -> None:
        x, auroc = batch["x"], self.aurocs[dataloader_idx]
        auroc.update(x, batch["label"])  # type: ignore[operator]
        self.log("auroc", auroc)  # type: ignore[arg-type]
        self.log("mean", x.mean(), sync_dist=True)
        self.log("greatest", x.max(), reduce_fx="max", sync_dist=True)
        self.sizes.append(len(x))


def deal(rank: int, world_size: int, directory: Path) -> dict[str, tuple[dict[str, float], list[int]]]:
    """Evaluate data that the user divides, so that ranks have other numbers of batches, or none."""
    trainer = make_on(world_size, directory, use_distributed_sampler=False)
    own = trainer.global_rank, world_size
    loaders: dict[str, list[DataLoader[Any]]] = {
        "sampler": [loader(n, 1, sampler=Dealt(scores(n), world_size, own[0])) for n in (5, 1)],
        "stream": [DataLoader(Part(n, *own), 2) for n in (7, 1, 2, 9)],
        "without length": [DataLoader(scores(9), batch_sampler=Unsized(range(own[0], 9, world_size), 2, False))],
    }
    found = {}
    for name, each in loaders.items():
        model = AtTheEnd(len(each))
        (*logged,) = trainer.validate(model, each, verbose=False)
        found[name] = {key: value for one in logged for key, value in one.items()}, model.sizes
    return found


def test_ranks_that_have_other_numbers_of_batches_or_none(tmp_path: Path) -> None:
    """Each rank evaluates its own batches, at least one of them, and values are those of all samples."""
    (one,) = run_ranks(deal, 1, tmp_path, env=by_hand_env(1))
    ranks = run_ranks(deal, 3, tmp_path, env=by_hand_env(3))
    for rank in ranks:
        for name, (values, _) in one.items():
            assert rank[name][0] == pytest.approx(values, rel=1e-6), name
    sizes = {name: [rank[name][1] for rank in ranks] for name in one}
    assert sizes == {
        "sampler": [[1, 1, 1], [1, 1, 1], [1, 1]],  # the second loader has one sample
        "stream": [[2, 1, 1, 1, 2, 1], [2, 1, 1, 2, 1], [2, 1, 1, 2, 1]],
        "without length": [[1, 2]] * 3,
    }


class Whole(BatchSampler):
    """Yields whole batches only, although it says ``drop_last=False``."""

    def __iter__(self) -> Iterator[list[int]]:
        samples = list(self.sampler)
        for first in range(0, len(samples) - self.batch_size + 1, self.batch_size):
            yield samples[first : first + self.batch_size]

    def __len__(self) -> int:
        return len(self.sampler) // self.batch_size  # type: ignore[arg-type]


class Counts(Metric):
    """Counts labels in a counter beside its state."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0), "sum")
        self.seen: Counter[int] = Counter()

    def update(self, labels: Tensor) -> None:
        self.seen.update(labels.tolist())
        self.total += len(labels)

    def compute(self) -> Tensor:
        return self.total


class Shaped(L.LightningModule):
    """Has a metric that takes its shape from data, and logs what it has reduced itself and what one process counts."""

    def __init__(self) -> None:
        super().__init__()
        self.variance, self.sums, self.counts = ExplainedVariance(), InPlace(), Counts()

    def validation_step(self, batch: Batch, index: int, dataloader_idx: int = 0) -> None:
        x = batch["x"].repeat(2, 1).T
        self.variance.update(x, x.square())
        self.sums.update(x)
        self.counts.update(batch["label"])
        self.log("sums", self.sums)
        self.log("counts", self.counts)
        self.log("gathered", self.all_gather(x.mean()).mean())  # type: ignore[union-attr]

    def on_validation_epoch_end(self) -> None:
        self.variance.compute()


def reduce_otherwise(rank: int, world_size: int, directory: Path) -> list[Any]:
    loaders = [[loader(5, 2), loader(1, 1)], [loader(1, 1)]]
    return [make_on(world_size, directory).validate(Shaped(), each, verbose=False) for each in loaders]


def test_metrics_of_any_shape_and_values_that_users_reduce(tmp_path: Path) -> None:
    """A rank that only repeats a sample takes part in all reductions, and a value that a step gathered stays."""
    first, second = run_ranks(reduce_otherwise, 2, tmp_path, env=by_hand_env(2))
    assert first == second
    assert first[1][0]["counts"] == 1


class Pulls(Measured):
    """Takes batches from an iterator."""

    def validation_step(self, dataloader_iter: Iterator[Any]) -> None:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        self.measure(batch, 0)


class Pairs(Measured):
    """Takes batches of two loaders."""

    def validation_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        for number, each in enumerate(batch):
            if each is not None:
                self.measure(each, number)


def as_stock(kind: Kind, directory: Path) -> list[Found]:
    """Evaluate in steps that have more than one batch, or that take their batches themselves."""

    def make(**options: Any) -> L.Trainer:
        return make_trainer(make_strategy(kind, directory), **options)

    found = []
    for mode in ("min_size", "max_size", "max_size_cycle"):
        for options in ({}, {"limit_val_batches": 1}, {"fast_dev_run": True}):
            both = CombinedLoader([loader(11, 2), loader(5, 2)], mode)  # type: ignore[arg-type]
            found.append(validate(make(**options), both, Pairs(2, all_kinds=0)))
    found.append(validate(make(), loader(5, 2), Pulls()))
    found.append(validate(make(), loader(9, 2, drop_last=True)))
    found.append(validate(make(), DataLoader(scores(9), batch_sampler=Whole(range(9), 5, False))))
    return found


def test_steps_that_cannot_leave_out_a_sample_are_as_with_stock(tmp_path: Path) -> None:
    """Values, samples and batches of combined loaders, of steps with ``dataloader_iter`` and of ``drop_last``."""
    ours, stock = on_both(as_stock, tmp_path)
    assert_same([[each._asdict() for each in rank] for rank in ours], [[e._asdict() for e in rank] for rank in stock])


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
