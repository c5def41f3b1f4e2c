"""`self.log(..., sync_dist=True)`: stock's values at every read, without a barrier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric, MetricCollection, SumMetric

from lightning_ddp_ext import DDPExtError, DivergenceError
from lightning_ddp_ext.errors import RankAbsentError
from tests.harness import training
from tests.harness.training import Net


class AllKinds(Net):
    """Logs in every way that there is, from everywhere, and looks at it before and
    after each step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()
        self.collection = MetricCollection([SumMetric()])
        self.seen: list[tuple[str, Any]] = []

    def look(self) -> None:
        for which in ("callback_metrics", "logged_metrics", "progress_bar_metrics"):
            metrics = getattr(self.trainer, which)
            self.seen += [(f"{which} {name}", _copied(value)) for name, value in metrics.items()]

    def training_step(self, batch: training.Batch, index: int) -> Tensor:
        self.look()
        loss = self.loss(batch)
        self.log("mean", loss, on_step=True, on_epoch=True, sync_dist=True, prog_bar=True)
        self.log_values(loss, index)
        self.log("immediately", loss, sync_dist=True, sync_dist_group=dist.group.WORLD)
        self.log_metrics(loss)
        self.seen.append(
            ("reduced", self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="sum"))
        )
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
        self.log_dict(
            {f"{number}": loss * number for number in range(8)}, sync_dist=True, on_epoch=True
        )

    def log_metrics(self, loss: Tensor) -> None:
        self.metric.update(loss)
        self.collection.update(loss)
        self.log("metric", self.metric, sync_dist=True)
        self.log_dict(self.collection, sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.log(
            "after the step", 1.0 + self.global_rank, sync_dist=True, on_step=True, on_epoch=True
        )

    def on_train_epoch_end(self) -> None:
        if self.global_rank == 1:  # as the progress bar does on rank 0
            self.look()
        self.log("after the epoch", 2.0 + self.global_rank, sync_dist=True)

    def validation_step(self, batch: training.Batch, index: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.log("val_mean", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("val_max", loss, on_step=True, reduce_fx="max", sync_dist=True)
        self.log(f"val {dataloader_idx}", loss, sync_dist=True, add_dataloader_idx=False)

    test_step = validation_step

    def val_dataloader(self) -> list[DataLoader[Any]]:
        return [
            DataLoader(training.data(8), batch_size=2),
            DataLoader(training.data(4), batch_size=1),
        ]

    test_dataloader = val_dataloader


class Looks(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        module.look()

    on_train_epoch_end = on_validation_end = on_test_end = on_train_end = on_train_batch_end


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def train_all_kinds(kind: training.Kind, directory: Path) -> dict[str, Any]:
    L.seed_everything(7)
    model = AllKinds()
    trainer = training.fit(kind, directory, model, Looks(), log_every_n_steps=2)
    return {"tested": trainer.test(model, verbose=False), "seen": model.seen}


@pytest.mark.lowest
def test_everything_that_reads_metrics_sees_what_it_sees_with_stock_ddp(tmp_path: Path) -> None:
    """Values, types and order, at a step's beginning, after each step and after each
    epoch, on each rank.
    """
    for ours, stock in zip(*training.on_both(train_all_kinds, tmp_path), strict=True):
        assert [name for name, _ in ours["seen"]] == [name for name, _ in stock["seen"]]
        assert len(ours["seen"]) > 500
        training.assert_same(
            [value for _, value in ours["seen"]], [value for _, value in stock["seen"]]
        )
        training.assert_same(ours["tested"], stock["tested"])


class Logs(Net):
    """Logs a number of values in each training step, and nothing else."""

    def __init__(self, number: int, **options: Any) -> None:
        super().__init__()
        self.number = number
        self.options = {"sync_dist": True, **options}

    def training_step(self, batch: training.Batch, index: int) -> Tensor:
        loss = self.loss(batch)
        for number in range(self.number):
            self.log(f"{number}", loss, reduce_fx=("mean", "max")[number % 2], **self.options)
        return loss


def collectives(kind: training.Kind, directory: Path) -> dict[str, Counter[str]]:
    """Of an epoch of 4 steps each, by kind; those that a fit needs anyway are taken
    off.
    """

    def counted(model: Net, **options: Any) -> Counter[str]:
        trainer = training.make_trainer(
            training.make_strategy(kind, directory), max_epochs=1, limit_val_batches=0, **options
        )
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            trainer.fit(model)
        return Counter(
            event.name.removeprefix("gloo:") for event in recorded.events() if "gloo:" in event.name
        )

    counted(Logs(1))  # opens groups
    nothing = counted(Logs(0))
    return {
        "two steps": nothing - counted(Logs(0), limit_train_batches=2),
        "step": counted(Logs(10)) - nothing,
        "more": counted(Logs(40)) - nothing,
        "epoch": counted(Logs(10, on_step=False, on_epoch=True)) - nothing,
    }


@pytest.mark.nightly
def test_a_step_makes_one_collective(tmp_path: Path) -> None:
    """This holds for up to 127 values, without a barrier, also at an epoch's end; stock
    makes two for each value.

    A step without values makes stock's exchanges, but for the broadcast of whether
    there was a signal.
    """
    ours, stock = (by_rank[0] for by_rank in training.on_both(collectives, tmp_path))
    assert stock["two steps"] - ours["two steps"] == {"broadcast": 2}
    assert stock["step"] == {"barrier": 40, "all_reduce": 40}
    assert ours["step"] == ours["more"] == {"all_gather": 4}
    assert ours["epoch"] == {"all_gather": 1}
    assert stock["epoch"] == {"barrier": 15, "all_reduce": 15}  # of a mean also the batch size


class Reads(Net):
    """Reads what it has logged within the step: on all ranks, on rank 1 only, in hooks,
    and between collectives.
    """

    def __init__(self, is_automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = is_automatic
        self.read: list[float] = []

    def log_and_read(self, name: str) -> None:
        self.log(name, float(self.global_rank), sync_dist=True, on_step=True, on_epoch=True)
        if self.global_rank == 1:
            self.read += self.values()

    def values(self) -> list[float]:
        """Return all values that this rank can read; a value that is logged later in
        the step is not among them.
        """
        properties = self.trainer.callback_metrics, self.trainer.logged_metrics
        return [float(value) for metrics in properties for _, value in sorted(metrics.items())]

    def training_step(self, batch: training.Batch, index: int) -> Tensor:
        loss = self.loss(batch)
        self.log_and_read("before")
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.log_and_read("after a collective")
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
        self.log_and_read("last")
        self.read += self.values()
        return loss

    def on_before_zero_grad(self, *_: Any) -> None:
        self.log_and_read("in a hook")

    def on_train_batch_end(self, *_: Any) -> None:
        self.log_and_read("after the step")

    def on_train_epoch_end(self) -> None:
        if self.global_rank == 0:
            self.read += self.values()


def read_within(kind: training.Kind, directory: Path) -> list[Any]:
    seen: list[Any] = []
    for is_automatic in (True, False):
        L.seed_everything(7)
        model = Reads(is_automatic)
        training.fit(kind, directory, model, limit_val_batches=0)
        seen.append(model.read)
    return seen


@pytest.mark.lowest
def test_no_read_sees_a_value_that_is_not_reduced(tmp_path: Path) -> None:
    """A read on all ranks or on one, anywhere in a step, returns stock's value, also
    between backward passes.
    """
    ours, stock = training.on_both(read_within, tmp_path)
    training.assert_same(ours, stock)
    for automatic, manual in ours:
        assert set(automatic) == set(manual) == {0.5}


class Differs(Net):
    """Logs ``a``, or nothing (an empty ``common``), and on rank 1 other names from a
    step on, of another type.
    """

    def __init__(
        self,
        others: list[str],
        step: int,
        common: str = "a",
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        super().__init__()
        self.others = others
        self.step = step
        self.common = common
        self.dtype_of_others = dtype
        self.options = options

    def training_step(self, batch: training.Batch, index: int) -> Tensor:
        is_other = self.global_rank == 1 and index >= self.step
        value = torch.ones((), dtype=self.dtype_of_others if is_other else torch.float32)
        for name in self.others if is_other else self.common:
            self.log(name, value, sync_dist=True, **self.options)
        return self.loss(batch)


class Case(NamedTuple):
    """What rank 1 logs from a step on, and the error of all ranks."""

    others: list[str]
    step: int
    error: type[DDPExtError]
    message: str
    options: Mapping[str, Any] = MappingProxyType({})


A = "training_step.a (mean)"
B = "training_step.b (mean)"
EPOCH = {"on_step": False, "on_epoch": True}
MANY = [f"{number}" for number in range(70)]
CASES = {
    "one more": Case(
        ["a", "b"], 2, DivergenceError, f"rank 1 logged {B} (compared with rank 0); every rank"
    ),
    "another": Case(["b"], 2, DivergenceError, f"rank 1 logged {B} and did not log {A}"),
    "nothing": Case([], 0, RankAbsentError, f"rank 0 began the reduction of {A}"),
    "something": Case(
        ["a"], 2, RankAbsentError, f"rank 1 began the reduction of {A}", {"common": ""}
    ),
    "another type": Case(
        ["a"],
        2,
        DivergenceError,
        "rank 1 logged training_step.a (mean, float64) and did not log training_step.a (mean,"
        " float32)",
        {"dtype": torch.float64},
    ),
    # The first eight of the 70 names are listed.
    "many": Case(MANY, 0, DivergenceError, "training_step.7 (mean) and 62 more and did not log"),
    "nothing in the last step": Case([], 3, DivergenceError, f"rank 1 did not log {A}"),
    "another after the epoch": Case(
        ["b"], 0, DivergenceError, f"rank 1 logged {B} and did not log {A}", EPOCH
    ),
    "one more after the epoch": Case(
        ["a", "b"], 0, DDPExtError, f"began the reduction of {B}", EPOCH
    ),
}


def fail(kind: training.Kind, directory: Path) -> dict[str, str]:
    """Return the error of each case, one after another in one process."""
    messages = {}
    for name, case in CASES.items():
        model = Differs(case.others, case.step, **case.options)
        with pytest.raises(case.error) as error:
            training.fit(kind, directory, model, limit_val_batches=0)
        messages[name] = str(error.value)
    return messages


def test_ranks_that_log_different_values_all_raise(tmp_path: Path) -> None:
    """The error names each rank's values, instead of waiting: in a step, or at the end
    of an epoch.
    """
    for messages in training.on_ranks("ours", fail, tmp_path):
        for name, case in CASES.items():
            assert case.message in messages[name], name


class Monitored(Net):
    """Logs a value that falls on rank 0 and rises on rank 1."""

    def validation_step(self, batch: training.Batch, index: int) -> None:
        self.log("own", self.current_epoch * (2.0 * self.global_rank - 1))


class BestCheckpoints(NamedTuple):
    """What a rank records of the best checkpoints, by file name."""

    scores: dict[str, float]
    best: tuple[str, float]
    worst_kept: tuple[str, float]


def monitor(kind: training.Kind, directory: Path) -> BestCheckpoints:
    checkpoint = ModelCheckpoint(directory, "{epoch}-{own:.0f}", monitor="own", save_top_k=2)
    training.fit(kind, directory, Monitored(), checkpoint, enable_checkpointing=True, max_epochs=3)
    scores = {Path(path).name: float(score) for path, score in checkpoint.best_k_models.items()}
    best = Path(checkpoint.best_model_path).name
    worst_kept = Path(checkpoint.kth_best_model_path).name
    return BestCheckpoints(
        scores,
        (best, float(checkpoint.best_model_score)),
        (worst_kept, float(checkpoint.kth_value)),
    )


def test_all_ranks_record_the_best_checkpoints_of_rank_zero(tmp_path: Path) -> None:
    """With a monitored value that differs between ranks, stock records other files."""
    ours, stock = training.on_both(monitor, tmp_path)
    assert stock[0] != stock[1]
    assert ours[1] == ours[0]
    best_name, _ = ours[0].best
    assert best_name == "epoch=1-own=-1.ckpt"
