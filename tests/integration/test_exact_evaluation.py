"""An evaluation on several ranks counts each sample once, however it is read, if the strategy
divides the samples.

Logged values are those of one process. Everything else that a rank collects is stock's.
One model collects in all ways in each case; one start of the ranks plays all cases.
``test_divided_evaluation`` has samples that users divide.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SubsetRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryRecall,
    MulticlassAccuracy,
)
from torchmetrics.wrappers import ClasswiseWrapper

from lightning_ddp_ext import ExactDistributedSampler
from tests.harness.training import (
    Kind,
    assert_same,
    make_strategy,
    make_trainer,
    on_ranks,
)
from tests.integration.continuing import workers

# Data.

Batch = dict[str, Tensor]


def scores(samples: int) -> list[Batch]:
    """Return the same rows in each call: score, label, group and index."""
    drawn = torch.rand(samples, 2, generator=torch.Generator().manual_seed(samples))
    return [
        {
            "x": x,
            "label": (y < 0.5).long(),
            "group": torch.tensor(index % 3),
            "index": torch.tensor(index),
        }
        for index, (x, y) in enumerate(drawn)
    ]


def loader(
    samples: int, batch_size: int | None = 1, kind: Any = DataLoader, **options: Any
) -> DataLoader[Any]:
    """Return a loader of a number of samples."""
    chosen = options if "batch_sampler" in options else {"batch_size": batch_size, **options}
    return kind(scores(samples), **chosen)


class Rotating(deque[int]):
    """A user's sampler that begins each time with another sample, without drawing."""

    def __iter__(self) -> Iterator[int]:
        self.rotate()
        return iter([self[place] for place in range(len(self))])


# Ways to read.

WORKERS = workers(2, persistent_workers=True)

# Make loaders of so many samples, in batches of this size.
READERS: dict[str, Callable[[int, int], list[DataLoader[Any]]]] = {
    "batches": lambda samples, size: [loader(samples, size)],
    "items": lambda samples, size: [loader(samples, None)],
    "workers": lambda samples, size: [loader(samples, size, **WORKERS)],
    "stateful": lambda samples, size: [loader(samples, size, StatefulDataLoader)],
    "two": lambda samples, size: [loader(samples, size), loader(samples + 1, size)],
    "several": lambda samples, size: [
        loader(samples, size),
        loader(7, 1),
        loader(10, 3),
        loader(1, 1),
        loader(23, 6),
    ],
    "two, workers": lambda samples, size: [
        loader(samples, size),
        loader(samples + 1, size, **WORKERS),
    ],
    "shuffled": lambda samples, size: [loader(samples, size, shuffle=True)],
    "subset": lambda samples, size: [
        loader(samples, size, sampler=SubsetRandomSampler(range(0, samples, 2)))
    ],
    "rotating": lambda samples, size: [loader(samples, size, sampler=Rotating(range(samples)))],
    "unrepeating": lambda samples, size: [
        loader(samples, size, sampler=ExactDistributedSampler(range(samples)))
    ],
    "unrepeating, stateful": lambda samples, size: [
        loader(samples, size, StatefulDataLoader, sampler=ExactDistributedSampler(range(samples)))
    ],
}


# Ways to evaluate: with Trainers that ``make`` makes, of which the last one is returned.

MakeTrainer = Callable[..., L.Trainer]


def validate(
    make: MakeTrainer, model: L.LightningModule, loaders: Any, **options: Any
) -> L.Trainer:
    trainer = make(**options)
    trainer.validate(model, loaders, verbose=False)
    return trainer


def validate_again(make: MakeTrainer, model: L.LightningModule, loaders: Any) -> L.Trainer:
    """Validate on loaders that another Trainer has read before."""
    validate(make, Collects(len(loaders)), loaders)
    return validate(make, model, loaders)


def validate_in_fit(make: MakeTrainer, model: L.LightningModule, loaders: Any) -> L.Trainer:
    """Validate after a step of training, with which the fit continues."""
    trainer = make()
    trainer.fit(model, loader(6), loaders)
    return trainer


def validate_one_batch(make: MakeTrainer, model: L.LightningModule, loaders: Any) -> L.Trainer:
    return validate(make, model, loaders, limit_val_batches=1)


# Cases, by what is compared with stock.


class Case(NamedTuple):
    """A way to read, the numbers of samples and of those in a batch, and a way to
    evaluate.
    """

    reader: str
    samples: int
    batch_size: int
    evaluate: Callable[..., L.Trainer] = validate


LIMITED = [
    Case("batches", 1, 2, validate_one_batch),
    Case("batches", 13, 3, validate_one_batch),
]
READ_AS_STOCK = [
    *(Case("batches", *sizes) for sizes in ((1, 1), (4, 3), (5, 1), (13, 3))),
    *(Case(reader, 1, 2) for reader in ("stateful", "two")),
    *(Case(reader, 13, 3) for reader in ("items", "stateful", "two", "workers")),
    Case("several", 2, 2),
    Case("shuffled", 13, 4),
]
# Stock's ranks read other samples.
READ_OTHERWISE = [
    Case("subset", 20, 2),
    Case("rotating", 7, 2),
    Case("two, workers", 5, 2, validate_in_fit),
]
# Stock's ranks would wait for a rank that has fewer batches.
UNREPEATING = [
    Case("unrepeating", 10, 3, validate_again),
    Case("unrepeating, stateful", 10, 3, validate_again),
]
UNLIMITED = [*READ_AS_STOCK, *READ_OTHERWISE, *UNREPEATING]


# Ways to collect: metrics, logged values, lists and collectives.


class Total(Metric):
    """Adds in place to its state, which becomes a double with the first values."""

    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), "sum")

    def update(self, values: Tensor) -> None:
        self.total = self.total.double()
        self.total += values.sum()

    def compute(self) -> Tensor:
        return self.total


# Metrics, and the names of the values that update them.
METRICS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "mean": (MeanMetric, ["x"]),
    "sum": (Total, ["x"]),
    "auroc": (BinaryAUROC, ["x", "label"]),
    # Two metrics that share a state.
    "shared": (lambda: MetricCollection([BinaryAccuracy(), BinaryRecall()]), ["x", "label"]),
    "seen": (CatMetric, ["index"]),
    "classes": (
        lambda: ClasswiseWrapper(MulticlassAccuracy(3, average=None)),
        ["group", "label"],
    ),
}


# Logged values that the ranks reduce: their functions of scores and labels, and options
# of ``self.log``.
LOGGED: dict[str, tuple[Callable[[Tensor, Tensor], Any], dict[str, Any]]] = {
    "mean": (lambda x, label: x.mean(), {"on_step": True, "on_epoch": True}),
    "only_step": (lambda x, label: x.mean(), {"on_step": True, "on_epoch": False}),
    "min": (lambda x, label: x.min(), {"reduce_fx": "min"}),
    "max": (lambda x, label: x.max(), {"reduce_fx": "max", "on_step": True, "on_epoch": True}),
    "sum": (lambda x, label: x.sum(), {"reduce_fx": "sum"}),
    "double": (lambda x, label: x.double().mean(), {}),
    "number": (lambda x, label: len(x), {"reduce_fx": "sum"}),
    "least": (lambda x, label: label.min(), {"reduce_fx": "min"}),
}


class Collects(L.LightningModule):
    """Collects what it evaluates in each way, and trains on anything.

    Attributes:
        joint: values of the samples of all ranks, by name.
        collected: what depends on the samples of each rank, repeated ones included.
        sizes: the loader and the size of each batch of the last evaluation.
        counted: the samples in steps of this evaluation in which the rank was not idle.
    """

    def __init__(self, loaders: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.trained = Total()
        self.metrics = nn.ModuleList(
            nn.ModuleDict({name: make() for name, (make, _) in METRICS.items()})
            for _ in range(loaders)
        )
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
        self.update_metrics(self.metrics[dataloader_idx], batch)
        self.log_values(batch["x"], batch["label"])
        self.outputs.append(batch["x"])
        self.sizes.append((dataloader_idx, len(batch["x"])))
        if not getattr(self.trainer.strategy, "is_idle", False):
            self.counted += len(batch["x"])

    def update_metrics(self, metrics: Any, batch: Batch) -> None:
        for name, (_, inputs) in METRICS.items():
            metrics[name].update(*(batch[field] for field in inputs))
        self.log("mean metric", metrics["mean"], on_step=True, on_epoch=True)
        self.log_dict(
            {"sum metric": metrics["sum"], "auroc": metrics["auroc"], **metrics["shared"]}
        )

    def log_values(self, x: Tensor, label: Tensor) -> None:
        log = partial(self.log, batch_size=len(x))
        for name, (function, options) in LOGGED.items():
            log(name, function(x, label), sync_dist=True, **options)
        log("in a group", x.mean(), sync_dist=True, sync_dist_group=torch.distributed.group.WORLD)
        log("own", x.mean())

    def on_validation_epoch_end(self) -> None:
        outputs = torch.cat(self.outputs)
        self.collected = {"own": outputs, "gathered": self.all_gather(outputs)}
        for number, metrics in enumerate(self.metrics):
            for name in ("seen", "classes"):
                self.joint[f"{name} {number}"] = metrics[name].compute()
                metrics[name].reset()
            self.joint[f"seen {number}"] = self.joint[f"seen {number}"].sort().values


# What the ranks record.


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


def new_trainer(kind: Kind, directory: Path, ranks: int, **options: Any) -> L.Trainer:
    trainer = make_trainer(
        make_strategy(kind, directory) if ranks > 1 else "auto", devices=ranks, **options
    )
    torch.manual_seed(trainer.global_rank)  # users' samplers may draw differently on each rank
    return trainer


def evaluate_case(make: MakeTrainer, case: Case) -> Record:
    """Return this rank's record of a case."""
    loaders = READERS[case.reader](case.samples, case.batch_size)
    model = Collects(len(loaders))
    metrics = case.evaluate(make, model, loaders).callback_metrics
    logged = {name: value for name, value in metrics.items() if "_step" not in name}
    own = {name: logged.pop(name) for name in list(logged) if name.startswith("own")}
    return Record(logged | model.joint, model.collected, own, model.sizes, model.counted)


def evaluate(kind: Kind, directory: Path, cases: list[Case], ranks: int) -> dict[Case, Record]:
    """Return this rank's record of each case."""
    return {
        case: evaluate_case(partial(new_trainer, kind, directory, ranks), case) for case in cases
    }


class Evaluated(NamedTuple):
    """The records of cases: by rank, on three ranks with ours and with stock, and with
    stock in one process.
    """

    ours: list[dict[Case, Record]]
    stock: list[dict[Case, Record]]
    alone: dict[Case, Record]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """Evaluate once for the four tests below."""
    directory = tmp_path_factory.mktemp("evaluated")
    ours = on_ranks("ours", evaluate, directory, [*UNLIMITED, *LIMITED], 3, world_size=3)
    stock = on_ranks("stock", evaluate, directory, [*READ_AS_STOCK, *LIMITED], 3, world_size=3)
    (alone,) = on_ranks("stock", evaluate, directory / "stock", UNLIMITED, 1, world_size=1)
    return Evaluated(ours, stock, alone)


def test_values_are_those_of_one_process(evaluated: Evaluated) -> None:
    """Logged values and metrics count each sample once, on every rank."""
    for records in evaluated.ours:
        for case, alone in evaluated.alone.items():
            torch.testing.assert_close(
                records[case].joint, alone.joint, msg=lambda text, case=case: f"{case}: {text}"
            )


def test_ranks_that_are_not_idle_read_each_sample_once(evaluated: Evaluated) -> None:
    """User code finds out by ``strategy.is_idle`` whether its step counts."""
    for case, record in evaluated.alone.items():
        assert sum(records[case].counted for records in evaluated.ours) == record.counted, case


def test_a_rank_collects_what_it_collects_with_stock(evaluated: Evaluated) -> None:
    """It has stock's samples in stock's order, including those that it repeats, in as many
    steps as with stock, or one more with each loader.
    """
    for own, others in zip(evaluated.ours, evaluated.stock, strict=True):
        for case in others:
            assert_same(own[case].collected, others[case].collected)
            steps = own[case].steps_by_loader()
            for number, steps_of_stock in others[case].steps_by_loader().items():
                assert steps_of_stock <= steps[number] <= steps_of_stock + 1, case


def test_collectives_of_a_users_step_have_the_same_shapes(evaluated: Evaluated) -> None:
    """The ranks have batches of the same sizes. Even a rank that is idle in its only step
    has numbers as values of its own.
    """
    for records in evaluated.ours:
        for case, record in records.items():
            assert record.sizes == evaluated.ours[0][case].sizes, case
            assert all(value.isfinite() for value in record.own.values()), case
