"""`self.log(..., sync_dist=True)` gives stock's values at every read."""

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from tests.harness.training import Batch, Kind, Net, Rows, assert_same, data, fit, on_both

Read = dict[str, Any]  # all metrics that can be read at a point, by name
ENOUGH_VALUES = 500  # of all reads; so many show that the model logs as it should


class AllKinds(Net):
    """Logs in every way that there is, and reads it before and after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()
        self.collection = MetricCollection([SumMetric()])
        self.reads: list[Read] = []

    def read(self) -> None:
        read: Read = {}
        for kind in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
            for name, value in getattr(self.trainer, kind).items():
                is_tensor = isinstance(value, Tensor)
                read[f"{kind} {name}"] = value.detach().clone() if is_tensor else value
        self.reads.append(read)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        self.read()
        loss = self.loss(batch)
        self.log("mean", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        self.log_values(loss, index)
        self.log_metrics(loss)
        reduced = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="sum")
        self.reads.append({"reduced": reduced})
        self.log("mean of all", loss, sync_dist=True)
        return loss

    def log_values(self, loss: Tensor, index: int) -> None:
        for op in ("sum", "min", "max", torch.mean):
            self.log(f"{op}", loss, on_step=True, on_epoch=True, reduce_fx=op, sync_dist=True)
        self.log("double", loss.double() / 3, sync_dist=True)
        self.log("half", loss.half(), sync_dist=True)
        self.log("of rank 1", torch.nan if self.global_rank == 0 else 1.0, sync_dist=True)
        self.log("integer", torch.tensor(index), sync_dist=True)
        self.log("number", 0.1 * (1 + self.global_rank), sync_dist=True, prog_bar=True)
        self.log("nan", loss * torch.nan, sync_dist=True)
        self.log("one", loss.reshape(1), sync_dist=True, batch_size=7)
        self.log("graph", loss, sync_dist=True, enable_graph=True)
        self.log("epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("twice", loss, sync_dist=True)
        self.log("twice", loss + 1, sync_dist=True)
        self.log("own", loss)
        self.log("of rank 0", loss, sync_dist=True, rank_zero_only=True)
        self.log("of a group", loss, sync_dist=True, sync_dist_group=dist.group.WORLD)
        products = {f"{number}": loss * number for number in range(8)}
        self.log_dict(products, sync_dist=True, on_epoch=True)
        self.log_dict({f"of many {number}": loss + number for number in range(250)}, sync_dist=True)

    def log_metrics(self, loss: Tensor) -> None:
        self.metric.update(loss)
        self.collection.update(loss)
        self.log("metric", self.metric, sync_dist=True)
        self.log_dict(self.collection, sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        value = 1.0 + self.global_rank
        self.log("after the step", value, sync_dist=True, on_step=True, on_epoch=True)

    def on_train_epoch_end(self) -> None:
        if self.global_rank == 1:  # as the progress bar does on rank 0
            self.read()
        self.log("after the epoch", 2.0 + self.global_rank, sync_dist=True)

    def validation_step(self, batch: Batch, index: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.log("val_mean", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("val_max", loss, on_step=True, reduce_fx="max", sync_dist=True)
        self.log(f"val {dataloader_idx}", loss, sync_dist=True, add_dataloader_idx=False)

    test_step = validation_step

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [DataLoader(data(8), batch_size=2), DataLoader(data(4), batch_size=1)]

    test_dataloader = val_dataloader


class Reader(L.Callback):
    """Reads all metrics after each step and epoch."""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        module.read()

    on_train_epoch_end = on_train_end = on_train_batch_end
    on_validation_epoch_end = on_validation_end = on_test_end = on_train_batch_end


def train_all_kinds(kind: Kind, directory: Path) -> list[Read]:
    """Return what a rank read, and at the end what ``trainer.test`` returned."""
    L.seed_everything(7)
    model = AllKinds()
    trainer = fit(kind, directory, model, Reader(), log_every_n_steps=2)
    tested = trainer.test(model, verbose=False)
    return [*model.reads, {"tested": tested}]


@pytest.mark.lowest
def test_everything_that_reads_metrics_sees_what_it_sees_with_stock_ddp(tmp_path: Path) -> None:
    """Values, types and order are stock's before and after each step and epoch."""
    ours, stock = on_both(train_all_kinds, tmp_path)
    for reads, reads_of_stock in zip(ours, stock, strict=True):
        names = [name for read in reads for name in read]
        assert len(names) > ENOUGH_VALUES
        assert names == [name for read in reads_of_stock for name in read]
        assert_same(reads, reads_of_stock)


class Reads(Net):
    """Logs the rank and reads it within the step.

    All ranks read it, or rank 1 only, in hooks and between collectives.
    """

    def __init__(self, is_automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = is_automatic
        self.values: list[float] = []

    def log_rank(self, name: str) -> None:
        self.log(name, float(self.global_rank), sync_dist=True, on_step=True, on_epoch=True)
        if self.global_rank == 1:
            self.read()

    def read(self) -> None:
        """Read all values logged so far."""
        for metrics in (self.trainer.callback_metrics, self.trainer.logged_metrics):
            self.values += [float(value) for _, value in sorted(metrics.items())]

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss = self.loss(batch)
        self.log_rank("before")
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.log_rank("after a collective")
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        self.log_rank("last")
        if index % 2 == 1:  # in the first step, rank 0 reads nothing
            self.read()
        return loss

    def on_before_zero_grad(self, *_: Any) -> None:
        self.log_rank("in a hook")

    def on_train_batch_end(self, *_: Any) -> None:
        self.log_rank("after the step")

    def on_train_epoch_end(self) -> None:
        if self.global_rank == 0:
            self.read()


def read_within_steps(kind: Kind, directory: Path, is_automatic: bool) -> list[float]:
    model = Reads(is_automatic)
    fit(kind, directory, model, limit_val_batches=0)
    return model.values


@pytest.mark.lowest
@pytest.mark.parametrize("is_automatic", [True, False])
def test_no_read_sees_a_value_that_is_not_reduced(is_automatic: bool, tmp_path: Path) -> None:
    """A read anywhere in a step, on all ranks or on one, returns stock's value.

    This is so also between backward passes.
    """
    mean_of_ranks = (0 + 1) / 2
    ours, stock = on_both(read_within_steps, tmp_path, is_automatic)
    assert ours == stock
    assert {value for values in ours for value in values} == {mean_of_ranks}


class ValidatesOnRankZero(Net):
    """Logs values in training only, and has no buffers, which DDP sends in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 1))

    def validation_step(self, batch: Batch, index: int) -> None:
        self(batch[0])

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Rows(2 if self.global_rank == 0 else 0))


def train_beside_uneven_validation(kind: Kind, directory: Path) -> dict[str, Any]:
    L.seed_everything(7)
    trainer = fit(kind, directory, ValidatesOnRankZero(), num_sanity_val_steps=0)
    return trainer.callback_metrics


def test_a_rank_without_validation_logs_the_same(tmp_path: Path) -> None:
    """A validation without values, which a rank does not run, changes no logged value."""
    assert_same(*on_both(train_beside_uneven_validation, tmp_path))
