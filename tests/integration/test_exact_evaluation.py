"""An evaluation on several ranks counts each sample once, however it is read.

Logged values are those of one process. Everything else that a rank collects is stock's.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection, PearsonCorrCoef
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryRecall,
    MulticlassAccuracy,
)
from torchmetrics.retrieval import RetrievalMRR
from torchmetrics.wrappers import ClasswiseWrapper

from lightning_ddp_ext.data.samplers import ExactDistributedSampler
from tests.harness.training import Kind, assert_same, make_strategy, make_trainer, on_ranks
from tests.integration.continuing import workers
from tests.integration.evaluating import Batch, loader

WORKERS = workers(2, persistent_workers=True)
SIZES_OF_SEVERAL = ((7, 1), (10, 3), (1, 1), (23, 6))

# Make loaders of so many samples, in batches of this size.
READERS: dict[str, Callable[[int, int], list[DataLoader[Any]]]] = {
    "batches": lambda samples, size: [loader(samples, size)],
    "items": lambda samples, size: [loader(samples, None)],
    "workers": lambda samples, size: [loader(samples, size, **WORKERS)],
    "stateful": lambda samples, size: [loader(samples, size, StatefulDataLoader)],
    "two": lambda samples, size: [loader(samples, size), loader(samples + 1, size)],
    "several": lambda samples, size: [
        loader(samples, size),
        *(loader(*sizes) for sizes in SIZES_OF_SEVERAL),
    ],
    "two, workers": lambda samples, size: [
        loader(samples, size),
        loader(samples + 1, size, **WORKERS),
    ],
    "shuffled": lambda samples, size: [loader(samples, size, shuffle=True)],
    "subset": lambda samples, size: [
        loader(samples, size, sampler=SubsetRandomSampler(range(0, samples, 2)))
    ],
    "unrepeating": lambda samples, size: [
        loader(samples, size, sampler=ExactDistributedSampler(range(samples)))
    ],
    "unrepeating, stateful": lambda samples, size: [
        loader(samples, size, StatefulDataLoader, sampler=ExactDistributedSampler(range(samples)))
    ],
}


class Case(NamedTuple):
    """A way to read, and the numbers of samples and of those in a batch.

    Attributes:
        in_fit: whether a fit evaluates, after a step of training.
        limit_batches: the Trainer's option, by default all batches.
    """

    reader: str
    samples: int
    batch_size: int
    in_fit: bool = False
    limit_batches: int | None = None

    def loaders(self) -> list[DataLoader[Any]]:
        return READERS[self.reader](self.samples, self.batch_size)


LIMITED = [
    Case("batches", 1, 2, limit_batches=1),
    Case("batches", 13, 3, limit_batches=1),
]
READ_AS_STOCK = [
    *(Case("batches", samples, size) for samples in (1, 4, 5, 13) for size in (1, 3)),
    *(Case(reader, 1, 2) for reader in ("items", "stateful", "two")),
    *(Case(reader, 13, 3) for reader in ("items", "stateful", "two", "workers")),
    Case("several", 2, 2),
    Case("shuffled", 13, 4),
]
# Stock's ranks read other samples.
READ_OTHERWISE = [Case("subset", 20, 2), Case("two, workers", 5, 2, in_fit=True)]
# Stock's ranks would wait for a rank that has fewer batches.
UNREPEATING = [Case("unrepeating", 10, 3), Case("unrepeating, stateful", 10, 3)]
UNLIMITED = [*READ_AS_STOCK, *READ_OTHERWISE, *UNREPEATING]


class InPlace(Metric):
    """Adds in place to its state, as some metrics do."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), "sum")

    def update(self, values: Tensor) -> None:
        self.total += values.sum()

    def compute(self) -> Tensor:
        return self.total


class Widening(Metric):
    """Has a state that becomes a double with the first values."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), "sum")

    def update(self, values: Tensor) -> None:
        self.total = self.total + values.double().sum()

    def compute(self) -> Tensor:
        return self.total


class Items(Metric):
    """Keeps each batch in a list that torchmetrics gathers item by item.

    Next to it is a number that torchmetrics reduces.
    """

    kept: list[Tensor]
    updates: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("kept", [], dist_reduce_fx=None)
        self.add_state("updates", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, x: Tensor) -> None:
        self.kept.append(x)
        self.updates += 1

    def compute(self) -> Tensor:
        assert int(self.updates) == len(self.kept)
        return torch.cat(self.kept).sort().values


INPUTS_OF_METRICS = {
    "mean": ["x"],
    "sum": ["x"],
    "wide": ["x"],
    "auroc": ["x", "label"],
    "shared": ["x", "label"],
    "seen": ["index"],
    "pearson": ["x", "y"],
    "each": ["x"],
    "ranking": ["x", "label", "group"],
    "classes": ["group", "label"],
}
UNLOGGED = ("seen", "pearson", "each", "ranking", "classes")
ENOUGH_FOR_PEARSON = 10  # samples; with fewer, it is NaN on a rank that has only one


def make_metrics() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "mean": MeanMetric(),
            "sum": InPlace(),
            "wide": Widening(),
            "auroc": BinaryAUROC(),
            "shared": MetricCollection([BinaryAccuracy(), BinaryRecall()]),  # of one state
            "seen": CatMetric(),
            "pearson": PearsonCorrCoef(),
            "each": Items(),
            "ranking": RetrievalMRR(empty_target_action="skip"),
            "classes": ClasswiseWrapper(MulticlassAccuracy(3, average=None)),
        }
    )


class Collects(L.LightningModule):
    """Collects what it evaluates in every way that there is, and trains on anything.

    Attributes:
        joint: values of the samples of all ranks, by name.
        collected: what depends on the samples of each rank, repeated ones included.
        sizes: the loader and the size of each batch of the last evaluation.
        counted: the samples in steps of this evaluation in which the rank was not idle.
    """

    def __init__(self, loaders: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.trained = InPlace()
        self.metrics = nn.ModuleList(make_metrics() for _ in range(loaders))
        self.joint: dict[str, Any] = {}
        self.collected: dict[str, Any] = {}

    def training_step(self, batch: Batch, index: int) -> Tensor:
        self.trained.update(batch["x"])  # also after an evaluation, which is in inference mode
        return self.weight.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_validation_epoch_start(self) -> None:
        self.outputs: list[Tensor] = []
        self.sizes: list[tuple[int, int]] = []
        self.counted = 0

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        batch = {name: values.reshape(-1) for name, values in batch.items()}
        x = batch["x"]
        metrics: Any = self.metrics[dataloader_idx]
        for name, inputs in INPUTS_OF_METRICS.items():
            metrics[name].update(*(batch[field] for field in inputs))
        self.log("mean metric", metrics["mean"], on_step=True, on_epoch=True)
        self.log_dict(
            {"sum metric": metrics["sum"], "auroc": metrics["auroc"], **metrics["shared"]}
        )
        self.log("wide metric", metrics["wide"])
        self.log_values(x, batch["label"])
        self.outputs.append(x)
        self.sizes.append((dataloader_idx, len(x)))
        if not getattr(self.trainer.strategy, "is_idle", False):
            self.counted += len(x)
        gathered: Any = self.all_gather(x)
        assert gathered.numel() == len(x) * self.trainer.world_size, "ranks have other shapes"

    def log_values(self, x: Tensor, label: Tensor) -> None:
        log = partial(self.log, sync_dist=True, batch_size=len(x))
        log("mean", x.mean(), on_step=True, on_epoch=True)
        log("only_step", x.mean(), on_step=True, on_epoch=False)
        log("min", x.min(), reduce_fx="min")
        log("max", x.max(), reduce_fx="max", on_step=True, on_epoch=True)
        log("sum", x.sum(), reduce_fx="sum")
        log("double", x.double().mean())
        log("number", len(x), reduce_fx="sum")
        log("least", label.min(), reduce_fx="min")
        self.log("own", x.mean(), batch_size=len(x))

    def on_validation_epoch_end(self) -> None:
        outputs = torch.cat(self.outputs)
        self.collected = {"own": outputs, "gathered": self.all_gather(outputs)}
        for number, metrics in enumerate(self.metrics):
            computed = {name: metrics[name].compute() for name in UNLOGGED}
            seen = computed["seen"].sort().values
            self.joint[f"seen {number}"] = seen
            self.joint[f"classes {number}"] = computed["classes"]
            if seen.numel() >= ENOUGH_FOR_PEARSON:
                self.joint[f"pearson {number}"] = computed["pearson"]
            self.collected[f"each {number}"] = computed["each"]
            self.collected[f"ranking {number}"] = computed["ranking"]
            for name in UNLOGGED:
                metrics[name].reset()


class Record(NamedTuple):
    """A rank's record of an evaluation, see ``Collects``.

    ``own`` has logged values that the ranks do not reduce.
    """

    joint: dict[str, Any]
    collected: dict[str, Any]
    own: dict[str, Tensor]
    sizes: list[tuple[int, int]]
    counted: int

    def steps_by_loader(self) -> Counter[int]:
        return Counter(number for number, _ in self.sizes)


def evaluate(kind: Kind, directory: Path, cases: list[Case], ranks: int) -> dict[Case, Record]:
    """Return the record of each case; ``UNREPEATING`` run twice, and the second run counts."""
    records = {}
    for case in cases:
        loaders = case.loaders()
        batch_samplers = [each.batch_sampler for each in loaders]
        for _ in range(2 if case in UNREPEATING else 1):
            records[case] = evaluate_case(kind, directory, case, loaders, ranks)
        assert [each.batch_sampler for each in loaders] == batch_samplers, case
    return records


def evaluate_case(
    kind: Kind, directory: Path, case: Case, loaders: list[DataLoader[Any]], ranks: int
) -> Record:
    strategy = make_strategy(kind, directory) if ranks > 1 else "auto"
    trainer = make_trainer(strategy, devices=ranks, limit_val_batches=case.limit_batches)
    torch.manual_seed(trainer.global_rank)  # users' samplers may draw differently on each rank
    model = Collects(len(loaders))
    if case.in_fit:
        trainer.fit(model, loader(6), loaders)
    else:
        trainer.validate(model, loaders, verbose=False)
    logged = {
        name: value for name, value in trainer.callback_metrics.items() if "_step" not in name
    }
    own = {name: logged.pop(name) for name in list(logged) if name.startswith("own")}
    return Record(logged | model.joint, model.collected, own, model.sizes, model.counted)


class Evaluations(NamedTuple):
    """The records of our ranks, of stock's ranks, and of one process."""

    ours: list[dict[Case, Record]]
    stock: list[dict[Case, Record]]
    alone: dict[Case, Record]


@pytest.fixture(scope="module", params=[2, 3])
def evaluations(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Evaluations:
    """Evaluate all cases on two or three ranks, and in one process."""
    ranks = request.param
    directory = tmp_path_factory.mktemp("evaluations")
    ours = on_ranks("ours", evaluate, directory, [*UNLIMITED, *LIMITED], ranks, world_size=ranks)
    stock = on_ranks(
        "stock", evaluate, directory, [*READ_AS_STOCK, *LIMITED], ranks, world_size=ranks
    )
    (alone,) = on_ranks("stock", evaluate, directory / "stock", UNLIMITED, 1, world_size=1)
    return Evaluations(ours, stock, alone)


def test_values_of_all_ranks_are_those_of_one_process(evaluations: Evaluations) -> None:
    """Logged values and metrics count each sample once, on every rank."""
    alone = {case: record.joint for case, record in evaluations.alone.items()}
    for records in evaluations.ours:
        torch.testing.assert_close({case: records[case].joint for case in UNLIMITED}, alone)


def test_a_rank_is_idle_where_it_repeats_a_sample(evaluations: Evaluations) -> None:
    """Except in steps with ``strategy.is_idle``, the ranks read each sample once."""
    for case, alone in evaluations.alone.items():
        counted = sum(records[case].counted for records in evaluations.ours)
        assert counted == alone.counted, case


def test_a_rank_collects_what_it_collects_with_stock(evaluations: Evaluations) -> None:
    """A rank has stock's samples in stock's order, including those that it repeats."""
    for ours, stock in zip(evaluations.ours, evaluations.stock, strict=True):
        collected = {case: ours[case].collected for case in stock}
        assert_same(collected, {case: record.collected for case, record in stock.items()})


def test_the_step_with_repeated_samples_is_the_only_further_one(evaluations: Evaluations) -> None:
    """With each loader a rank takes as many steps as with stock, or one more."""
    for ours, stock in zip(evaluations.ours, evaluations.stock, strict=True):
        for case in stock:
            steps = ours[case].steps_by_loader()
            for number, steps_of_stock in stock[case].steps_by_loader().items():
                assert steps_of_stock <= steps[number] <= steps_of_stock + 1, case


def test_batches_have_the_same_sizes_on_all_ranks(evaluations: Evaluations) -> None:
    """The ranks make the same calls, and collectives in a step have the same shapes."""
    first, *others = evaluations.ours
    for records in others:
        for case in first:
            assert records[case].sizes == first[case].sizes, case


def test_values_that_the_ranks_do_not_reduce_are_numbers(evaluations: Evaluations) -> None:
    """This is so even on a rank that is idle in its only step."""
    for records in evaluations.ours:
        for case, record in records.items():
            assert all(value.isfinite() for value in record.own.values()), case
