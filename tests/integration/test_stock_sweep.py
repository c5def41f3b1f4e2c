"""A program written for stock ``ddp`` sees with ours what it sees with stock.

A program is a model, loaders, options of a Trainer, callbacks, and what is called after
the fit, all drawn by a seed. ``make test`` plays a few programs that together use each
part, ``make nightly`` some of a new seed (``SWEEP_SEED``, ``SWEEP_COUNT``).
"""

import random
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import lightning as L
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler
from torchmetrics import MeanSquaredError, Metric
from torchmetrics.classification import BinaryAUROC

from lightning_ddp_ext.errors import RankFailedError
from tests.harness import sweeps, training
from tests.integration.continuing import KEPT, Numbers

# Data.


class Numbered(Numbers):
    """Samples with their number, and with noise from each library's generator."""

    def __getitem__(self, number: int) -> Any:
        noise = torch.rand(4) + random.random() + float(np.random.rand())
        target = torch.tensor([float(number % 2)])
        return torch.arange(4.0).mul(number + 1).sin() + noise / 10, target, number


class OwnIteration(DataLoader[Any]):
    """Starts torch's iterator when its first batch is requested."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


LOADERS: dict[str, Callable[..., DataLoader[Any]]] = {
    "in order": lambda samples, **options: DataLoader(Numbered(samples), **options),
    "shuffled": lambda samples, **options: DataLoader(Numbered(samples), shuffle=True, **options),
    "own sampler": lambda samples, **options: DataLoader(
        Numbered(samples), sampler=DistributedSampler(range(samples), seed=2), **options
    ),
    "own generator": lambda samples, **options: DataLoader(
        Numbered(samples),
        sampler=RandomSampler(range(samples), generator=torch.Generator().manual_seed(3)),
        **options,
    ),
    "stream": lambda samples, **options: DataLoader(
        training.Streamed(Numbered(samples)), **options
    ),
    "own iteration": lambda samples, **options: OwnIteration(Numbered(samples), **options),
    "worker": lambda samples, **options: DataLoader(Numbered(samples), num_workers=1, **options),
    "kept worker": lambda samples, **options: DataLoader(Numbered(samples), **KEPT, **options),
}

# The parts of programs; those of the model are its classes in ``MODEL`` below.

METRICS: dict[str, type[Metric] | None] = {
    "none": None,
    "sums": MeanSquaredError,
    "lists": BinaryAUROC,  # torchmetrics gathers its states
}
CALLBACKS: dict[str, Callable[[Path], L.Callback]] = {
    "last": lambda place: callbacks.ModelCheckpoint(place / "files", save_last="link"),
    "steps": lambda place: callbacks.ModelCheckpoint(
        place / "files", every_n_train_steps=2, save_top_k=-1
    ),
    "best": lambda place: callbacks.ModelCheckpoint(
        place / "files", "{epoch}-{val_loss:.3f}", monitor="val_loss", save_top_k=2
    ),
    "early": lambda _: callbacks.EarlyStopping("val_loss", patience=0, strict=False),
    "ema": lambda _: callbacks.EMAWeightAveraging(decay=0.5),
    "swa": lambda _: callbacks.StochasticWeightAveraging(0.01, 1),
    "rates": lambda _: callbacks.LearningRateMonitor(),
}


def fit_again(trainer: L.Trainer, module: L.LightningModule) -> None:
    """Fit for another epoch; all of them with a new Trainer."""
    trainer.should_stop = False
    trainer.fit_loop.max_epochs = (trainer.max_epochs or 0) + 1
    trainer.fit(module)


NEW_TRAINER = "new Trainer"  # on the trained model; later calls are also its
AFTERWARDS: dict[str, Callable[[L.Trainer, L.LightningModule], Any]] = {
    "validate": lambda trainer, module: trainer.validate(module, verbose=False),
    "test": lambda trainer, module: trainer.test(module, verbose=False),
    "predict": lambda trainer, module: trainer.predict(module),
    "fit again": fit_again,
    NEW_TRAINER: fit_again,
}
TRAINER: dict[str, tuple[Any, ...]] = {
    "max_epochs": (1, 2, 3),
    "accumulate_grad_batches": (1, 2, 3),
    "limit_train_batches": (1.0, 3),
    "limit_val_batches": (1.0, 0, 2),
    "num_sanity_val_steps": (0, 1, -1),
    "val_check_interval": (None, 1, 2),
    "check_val_every_n_epoch": (1, 2),
    "reload_dataloaders_every_n_epochs": (0, 1),
    "log_every_n_steps": (1, 3),
    "gradient_clip_val": (None, 0.3),
    "gradient_clip_algorithm": (None, "value"),
    "precision": (None, "bf16-mixed", "64-true"),
    "use_distributed_sampler": (True, False),
    "inference_mode": (True, False),
    "detect_anomaly": (False, True),
    "profiler": (None, "simple"),
    # Few programs end early.
    "fast_dev_run": (*[False] * 9, 2),
    "max_time": (*[None] * 9, timedelta(microseconds=1)),
}
EARLY_ENDS = {("fast_dev_run", 2), ("max_time", timedelta(microseconds=1))}
EACH = {"on_step": True, "on_epoch": True}
# What a program logs of its loss, and options of ``self.log``.
LOGGED: dict[str, tuple[Callable[[Tensor], Any], dict[str, Any]]] = {
    "mean": (torch.clone, {"sync_dist": True, "prog_bar": True, **EACH}),
    "sum": (torch.clone, {"sync_dist": True, "reduce_fx": "sum", "on_epoch": True}),
    "max": (torch.clone, {"sync_dist": True, "reduce_fx": "max", "on_step": True}),
    "min": (torch.clone, {"sync_dist": True, "reduce_fx": torch.min, **EACH}),
    "own": (torch.clone, EACH),
    "double": (lambda loss: loss.double() / 3, {"sync_dist": True}),
    "half": (Tensor.half, {"sync_dist": True}),
    "nan": (lambda loss: loss * torch.nan, {"sync_dist": True}),
    "one": (lambda loss: loss.reshape(1), {"sync_dist": True, "batch_size": 7}),
    "number": (float, {"sync_dist": True, "prog_bar": True}),
    "graph": (torch.clone, {"sync_dist": True, "enable_graph": True}),
    "of rank 0": (torch.clone, {"sync_dist": True, "rank_zero_only": True}),
    "by loader": (torch.clone, {"sync_dist": True, "add_dataloader_idx": False}),
}


# A program, and the model that runs in it.


@dataclass(frozen=True)
class Program:
    """What a seed draws, by the names of its parts.

    Set the variable ``SWEEP`` to its ``str``, the seed, to play it again.
    """

    seed: int
    train: str
    validation: str
    samples: int
    batch_size: int
    drops_last: bool
    options: tuple[tuple[str, Any], ...]  # of the Trainer
    metric: str
    model: tuple[str, ...]
    logged: tuple[str, ...]
    callbacks: tuple[str, ...]
    afterwards: tuple[str, ...]

    def __str__(self) -> str:
        return str(self.seed)


class Watching(L.Callback):
    """Has the module record the calls of all hooks, and draws a random number in most."""

    def __init__(self) -> None:
        for name in dir(L.Callback):
            if name.startswith("on_"):
                setattr(self, name, partial(self._record, name))

    def _record(self, name: str, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        draws = name == "setup" or name.endswith(("_start", "_end"))
        module: Any = trainer.lightning_module
        module.calls.append((name, trainer.global_step, *([torch.rand(())] if draws else [])))


class Writer(callbacks.BasePredictionWriter):
    """Has the module record what it is to write."""

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, *_: Any
    ) -> None:
        module.seen.append((prediction, indices))

    write_on_epoch_end = write_on_batch_end


class Watched(L.LightningModule):
    """The model of a program, which records its batches and the values that it reads. The
    parts of ``MODEL`` extend it.

    Attributes:
        seen: the records, in order.
        calls: those of the hooks of callbacks.
        strategy: options of the strategy that it needs.
        dropout: the probability to drop a value; 0 draws no random numbers.
    """

    strategy: ClassVar[dict[str, Any]] = {}
    dropout = 0.0

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.seen: list[Any] = []
        self.calls: list[Any] = []
        dropout = nn.Dropout(self.dropout)
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), dropout, nn.Linear(6, 1))
        metric = METRICS[program.metric]
        self.metric = None if metric is None else metric()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.to(next(self.parameters()).dtype))

    def loss(self, stage: str, batch: Any) -> Tensor:
        """Record the batch; return its loss, after logging it."""
        x, y, numbers = batch
        self.seen.append((stage, self.current_epoch, numbers))
        loss = (self(x) - y).square().mean()
        self.log_loss(stage, loss.detach() + self.global_rank)
        return loss

    def log_loss(self, stage: str, value: Tensor) -> None:
        """Log a value that differs by rank as the program does."""
        for name in self.program.logged:
            function, options = LOGGED[name]
            self.log_value(f"{stage}_{name}", function(value), **options)

    def log_value(self, name: str, value: Any, **options: Any) -> None:
        self.log(name, value, **options)

    def read_metrics(self) -> None:
        trainer = self.trainer
        kinds = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
        self.seen += [dict(metrics) for metrics in kinds]

    def read_at_epoch_end(self) -> None:
        self.read_metrics()

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.loss("train", batch)

    def on_train_epoch_end(self) -> None:
        self.read_at_epoch_end()

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.loss("val", batch), sync_dist=True)
        if self.metric is not None:
            x, y, _ = batch
            self.metric.update(self(x).sigmoid().flatten(), y.int().flatten())
            self.log("metric", self.metric)

    test_step = validation_step

    def predict_step(self, batch: Any, index: int) -> Any:
        x, _, numbers = batch
        return numbers, self(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05)

    def train_dataloader(self) -> DataLoader[Any]:
        return LOADERS[self.program.train](
            self.program.samples,
            batch_size=self.program.batch_size,
            drop_last=self.program.drops_last,
        )

    def val_dataloader(self) -> DataLoader[Any]:
        # The ranks divide the samples without a rest, so that none is repeated.
        return LOADERS[self.program.validation](24, batch_size=self.program.batch_size)

    test_dataloader = predict_dataloader = val_dataloader


# What a model also has or does: classes that extend the hooks of those before.


class DropsOut(Watched):
    dropout = 0.3


class OptimizesManually(Watched):
    automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.log_value("after a collective", float(self.global_rank), sync_dist=True, **EACH)
        optimizer.step()
        return loss


class SchedulesByValidationLoss(Watched):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss", "strict": False},
        }


class LogsInHooks(Watched):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        total = sum(each.grad.sum() for each in self.parameters() if each.grad is not None)
        self.log_value("gradients", total + self.global_rank, sync_dist=True)

    def on_train_batch_end(self, *_: Any) -> None:
        self.log_value("after the step", float(self.global_rank), sync_dist=True, **EACH)

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.log("end", float(self.global_rank), sync_dist=True, reduce_fx="sum")


class GathersInSteps(Watched):
    def log_loss(self, stage: str, value: Tensor) -> None:
        super().log_loss(stage, value)
        self.seen.append(self.all_gather({"loss": value}))
        self.seen.append(self.trainer.strategy.reduce(value, reduce_op="max"))


class ReadsInTrainingSteps(Watched):
    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.read_metrics()
        return loss


class ReadsAfterTrainingSteps(Watched):
    def on_train_batch_end(self, *args: Any) -> None:
        self.read_metrics()
        super().on_train_batch_end(*args)


class ReadsAlone(Watched):
    """Only rank 1 reads at the end of an epoch, and as soon as it has logged a value."""

    def log_value(self, name: str, value: Any, **options: Any) -> None:
        super().log_value(name, value, **options)
        self.read_at_epoch_end()

    def read_at_epoch_end(self) -> None:
        if self.global_rank == 1:
            self.read_metrics()


class LogsInInferenceMode(Watched):
    def log_loss(self, stage: str, value: Tensor) -> None:
        super().log_loss(stage, value)
        with torch.inference_mode():
            self.log_value("inferred", value + 1, sync_dist=True, on_step=True, on_epoch=False)


class LogsManyValues(Watched):
    """Logs more values in a step than one collective has, and one of them twice."""

    def log_loss(self, stage: str, value: Tensor) -> None:
        super().log_loss(stage, value)
        self.log_dict({f"{number}": value + number for number in range(130)}, sync_dist=True)
        self.log("0", value / 2, sync_dist=True)


class LogsInGroup(Watched):
    def log_loss(self, stage: str, value: Tensor) -> None:
        super().log_loss(stage, value)
        self.log("group", value, sync_dist=True, sync_dist_group=dist.group.WORLD)


class ProfilesTrainingSteps(Watched):
    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        with self.trainer.profiler.profile("a part"):
            self.seen.append(float(loss))
        return loss


class EstimatesStepsInFirstHook(Watched):
    def configure_callbacks(self) -> list[L.Callback]:
        self.seen.append(self.trainer.estimated_stepping_batches)
        return []


class StopsAfterThreeSteps(Watched):
    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.trainer.should_stop |= self.global_step == 3
        return loss


class HasUnusedParameters(Watched):
    strategy: ClassVar = {"find_unused_parameters": True}

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.unused = nn.Linear(2, 2)


class SkipsEpochsAfterTwoBatches(Watched):
    def on_train_batch_start(self, batch: Any, index: int) -> int | None:
        return -1 if index == 2 else None


MODEL: dict[str, type[Watched]] = {
    "dropout": DropsOut,
    "manual": OptimizesManually,
    "plateau": SchedulesByValidationLoss,
    "hooks": LogsInHooks,
    "gathers": GathersInSteps,
    "reads": ReadsInTrainingSteps,
    "reads later": ReadsAfterTrainingSteps,
    "reads alone": ReadsAlone,
    "infers": LogsInInferenceMode,
    "many": LogsManyValues,
    "group": LogsInGroup,
    "profiles": ProfilesTrainingSteps,
    "estimates": EstimatesStepsInFirstHook,
    "stops": StopsAfterThreeSteps,
    "unused": HasUnusedParameters,
    "skips": SkipsEpochsAfterTwoBatches,
}


def model_of(program: Program) -> Watched:
    """Return a model with the program's parts, of which later ones extend earlier ones."""
    parts = [MODEL[name] for name in reversed(program.model)]
    return type("Model", (*parts, Watched), {})(program)


# Running a program on a rank.


def make_trainer(kind: training.Kind, module: Watched, place: Path) -> L.Trainer:
    """Return a Trainer of a module's program, which writes into ``place``."""
    made = [CALLBACKS[name](place) for name in module.program.callbacks]
    return training.make_trainer(
        # All programs of these ranks connect in one directory.
        training.make_strategy(kind, place.parents[1], **module.strategy),
        callbacks=[Watching(), Writer("batch_and_epoch"), *made],
        default_root_dir=place,
        logger=[
            CSVLogger(place, name="logged", version="0"),
            TensorBoardLogger(place, name="board", version="0"),
        ],
        enable_checkpointing=any(isinstance(each, callbacks.Checkpoint) for each in made),
        **dict(module.program.options),
    )


def run(kind: training.Kind, module: Watched, place: Path) -> list[Any]:
    """Run a module's program; return what it has seen after the fit and each later call."""
    trainer = make_trainer(kind, module, place)
    trainer.fit(module)
    found: list[Any] = [seen_with(trainer, module, place)]
    for name in module.program.afterwards:
        if name == NEW_TRAINER:
            trainer = make_trainer(kind, module, place)
        found += [AFTERWARDS[name](trainer, module), seen_with(trainer, module, place)]
    return found


def seen_with(trainer: L.Trainer, module: Watched, place: Path) -> dict[str, Any]:
    """Return what a module has seen so far, and the state of its last Trainer."""
    dist.barrier()  # rank 0 has written its files
    table = place / "logged" / "0" / "metrics.csv"
    files = [str(path.relative_to(place)) for path in place.rglob("*")]
    return {
        "seen": list(module.seen),
        "calls": list(module.calls),
        "progress": (trainer.global_step, trainer.current_epoch, trainer.num_training_batches),
        "metrics": dict(trainer.callback_metrics),
        "weights": training.weights(module),
        # TensorBoard's names contain the time and the process.
        "files": sorted(name.partition(".tfevents")[0] for name in files),
        "table": table.read_text() if table.exists() else "",
    }


def play(kind: training.Kind, program: Program, rank: int, ranks: int, place: Path) -> Any:
    """Run a program on this rank; return what it sees, or its traceback."""
    if kind == "stock" and not dist.is_initialized():
        dist.init_process_group(
            "gloo", init_method=f"file://{place.parent}/store", rank=rank, world_size=ranks
        )
    L.seed_everything(7, verbose=False)
    try:
        return run(kind, model_of(program), place / "program")
    except RankFailedError:
        raise  # no program can be played with the other ranks
    except Exception:
        return traceback.format_exc()


# Choosing programs.

# Not shuffled: stock would draw another order of predictions on each rank.
VALIDATION = ("in order", "own sampler", "stream", "kept worker")


class Limits(NamedTuple):
    """What a program with a part has and lacks, so that stock runs it and ours equals it."""

    options: Mapping[str, Any] = {}  # of the Trainer
    without: Collection[str] = ()  # parts of the model, and calls after the fit


LIMITS = {
    # The sampler needs the process group, which opens after the first hook.
    "own sampler": Limits(without={"estimates"}),
    # Ours draws another order than stock if the samples are not divided.
    "shuffled": Limits({"use_distributed_sampler": True}),
    "own generator": Limits({"use_distributed_sampler": True}),
    # With stock, iterators that nothing reads also read ahead.
    "kept worker": Limits({"reload_dataloaders_every_n_epochs": 0}, without={"fit again"}),
    # Lightning refuses other values.
    "manual": Limits({"accumulate_grad_batches": 1, "gradient_clip_val": None}),
}


def draw(seed: int) -> Program:
    """Draw a program that stock can run."""
    chance = random.Random(seed)

    def some(names: Iterable[str], share: float) -> tuple[str, ...]:
        return tuple(name for name in names if chance.random() < share)

    train = chance.choice([*LOADERS])
    model = some(MODEL, 0.2)
    options = {name: chance.choice(values) for name, values in TRAINER.items()}
    afterwards = some(AFTERWARDS, 0.25)
    limits = [LIMITS[part] for part in (train, *model) if part in LIMITS]
    for limit in limits:
        options |= limit.options
    excluded = {name for limit in limits for name in limit.without}
    return Program(
        seed,
        train=train,
        validation=chance.choice(VALIDATION),
        samples=chance.choice([20, 24, 25]),
        batch_size=chance.choice([2, 3]),
        drops_last=chance.choice([True, False]),
        options=tuple(options.items()),
        metric=chance.choice([*METRICS]),
        model=tuple(name for name in model if name not in excluded),
        logged=some(LOGGED, 0.4),
        callbacks=some(CALLBACKS, 0.2),
        afterwards=tuple(name for name in afterwards if name not in excluded),
    )


def parts_of(program: Program) -> set[Any]:
    """Return the parts that a program uses, apart from its numbers of samples; if it ends
    early, only that counts.
    """
    if early := EARLY_ENDS.intersection(program.options):
        return early
    return {
        ("train", program.train),
        ("validation", program.validation),
        ("metric", program.metric),
        *program.options,
        *program.model,
        *program.logged,
        *program.callbacks,
        *program.afterwards,
    }


def cover() -> list[Program]:
    """Return few programs that together use each part but the workers that start in each
    epoch, which take seconds.
    """
    drawn = [program for program in map(draw, range(300)) if program.train != "worker"]
    return sweeps.greedy_cover({program: parts_of(program) for program in drawn}, lambda _: 1)


# Comparing.


def differences(programs: Sequence[Program], directory: Path) -> dict[Program, str]:
    """Run programs with ours and with stock; describe the first difference of each that
    has one.
    """
    ours, stock = (
        sweeps.play_cases(partial(play, kind), programs, lambda _: 2, directory / kind)
        for kind in training.KINDS
    )
    return {
        program: text for program in programs if (text := difference(ours[program], stock[program]))
    }


def difference(ours: list[Any] | str, stock: list[Any] | str) -> str:
    """Describe the first difference between the results of all ranks, or their errors;
    return an empty string without any.
    """
    for kind, results in (("stock", stock), ("ours", ours)):
        if errors := errors_in(results):
            return f"{kind} cannot run it:\n{errors}"
    pairs = zip_longest(lines_of(ours), lines_of(stock))
    return next((f"{own} instead of {others}" for own, others in pairs if own != others), "")


def errors_in(results: list[Any] | str) -> str:
    """Return the tracebacks among results by rank, or how the ranks ended without any."""
    by_rank = [results] if isinstance(results, str) else results
    return "\n".join(result for result in by_rank if isinstance(result, str))


def lines_of(result: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each value in a result, with its place and all of its digits."""
    if isinstance(result, Tensor):
        yield f"{path}: {result.dtype} {result.tolist()}"
    elif isinstance(result, dict):
        for name, part in result.items():
            yield from lines_of(part, f"{path}/{name}")
    elif isinstance(result, (list, tuple)):
        for number, part in enumerate(result):
            yield from lines_of(part, f"{path}/{number}")
    else:
        yield f"{path}: {type(result).__name__} {result}"


REPEAT = "SWEEP='{}' .venv/bin/python -m pytest tests/integration/test_stock_sweep.py -k parts"


def test_programs_of_all_parts_see_what_they_see_with_stock(tmp_path: Path) -> None:
    """Batches, random numbers, values at each read, hooks, files, weights and results are
    equal to the last bit.
    """
    programs = sweeps.chosen_cases(lambda text: draw(int(text)), cover())
    sweeps.expect_nothing_wrong(differences(programs, tmp_path), REPEAT)


@pytest.mark.nightly
@pytest.mark.timeout(0)  # SWEEP_COUNT says how long it takes
def test_programs_of_a_new_seed_see_what_they_see_with_stock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What they see is equal to the last bit."""
    seed, count = sweeps.new_seed(capsys, 100)
    programs = [*map(draw, range(seed, seed + count))]
    sweeps.expect_nothing_wrong(differences(programs, tmp_path), REPEAT)
