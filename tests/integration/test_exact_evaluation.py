"""Ways to read and to collect in an evaluation: logged values are one process's,
everything else is stock's.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import (
    CatMetric,
    MeanMetric,
    Metric,
    MetricCollection,
    PearsonCorrCoef,
)
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, BinaryRecall
from torchmetrics.retrieval import RetrievalMRR

from lightning_ddp_ext.data.samplers import ExactDistributedSampler
from tests.harness import training
from tests.integration.continuing import KEPT
from tests.integration.evaluating import Batch, Ragged, loader


@dataclass(frozen=True)
class Case:
    """What is read, by how many ranks, and how."""

    reader: str
    samples: int
    batch_size: int
    ranks: int

    @property
    def reads_other_samples_than_stock(self) -> bool:
        return self.reader in ("shuffled", "subset", "fit") or self.has_unrepeating_sampler

    @property
    def has_unrepeating_sampler(self) -> bool:
        """Whether the user's sampler leaves some ranks a batch less, for which stock's
        ranks would wait.
        """
        return self.reader.startswith("unrepeating")

    @property
    def is_filled_up(self) -> bool:
        """Whether the step that fills up is not beyond the limit of one batch."""
        return self.reader != "limited" or math.ceil(self.samples / self.ranks) > self.batch_size

    def loaders(self) -> list[DataLoader[Any]]:
        load = partial(loader, self.samples, batch_size=self.batch_size)
        if self.reader in ("two", "fit"):
            return [
                load(),
                loader(self.samples + 1, self.batch_size, **KEPT if self.reader == "fit" else {}),
            ]
        if self.reader == "several":
            return [load(), *(loader(*size) for size in ((7, 1), (10, 3), (1, 1), (23, 6)))]
        unrepeating = ExactDistributedSampler(range(self.samples))
        ways: dict[str, dict[str, Any]] = {
            "ragged": {"batch_sampler": Ragged(range(self.samples), 2, False)},
            "items": {"batch_size": None},
            "workers": {**KEPT, "num_workers": 2},
            "shuffled": {"shuffle": True},
            "subset": {"sampler": SubsetRandomSampler(range(0, self.samples, 2))},
            "stateful": {"kind": StatefulDataLoader},
            "unrepeating": {"sampler": unrepeating},
            "unrepeating, stateful": {"sampler": unrepeating, "kind": StatefulDataLoader},
        }
        return [load(**ways.get(self.reader, {}))]


CASES = [
    *product(["batches"], (1, 4, 5, 13), (1, 3)),
    *((reader, *size) for reader in ("items", "stateful", "two") for size in ((1, 2), (13, 3))),
    *((reader, *size) for reader in ("ragged", "limited") for size in ((1, 2), (5, 2), (13, 3))),
    *(("workers", 13, 3), ("several", 2, 2), ("shuffled", 13, 4), ("subset", 20, 2)),
    *(("unrepeating", 10, 3), ("unrepeating, stateful", 10, 3), ("fit", 5, 2)),
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
        self.counted = 0
        self.of_all_ranks: dict[str, Any] = {}
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
        if not getattr(self.trainer.strategy, "is_idle", False):
            self.counted += len(x)
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
            computed = {name: own[name].compute() for name in UNLOGGED}
            self.of_all_ranks[f"seen {number}"] = computed["seen"].sort().values
            if computed["seen"].numel() > 3 * self.trainer.world_size:
                # NaN where a rank has one sample.
                self.of_all_ranks[f"pearson {number}"] = computed["pearson"]
            self.collected |= {f"{name} {number}": computed[name] for name in ("each", "ranking")}
            for name in UNLOGGED:
                own[name].reset()


@dataclass
class Found:
    """A rank's record: values of all ranks, what else it collected, number and sizes of
    its batches, and the samples of steps in which it was not idle.
    """

    of_all_ranks: dict[str, Any]
    collected: dict[str, Any]
    written: list[tuple[int, int, int]]
    counted: int

    @property
    def sizes(self) -> list[tuple[int, int]]:
        return [(loader, size) for loader, _, size in self.written]


def found_by(trainer: L.Trainer, model: Collects) -> Found:
    logged = {
        name: value for name, value in trainer.callback_metrics.items() if "_step" not in name
    }
    own = [logged.pop(name) for name in list(logged) if name.startswith("own")]
    assert all(map(math.isfinite, own)), "what no rank reduces is some number even on an idle rank"
    return Found(logged | model.of_all_ranks, model.collected, model.written, model.counted)


def evaluate(kind: training.Kind, directory: Path, cases: list[Case]) -> dict[Case, Found]:
    found = {}
    for case in cases:
        strategy = training.make_strategy(kind, directory) if case.ranks > 1 else "auto"
        limits: Any = {"limit_val_batches": 1} if case.reader == "limited" else {}
        trainer = training.make_trainer(strategy, devices=case.ranks, **limits)
        loaders = case.loaders()
        before = [each.batch_sampler for each in loaders]
        # As it may be: users' samplers draw differently on each rank.
        torch.manual_seed(trainer.global_rank)
        model = Collects(len(loaders))
        if case.reader == "fit":
            trainer.fit(model, loader(6), loaders)
        else:
            trainer.validate(model, loaders, verbose=False)
        if case.has_unrepeating_sampler:  # once more: nothing has put a sampler in
            model = Collects(len(loaders))
            trainer.validate(model, loaders, verbose=False)
        found[case] = found_by(trainer, model)
        assert all(each.batch_sampler is was for each, was in zip(loaders, before, strict=True))
    return found


def assert_as_one_process(case: Case, mine: Found, one: Found) -> None:
    """Values are those of all samples in one process."""
    missing = one.of_all_ranks.keys() - mine.of_all_ranks.keys()
    assert all(name.startswith("pearson") for name in missing), (case, missing)
    expected = {name: value for name, value in one.of_all_ranks.items() if name not in missing}
    torch.testing.assert_close({case: mine.of_all_ranks}, {case: expected})


# At most one batch, half of the samples, and all of them in each of three evaluations.
READ_OTHERWISE_THAN_ONCE = ("limited", "subset", "fit")


def assert_each_sample_counts_once(case: Case, of_ranks: list[Found]) -> None:
    """``strategy.is_idle`` is true where a rank repeats a sample."""
    samples = sum(len(each.dataset) for each in case.loaders())
    assert sum(found.counted for found in of_ranks) == samples, case


def assert_as_stock(case: Case, mine: Found, stocks: Found) -> None:
    """A rank collects stock's samples in stock's order."""
    training.assert_same({case: mine.collected}, {case: stocks.collected})


def assert_at_most_one_step_more(case: Case, mine: Found, stocks: Found) -> None:
    """A rank takes as many steps as with stock, or one more with each loader."""
    ours = Counter(number for number, _ in mine.sizes)
    for number, steps in Counter(number for number, _ in stocks.sizes).items():
        assert steps <= ours[number] <= steps + 1, case


@pytest.mark.parametrize("ranks", [2, 3])
def test_values_are_those_of_one_process_and_all_else_is_stocks(ranks: int, tmp_path: Path) -> None:
    """Every rank has stock's samples in stock's order, and one process's values.

    It takes at most one step more, which only fills up.
    """
    cases = [Case(*case, ranks) for case in CASES]
    alone = [Case(*case, 1) for case in CASES]
    even = [case for case in cases if not case.has_unrepeating_sampler]
    ours = training.on_ranks("ours", evaluate, tmp_path, cases, world_size=ranks)
    stock = training.on_ranks("stock", evaluate, tmp_path, even, world_size=ranks)
    (one,) = training.on_ranks("stock", evaluate, tmp_path / "stock", alone, world_size=1)
    for case in cases:
        if case.reader not in READ_OTHERWISE_THAN_ONCE:
            assert_each_sample_counts_once(case, [rank[case] for rank in ours])
    for mine, stocks in zip(ours, stock, strict=True):
        for case, single in zip(cases, alone, strict=True):
            assert mine[case].sizes == ours[0][case].sizes, case
            if case.reader != "limited":  # one process with the same limit reads other samples
                assert_as_one_process(case, mine[case], one[single])
        for case in even:
            if not case.reads_other_samples_than_stock:
                assert_at_most_one_step_more(case, mine[case], stocks[case])
                if case.is_filled_up:
                    assert_as_stock(case, mine[case], stocks[case])
