"""Ways to read and to collect in an evaluation: logged values are one process's, everything else is stock's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import CatMetric, MeanMetric, Metric, PearsonCorrCoef
from torchmetrics.retrieval import RetrievalMRR

from tests.harness.training import Kind, assert_same, make_strategy, make_trainer, on_ranks

Reader = Literal["batches", "items", "ragged", "stateful", "workers", "two", "limited"]


@dataclass(frozen=True)
class Case:
    reader: Reader
    samples: int
    batch_size: int
    ranks: int


SIZES = tuple(product((1, 2, 4, 5, 7, 12, 13), (1, 2, 3)))
FEW: tuple[tuple[int, int], ...] = ((1, 2), (5, 2), (13, 3))
CASES = [
    *(Case("batches", *size, ranks) for size, ranks in product(SIZES, (2, 3))),
    *(
        Case(reader, *size, ranks)
        for reader, size, ranks in product(("items", "ragged", "stateful", "two", "limited"), FEW, (2, 3))
    ),
    Case("workers", 13, 3, 2),
]


class Ragged(BatchSampler):
    """A user's batch sampler: each batch is one larger than the one before."""

    def __iter__(self) -> Iterator[list[int]]:
        batch: list[int] = []
        size = 1
        for index in self.sampler:
            batch.append(index)
            if len(batch) == size:
                yield batch
                batch = []
                size += 1
        if batch:
            yield batch

    def __len__(self) -> int:
        return sum(1 for _ in self)


def data(samples: int) -> TensorDataset:
    """Return rows of a score, a label and a group."""
    drawn = torch.rand(samples, 2, generator=torch.Generator().manual_seed(samples))
    return TensorDataset(drawn[:, 0], (drawn[:, 1] < 0.5).long(), torch.arange(samples) % 3)


def loaders_of(case: Case) -> list[DataLoader[Any]]:
    def load(samples: int) -> DataLoader[Any]:
        found = data(samples)
        if case.reader == "ragged":
            return DataLoader(found, batch_sampler=Ragged(range(samples), 2, False))
        if case.reader == "items":
            return DataLoader(found, None)
        if case.reader == "stateful":
            return StatefulDataLoader(found, case.batch_size)  # type: ignore[no-any-return]
        workers = 2 if case.reader == "workers" else 0
        return DataLoader(found, case.batch_size, num_workers=workers, persistent_workers=workers > 0)

    more = [load(case.samples + 1)] if case.reader == "two" else []
    return [load(case.samples), *more]


class Items(Metric):
    """Keeps each batch in a list that torchmetrics gathers item by item, next to a number that it reduces."""

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


class Collects(L.LightningModule):
    """Collects what it evaluates in every way that there is."""

    def __init__(self, loaders: int) -> None:
        super().__init__()
        kinds = (MeanMetric, CatMetric, PearsonCorrCoef, Items, lambda: RetrievalMRR(empty_target_action="skip"))
        self.metrics = nn.ModuleList(nn.ModuleList(make() for make in kinds) for _ in range(loaders))
        self.outputs: list[Tensor] = []
        self.written: list[tuple[int, int, int]] = []
        self.exact: dict[str, Any] = {}
        self.collected: dict[str, Any] = {}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        x, y, group = (part.reshape(-1) for part in batch)
        mean, cat, pearson, items, ranking = self.metrics[dataloader_idx]  # type: ignore[misc]
        mean.update(x)
        cat.update(x)
        pearson.update(x, y.float())
        items.update(x)
        ranking.update(x, y, group)
        self.log("mean metric", mean)
        self.log("mean", x.mean(), sync_dist=True, on_step=True, on_epoch=True, batch_size=len(x))
        self.log("least", x.min(), sync_dist=True, reduce_fx="min", batch_size=len(x))
        self.log("number", float(len(x)), sync_dist=True, reduce_fx="sum", batch_size=len(x))
        self.outputs.append(x)
        everywhere: Any = self.all_gather(x)  # has the same shape on all ranks
        assert everywhere.numel() == len(x) * self.trainer.world_size
        return x

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.written.append((dataloader_idx, batch_idx, len(outputs)))

    def on_validation_epoch_end(self) -> None:
        self.collected["own"] = torch.cat(self.outputs)
        self.collected["gathered"] = self.all_gather(torch.cat(self.outputs))
        for number, (_, cat, pearson, items, ranking) in enumerate(self.metrics):  # type: ignore[misc]
            self.exact[f"seen {number}"] = cat.compute().sort().values
            if len(torch.cat(self.outputs)) > 3:  # torchmetrics joins ranks with one sample to NaN
                self.exact[f"pearson {number}"] = pearson.compute()
            self.collected[f"items {number}"] = items.compute()
            self.collected[f"ranking {number}"] = ranking.compute()


@dataclass
class Found:
    exact: dict[str, Any]
    collected: dict[str, Any]
    written: list[tuple[int, int, int]]


def evaluate(kind: Kind, directory: Path, cases: list[Case]) -> dict[Case, Found]:
    found = {}
    for case in cases:
        loaders = loaders_of(case)
        model = Collects(len(loaders))
        strategy = make_strategy(kind, directory) if cases[0].ranks > 1 else "auto"
        limits: Any = {"limit_val_batches": 1} if case.reader == "limited" else {}
        trainer = make_trainer(strategy, devices=cases[0].ranks, **limits)
        trainer.validate(model, loaders, verbose=False)
        logged = {name: value for name, value in trainer.callback_metrics.items() if "_step" not in name}
        found[case] = Found(logged | model.exact, model.collected, model.written)
    return found


def sizes(found: Found) -> list[tuple[int, int]]:
    return [(loader, size) for loader, _, size in found.written]


@pytest.mark.parametrize("ranks", [2, 3])
def test_values_are_those_of_one_process_and_all_else_is_stocks(ranks: int, tmp_path: Path) -> None:
    """Every rank has stock's samples in stock's order, and at most one step more, which only fills up."""
    cases = [case for case in CASES if case.ranks == ranks]
    alone = [Case(case.reader, case.samples, case.batch_size, 1) for case in cases]
    ours = on_ranks("ours", evaluate, tmp_path, cases, world_size=ranks)
    stock = on_ranks("stock", evaluate, tmp_path, cases, world_size=ranks)
    (one,) = on_ranks("stock", evaluate, tmp_path / "stock", alone, world_size=1)
    for case, single in zip(cases, alone, strict=True):
        # One process with the same limit reads other samples.
        is_whole = case.reader != "limited"
        for rank in range(ranks):
            mine = ours[rank][case]
            stocks = stock[rank][case]
            same_steps = len(mine.written) == len(stocks.written)
            assert same_steps or len(mine.written) <= len(stocks.written) + len(loaders_of(case)), case
            assert sizes(mine) == sizes(ours[0][case]), case
            if is_whole or math.ceil(case.samples / ranks) > case.batch_size:
                assert_same(mine.collected, stocks.collected)
            if is_whole:
                expected = {name: one[single].exact[name] for name in mine.exact}
                torch.testing.assert_close(mine.exact, expected, msg=str(case))
