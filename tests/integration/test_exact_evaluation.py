"""An evaluation on several ranks counts each sample once, however it is read or divided.

Logged values are those of one process. Everything else that a rank collects is stock's,
and so are evaluations in which samples cannot or must not count once.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    SubsetRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryAUROC,
    BinaryRecall,
    MulticlassAccuracy,
)
from torchmetrics.wrappers import ClasswiseWrapper

from lightning_ddp_ext import ExactDistributedSampler, RankFailedError
from tests.harness.ranks import run_ranks
from tests.harness.training import (
    Kind,
    Streamed,
    assert_same,
    make_strategy,
    make_trainer,
    on_both,
    on_ranks,
    raised,
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


# Samples that the strategy divides.

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


# Ways to evaluate with Trainers that ``make`` makes; each returns the last Trainer.

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
    """Collects what it evaluates: in metrics, in logged values of each kind, in lists and
    by collectives. It trains on anything.

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
        x = batch["x"]
        metrics: Any = self.metrics[dataloader_idx]
        for name, (_, inputs) in METRICS.items():
            metrics[name].update(*(batch[field] for field in inputs))
        self.log("mean metric", metrics["mean"], on_step=True, on_epoch=True)
        self.log_dict(
            {"sum metric": metrics["sum"], "auroc": metrics["auroc"], **metrics["shared"]}
        )
        self.log_values(x, batch["label"])
        self.outputs.append(x)
        self.sizes.append((dataloader_idx, len(x)))
        if not getattr(self.trainer.strategy, "is_idle", False):
            self.counted += len(x)

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
    strategy = make_strategy(kind, directory) if ranks > 1 else "auto"
    trainer = make_trainer(strategy, devices=ranks, **options)
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


# Samples that the user divides.


class Ragged(BatchSampler):
    """A user's batch sampler: each of three batches is larger than the one before."""

    def __iter__(self) -> Iterator[list[int]]:
        samples = list(self.sampler)
        return iter([samples[:1], samples[1:3], samples[3:]])

    def __len__(self) -> int:
        return 3


class Scorer(L.LightningModule):
    """Logs a metric of each loader, and values, at the end of an epoch.

    Attributes:
        samples: those of each batch that this rank evaluated, by loader.
    """

    def __init__(self, loaders: int = 1) -> None:
        super().__init__()
        self.aurocs = nn.ModuleList(BinaryAUROC() for _ in range(loaders))
        self.samples: dict[int, list[list[int]]] = {number: [] for number in range(loaders)}

    def validation_step(self, batch: Batch, index: int, dataloader_idx: int = 0) -> None:
        x = batch["x"]
        auroc: Any = self.aurocs[dataloader_idx]
        auroc.update(x, batch["label"])
        self.log(f"auroc {dataloader_idx}", auroc)
        self.log("mean", x.mean(), sync_dist=True, batch_size=len(x))
        self.log("greatest", x.max(), reduce_fx="max", sync_dist=True, batch_size=len(x))
        self.samples[dataloader_idx].append(batch["index"].tolist())


def sampled(samples: int, rank: int, world_size: int) -> DataLoader[Any]:
    return loader(samples, sampler=range(rank, samples, world_size))


def streamed(samples: int, rank: int, world_size: int) -> DataLoader[Any]:
    return DataLoader(Streamed(scores(samples)[rank::world_size]), 2)


def unsized(samples: int, rank: int, world_size: int) -> DataLoader[Any]:
    own = range(rank, samples, world_size)
    return loader(samples, batch_sampler=iter([own[:1], own[1:]]))  # has no length


# Loaders of a rank's part of so many samples, and the sizes of the batches that each of
# three ranks evaluates.
DIVISIONS: list[tuple[Callable[[int, int, int], DataLoader[Any]], int, list[list[int]]]] = [
    (sampled, 5, [[1, 1], [1, 1], [1]]),
    (sampled, 4, [[1, 1], [1], [1]]),
    (streamed, 7, [[2, 1], [2], [2]]),
    (streamed, 9, [[2, 1], [2, 1], [2, 1]]),
    (unsized, 9, [[1, 2], [1, 2], [1, 2]]),
]


def undivided_trainer(world_size: int, directory: Path) -> L.Trainer:
    return new_trainer("ours", directory, world_size, use_distributed_sampler=False)


def divide(rank: int, world_size: int, directory: Path) -> tuple[Any, list[list[int]]]:
    """Evaluate this rank's part of each loader; return what was logged, and the sizes of
    this rank's batches by loader.
    """
    loaders = [make(samples, rank, world_size) for make, samples, _ in DIVISIONS]
    model = Scorer(len(loaders))
    trainer = undivided_trainer(world_size, directory)
    trainer.validate(model, loaders, verbose=False)
    return (
        {name: float(value) for name, value in trainer.callback_metrics.items()},
        [[len(batch) for batch in batches] for batches in model.samples.values()],
    )


def test_ranks_with_different_numbers_of_batches_log_what_one_process_logs(
    tmp_path: Path,
) -> None:
    """Each rank evaluates its own batches, and values are those of all samples."""
    [(alone, _)] = run_ranks(divide, 1, tmp_path)
    for rank, (logged, sizes) in enumerate(run_ranks(divide, 3, tmp_path)):
        assert logged == pytest.approx(alone, rel=1e-6)
        assert sizes == [sizes_by_rank[rank] for _, _, sizes_by_rank in DIVISIONS]


def evaluate_one_sample(
    rank: int, world_size: int, directory: Path
) -> tuple[type[BaseException], str]:
    """Evaluate data of which only rank 0 has a sample; return the error's type and text."""
    only_on_rank_0 = sampled(1, rank, world_size)
    trainer = undivided_trainer(world_size, directory)
    error = raised(Exception, trainer.validate, Scorer(), only_on_rank_0, verbose=False)
    return type(error), str(error)


def test_a_rank_whose_loader_has_no_batch_ends_the_evaluation(tmp_path: Path) -> None:
    """This rank raises stock's error; the other one names it with this cause."""
    (kind, message), (kind_on_rank_1, _) = run_ranks(evaluate_one_sample, 2, tmp_path)
    assert kind is RankFailedError
    assert message.startswith("rank 1 (host ")
    assert "Please make sure that it returns at least 1 batch" in message
    assert kind_on_rank_1 is RuntimeError


# Samples that cannot or must not count once.


class Pulls(Scorer):
    """Takes batches from an iterator."""

    def validation_step(self, dataloader_iter: Iterator[Any]) -> None:
        batch, _, _ = next(dataloader_iter)
        super().validation_step(batch, 0)


class Pairs(Scorer):
    """Takes batches of two loaders, of which one may have ended."""

    def __init__(self) -> None:
        super().__init__(loaders=2)

    def validation_step(self, batches: Any, index: int) -> None:
        for number, batch in enumerate(batches):
            if batch is not None:
                super().validation_step(batch, index, number)


def combined(mode: Any) -> CombinedLoader:
    return CombinedLoader([loader(11, 2), loader(5, 2)], mode)


class Uncounted(NamedTuple):
    """What a rank reads, the model, and options of the Trainer and of our strategy."""

    loaders: Callable[[int], Any]
    model: type[Scorer] = Scorer
    options: Mapping[str, Any] = {}
    strategy: Mapping[str, Any] = {}


UNCOUNTED = {
    "min_size": Uncounted(lambda rank: combined("min_size"), Pairs),
    "max_size": Uncounted(lambda rank: combined("max_size"), Pairs, {"limit_val_batches": 1}),
    "max_size_cycle": Uncounted(
        lambda rank: combined("max_size_cycle"), Pairs, {"fast_dev_run": True}
    ),
    "dataloader_iter": Uncounted(lambda rank: loader(5, 2), Pulls),
    "drop_last": Uncounted(lambda rank: loader(9, 2, drop_last=True)),
    "the user's batches": Uncounted(
        lambda rank: loader(13, batch_sampler=Ragged(range(13), 2, False))
    ),
    "a sampler that repeats": Uncounted(
        lambda rank: loader(5, sampler=DistributedSampler(range(5), 2, rank, shuffle=False))
    ),
    "exact_evaluation=False": Uncounted(
        lambda rank: loader(5, 2), strategy={"exact_evaluation": False}
    ),
}


def evaluate_uncounted(kind: Kind, directory: Path) -> dict[str, tuple[Any, Any]]:
    """Return what each evaluation logged, and the samples of this rank's batches."""
    evaluated = {}
    for name, case in UNCOUNTED.items():
        model = case.model()
        strategy = make_strategy(kind, directory, **case.strategy if kind == "ours" else {})
        trainer = make_trainer(strategy, **case.options)
        loaders = case.loaders(trainer.global_rank)
        evaluated[name] = (trainer.validate(model, loaders, verbose=False), model.samples)
    return evaluated


def test_evaluations_that_do_not_count_samples_once_are_stocks(tmp_path: Path) -> None:
    """Values, samples and batches are stock's on each rank."""
    ours, stock = on_both(evaluate_uncounted, tmp_path)
    assert_same(ours, stock)
