"""Ways to read and to collect in an evaluation: logged values are one process's,
everything else is stock's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SubsetRandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import (
    CatMetric,
    ExplainedVariance,
    MeanMetric,
    Metric,
    MetricCollection,
    PearsonCorrCoef,
)
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryRecall
from torchmetrics.retrieval import RetrievalMRR

from lightning_ddp_ext.data.samplers import ExactDistributedSampler
from tests.harness.ranks import run_ranks
from tests.harness.training import Kind, assert_same, make_strategy, make_trainer, on_both, on_ranks
from tests.integration.continuing import KEPT

Batch = dict[str, Tensor]


def scores(samples: int) -> list[Batch]:
    """Return rows of a score, a label, a group and an index; always the same."""
    drawn = torch.rand(samples, 2, generator=torch.Generator().manual_seed(samples))
    return [
        {"x": x, "label": (y < 0.5).long(), "group": torch.tensor(i % 3), "index": torch.tensor(i)}
        for i, (x, y) in enumerate(drawn)
    ]


def loader(
    samples: int, batch_size: int | None = 1, kind: Any = DataLoader, **options: Any
) -> DataLoader[Any]:
    chosen = options if "batch_sampler" in options else {"batch_size": batch_size, **options}
    loader: DataLoader[Any] = kind(scores(samples), **chosen)
    return loader


class Ragged(BatchSampler):
    """A user's batch sampler: each batch is one larger than the one before."""

    def __iter__(self) -> Iterator[list[int]]:
        samples = list(self.sampler)
        size = 1
        while samples:
            yield samples[:size]
            samples = samples[size:]
            size += 1

    def __len__(self) -> int:
        return sum(1 for _ in self)


@dataclass(frozen=True)
class Case:
    """What is read, by how many ranks, and how."""

    reader: str
    samples: int
    batch_size: int
    ranks: int

    @property
    def is_drawn(self) -> bool:
        """Whether stock's ranks may read other samples than ours."""
        return self.reader in ("shuffled", "subset", "fit") or self.is_exact

    @property
    def is_exact(self) -> bool:
        """Whether the user's sampler leaves some ranks a batch less, for which stock's
        ranks would wait.
        """
        return self.reader.startswith("exact")

    def loaders(self) -> list[DataLoader[Any]]:
        load = partial(loader, self.samples, batch_size=self.batch_size)
        if self.reader in ("two", "fit"):
            return [
                load(),
                loader(self.samples + 1, self.batch_size, **KEPT if self.reader == "fit" else {}),
            ]
        if self.reader == "several":
            return [load(), *(loader(*size) for size in ((7, 1), (10, 3), (1, 1), (23, 6)))]
        exact = ExactDistributedSampler(range(self.samples))  # type: ignore[arg-type]
        ways: dict[str, dict[str, Any]] = {
            "ragged": {"batch_sampler": Ragged(range(self.samples), 2, False)},
            "items": {"batch_size": None},
            "workers": {**KEPT, "num_workers": 2},
            "shuffled": {"shuffle": True},
            "subset": {"sampler": SubsetRandomSampler(range(0, self.samples, 2))},
            "stateful": {"kind": StatefulDataLoader},
            "exact": {"sampler": exact},
            "exact, stateful": {"sampler": exact, "kind": StatefulDataLoader},
        }
        return [load(**ways.get(self.reader, {}))]


CASES = [
    *product(["batches"], (1, 4, 5, 13), (1, 3)),
    *((reader, *size) for reader in ("items", "stateful", "two") for size in ((1, 2), (13, 3))),
    *((reader, *size) for reader in ("ragged", "limited") for size in ((1, 2), (5, 2), (13, 3))),
    *(("workers", 13, 3), ("several", 2, 2), ("shuffled", 13, 4), ("subset", 20, 2)),
    *(("exact", 10, 3), ("exact, stateful", 10, 3), ("fit", 5, 2)),
]


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


class Items(Metric):
    """Keeps each batch in a list that torchmetrics gathers item by item, next to a
    number that it reduces.
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


def measures() -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "mean": MeanMetric(),
            "sum": InPlace(),
            "auroc": BinaryAUROC(),
            "shared": MetricCollection([BinaryAccuracy(), BinaryRecall()]),  # of one state
            "seen": CatMetric(),
            "pearson": PearsonCorrCoef(),
            "each": Items(),
            "ranking": RetrievalMRR(empty_target_action="skip"),
        }
    )


UNLOGGED = ("seen", "pearson", "each", "ranking")


class Collects(L.LightningModule):
    """Collects what it evaluates in every way that there is, and trains on anything."""

    def __init__(self, loaders: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.trained = InPlace()
        self.metrics = nn.ModuleList(measures() for _ in range(loaders))
        self.outputs: list[Tensor] = []
        self.written: list[tuple[int, int, int]] = []
        self.exact: dict[str, Any] = {}
        self.collected: dict[str, Any] = {}

    def training_step(self, batch: Batch, index: int) -> Tensor:
        self.trained.update(batch["x"])  # also after an evaluation, which is in inference mode
        return self.weight.sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        x, label, group, index = (
            batch[name].reshape(-1) for name in ("x", "label", "group", "index")
        )
        own: Any = self.metrics[dataloader_idx]
        for name, values in {"mean": (x,), "sum": (x,), "seen": (index,), "each": (x,)}.items():
            own[name].update(*values)
        for name in ("auroc", "shared"):
            own[name].update(x, label)
        own["pearson"].update(x, label.float())
        own["ranking"].update(x, label, group)
        self.log_values(x, label)
        self.log("mean metric", own["mean"], on_step=True, on_epoch=True)
        self.log_dict({"sum metric": own["sum"], "auroc": own["auroc"], **own["shared"]})
        self.outputs.append(x)
        everywhere: Any = self.all_gather(x)  # has the same shape on all ranks
        assert everywhere.numel() == len(x) * self.trainer.world_size
        return x

    def log_values(self, x: Tensor, label: Tensor) -> None:
        log = partial(self.log, sync_dist=True, batch_size=len(x))
        log("mean", x.mean(), on_step=True, on_epoch=True)
        log("min", x.min(), reduce_fx="min")
        log("max", x.max(), reduce_fx="max", on_step=True, on_epoch=True)
        log("sum", x.sum(), reduce_fx="sum")
        log("number", len(x), reduce_fx="sum")
        log("least", label.min(), reduce_fx="min")
        self.log("own", x.mean(), batch_size=len(x))

    def on_validation_batch_end(
        self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.written.append((dataloader_idx, batch_idx, len(outputs)))

    def on_validation_epoch_end(self) -> None:
        outputs = torch.cat(self.outputs)
        self.outputs.clear()
        self.collected |= {"own": outputs, "gathered": self.all_gather(outputs)}
        for number, own in enumerate(self.metrics):
            computed = {name: own[name].compute() for name in UNLOGGED}  # type: ignore[index]
            self.exact[f"seen {number}"] = computed["seen"].sort().values
            if computed["seen"].numel() > 3 * self.trainer.world_size:
                # NaN where a rank has one sample.
                self.exact[f"pearson {number}"] = computed["pearson"]
            self.collected |= {f"{name} {number}": computed[name] for name in ("each", "ranking")}
            for name in UNLOGGED:
                own[name].reset()  # type: ignore[index]


@dataclass
class Found:
    """A rank's record: values of all ranks, what else it collected, and number and
    sizes of its batches.
    """

    exact: dict[str, Any]
    collected: dict[str, Any]
    written: list[tuple[int, int, int]]

    @property
    def sizes(self) -> list[tuple[int, int]]:
        return [(loader, size) for loader, _, size in self.written]


def found_by(trainer: L.Trainer, model: Collects) -> Found:
    logged = {
        name: value for name, value in trainer.callback_metrics.items() if "_step" not in name
    }
    own = [logged.pop(name) for name in list(logged) if name.startswith("own")]
    assert all(map(math.isfinite, own)), "what no rank reduces is some number even on an idle rank"
    return Found(logged | model.exact, model.collected, model.written)


def evaluate(kind: Kind, directory: Path, cases: list[Case]) -> dict[Case, Found]:
    found = {}
    for case in cases:
        strategy = make_strategy(kind, directory) if case.ranks > 1 else "auto"
        limits: Any = {"limit_val_batches": 1} if case.reader == "limited" else {}
        trainer = make_trainer(strategy, devices=case.ranks, **limits)
        loaders = case.loaders()
        before = [each.batch_sampler for each in loaders]
        # As it may be: users' samplers draw differently on each rank.
        torch.manual_seed(trainer.global_rank)
        model = Collects(len(loaders))
        if case.reader == "fit":
            trainer.fit(model, loader(6), loaders)
        else:
            trainer.validate(model, loaders, verbose=False)
        if case.is_exact:  # once more: nothing has put a sampler in
            model = Collects(len(loaders))
            trainer.validate(model, loaders, verbose=False)
        found[case] = found_by(trainer, model)
        assert all(each.batch_sampler is was for each, was in zip(loaders, before, strict=True))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_values_are_those_of_one_process_and_all_else_is_stocks(ranks: int, tmp_path: Path) -> None:
    """Every rank has stock's samples in stock's order, and at most one step more, which
    only fills up.
    """
    cases = [Case(*case, ranks) for case in CASES]
    alone = [Case(*case, 1) for case in CASES]
    ours = on_ranks("ours", evaluate, tmp_path, cases, world_size=ranks)
    even = [case for case in cases if not case.is_exact]
    stock = on_ranks("stock", evaluate, tmp_path, even, world_size=ranks)
    (one,) = on_ranks("stock", evaluate, tmp_path / "stock", alone, world_size=1)
    for case, single in zip(cases, alone, strict=True):
        # One process with the same limit reads other samples.
        is_whole = case.reader != "limited"
        for rank in range(ranks):
            mine = ours[rank][case]
            assert mine.sizes == ours[0][case].sizes, case
            if is_whole:
                expected = {name: one[single].exact[name] for name in mine.exact}
                torch.testing.assert_close(mine.exact, expected, msg=str(case))
            if case.is_drawn:
                continue
            stocks = stock[rank][case]
            same_steps = len(mine.written) == len(stocks.written)
            assert same_steps or len(mine.written) <= len(stocks.written) + len(case.loaders()), (
                case
            )
            if is_whole or math.ceil(case.samples / ranks) > case.batch_size:
                assert_same(mine.collected, stocks.collected)


def make_on(
    world_size: int, directory: Path, exact_evaluation: bool = True, **options: Any
) -> L.Trainer:
    strategy = (
        make_strategy("ours", directory, exact_evaluation=exact_evaluation)
        if world_size > 1
        else "auto"
    )
    return make_trainer(strategy, devices=world_size, **options)


def choose(rank: int, world_size: int, directory: Path) -> None:
    """Evaluate otherwise than each sample once, by the user's choice."""

    def validate(*loaders: Any, **options: Any) -> tuple[list[int], list[list[int]], float]:
        trainer = make_on(world_size, directory, **options)
        model = Collects(len(loaders))
        trainer.validate(model, list(loaders), verbose=False)
        found = found_by(trainer, model)
        seen = [found.exact[f"seen {number}"].int().tolist() for number in range(len(loaders))]
        return [size for _, size in found.sizes], seen, float(found.exact.get("mean_epoch", 0.0))

    for limit in (2, 0.75):
        sizes, seen, _ = validate(loader(19, 3), loader(7), limit_val_batches=limit)
        assert (sizes, seen) == ([3, 3, 1, 1], [list(range(18)), list(range(6))])
    sizes, seen, _ = validate(loader(16, 3, drop_last=True))
    assert (sizes, seen) == ([3, 3], [sorted([0, 1, *range(16)])])
    own = DistributedSampler(range(4), shuffle=False)  # type: ignore[arg-type]
    _, seen, mean = validate(loader(4, 2), exact_evaluation=False)
    assert seen == validate(loader(4, sampler=own))[1] == [[0, 0, 1, 1, 2, 3]]
    assert mean == pytest.approx(
        sum(float(scores(4)[index]["x"]) for index in (0, 0, 1, 1, 2, 3)) / 6, rel=1e-6
    )


def test_limits_and_samplers_that_repeat_can_be_chosen(tmp_path: Path) -> None:
    """A limit leaves each rank that many batches; ``drop_last``, the user's own sampler
    or stock's repeat samples.
    """
    run_ranks(choose, 3, tmp_path)


class Dealt(DistributedSampler[Any]):
    """A user's sampler for several ranks that repeats nothing, so that some have more
    samples or none.
    """

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]


class Part(IterableDataset[Any]):
    """A stream of a rank's part of the samples, without a length."""

    def __init__(self, samples: int, rank: int, world_size: int) -> None:
        self.samples = samples
        self.part = slice(rank, None, world_size)

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
        self.seen: list[list[int]] = []

    def validation_step(self, batch: Batch, index: int, dataloader_idx: int = 0) -> None:
        x = batch["x"]
        auroc: Any = self.aurocs[dataloader_idx]
        auroc.update(x, batch["label"])
        self.log(f"auroc {dataloader_idx}", auroc)
        self.log("mean", x.mean(), sync_dist=True, batch_size=len(x))
        self.log("greatest", x.max(), reduce_fx="max", sync_dist=True, batch_size=len(x))
        self.seen.append(batch["index"].tolist())


def deal(
    rank: int, world_size: int, directory: Path
) -> dict[str, tuple[dict[str, float], list[int]]]:
    """Evaluate data that the user divides, so that ranks have other numbers of batches,
    or none.
    """
    trainer = make_on(world_size, directory, use_distributed_sampler=False)
    own = trainer.global_rank, world_size
    loaders: dict[str, list[DataLoader[Any]]] = {
        "sampler": [loader(n, 1, sampler=Dealt(scores(n), world_size, own[0])) for n in (5, 1)],
        "stream": [DataLoader(Part(n, *own), 2) for n in (7, 1, 2, 9)],
        "without length": [
            DataLoader(scores(9), batch_sampler=Unsized(range(own[0], 9, world_size), 2, False))
        ],
    }
    found = {}
    for name, each in loaders.items():
        model = AtTheEnd(len(each))
        (*logged,) = trainer.validate(model, each, verbose=False)
        found[name] = (
            {key: value for one in logged for key, value in one.items()},
            [*map(len, model.seen)],
        )
    return found


def test_ranks_that_have_other_numbers_of_batches_or_none(tmp_path: Path) -> None:
    """Each rank evaluates its own batches, at least one of them, and values are those
    of all samples.
    """
    (one,) = run_ranks(deal, 1, tmp_path)
    ranks = run_ranks(deal, 3, tmp_path)
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
    """Has a metric that takes its shape from data, and logs what it has reduced itself
    and what one process counts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.variance = ExplainedVariance()
        self.sums = InPlace()
        self.counts = Counts()

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
    return [
        make_on(world_size, directory).validate(Shaped(), each, verbose=False) for each in loaders
    ]


def test_metrics_of_any_shape_and_values_that_users_reduce(tmp_path: Path) -> None:
    """A rank that only repeats a sample takes part in all reductions, and a value that
    a step gathered stays.
    """
    first, second = run_ranks(reduce_otherwise, 2, tmp_path)
    assert first == second
    assert first[1][0]["counts"] == 1


class Pulls(AtTheEnd):
    """Takes batches from an iterator."""

    def validation_step(self, dataloader_iter: Iterator[Any]) -> None:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        super().validation_step(batch, 0)


class Pairs(AtTheEnd):
    """Takes batches of two loaders."""

    def validation_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        for number, each in enumerate(batch):
            if each is not None:
                super().validation_step(each, index, number)


def as_stock(kind: Kind, directory: Path) -> list[Any]:
    """Evaluate in steps that have more than one batch, or that take their batches
    themselves.
    """
    found = []

    def validate(model: AtTheEnd, loaders: Any, **options: Any) -> None:
        trainer = make_trainer(make_strategy(kind, directory), **options)
        logged = trainer.validate(model, loaders, verbose=False)
        found.append([logged, model.seen])

    for mode in ("min_size", "max_size", "max_size_cycle"):
        for options in ({}, {"limit_val_batches": 1}, {"fast_dev_run": True}):
            both = CombinedLoader([loader(11, 2), loader(5, 2)], mode)  # type: ignore[arg-type]
            validate(Pairs(2), both, **options)
    validate(Pulls(), loader(5, 2))
    validate(AtTheEnd(), loader(9, 2, drop_last=True))
    validate(AtTheEnd(), loader(9, batch_sampler=Whole(range(9), 5, False)))
    return found


def test_steps_that_cannot_leave_out_a_sample_are_as_with_stock(tmp_path: Path) -> None:
    """Values, samples and batches of combined loaders, of steps with
    ``dataloader_iter`` and of ``drop_last``.
    """
    ours, stock = on_both(as_stock, tmp_path)
    assert_same(ours, stock)


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
    """Means of 0 to 4, by the strategy's samplers and by one that repeats nothing; and
    what its ``reduce`` makes.

    The second result says in which of a model's steps the rank was idle.
    """
    numbers: Any = torch.arange(5.0)
    trainer = make_trainer(make_strategy(kind, directory))
    loaders = [
        DataLoader(numbers, 1, sampler=sampler)
        for sampler in (None, ExactDistributedSampler(numbers))
    ]
    model = Mean()
    means = [dict(trainer.test(model, loader, verbose=False)[0]) for loader in loaders]
    rank = trainer.global_rank
    reduce = trainer.strategy.reduce
    whole = [reduce(torch.tensor([1 + rank, 4]), reduce_op=op) for op in ("mean", "avg")]
    others = [
        reduce(torch.tensor(rank + 3), reduce_op=op) for op in ("sum", "min", "max", ReduceOp.SUM)
    ]
    in_place = torch.tensor(float(rank))
    reduce(in_place, reduce_op="mean")
    others += [in_place, reduce(3.0), reduce(torch.tensor(0.5 * rank, dtype=torch.half))]
    return means, model.idle, whole, others


@pytest.mark.lowest
def test_five_samples_on_two_ranks(tmp_path: Path) -> None:
    """The mean of 0 to 4 is 2, also of integers; stock's padding gives 5/3, and its
    floor division 5/2.
    """
    ours, stocks = on_both(of_five, tmp_path)
    assert [idle for _, idle, *_ in ours] == [[False] * 6, [False, False, True] * 2]
    for (means, _, whole, others), (padded_and_floored, *_, stock) in zip(
        ours, stocks, strict=True
    ):
        assert means == [{"metric": 2.0, "logged": 2.0}] * 2
        padded, floored = padded_and_floored
        assert padded == pytest.approx({"metric": 5 / 3, "logged": 5 / 3})
        assert floored == {"metric": 2.0, "logged": 2.5}
        assert_same(whole, [torch.tensor([1.5, 4.0])] * 2)
        assert_same(others, stock)
