"""A program written for stock ``ddp`` sees with ours what it sees with stock.

A program is a model, loaders, options of a Trainer, callbacks, and what is called after
the fit, all drawn by a seed. ``make test`` plays a few programs that together use each
part, ``make nightly`` some of a new seed (``SWEEP_SEED``, ``SWEEP_COUNT``).
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

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


def own_sampler(samples: int, **options: Any) -> DataLoader[Any]:
    sampler = DistributedSampler(range(samples), seed=2)
    return DataLoader(Numbered(samples), sampler=sampler, **options)


def own_generator(samples: int, **options: Any) -> DataLoader[Any]:
    sampler = RandomSampler(range(samples), generator=torch.Generator().manual_seed(3))
    return DataLoader(Numbered(samples), sampler=sampler, **options)


class OwnIteration(DataLoader[Any]):
    """Starts torch's iterator when its first batch is requested."""

    def __iter__(self) -> Iterator[Any]:
        yield from super().__iter__()


LOADERS: dict[str, Callable[..., DataLoader[Any]]] = {
    "in order": lambda samples, **options: DataLoader(Numbered(samples), **options),
    "shuffled": lambda samples, **options: DataLoader(Numbered(samples), shuffle=True, **options),
    "own sampler": own_sampler,
    "own generator": own_generator,
    "stream": lambda samples, **options: DataLoader(
        training.Streamed(Numbered(samples)), **options
    ),
    "own iteration": lambda samples, **options: OwnIteration(Numbered(samples), **options),
    "worker": lambda samples, **options: DataLoader(Numbered(samples), num_workers=1, **options),
    "kept worker": lambda samples, **options: DataLoader(Numbered(samples), **KEPT, **options),
}

# The parts of programs.

# What a model does or has, besides training.
MODEL = (
    "dropout",
    "manual",  # optimisation
    "plateau",  # a scheduler by the validation loss
    "hooks",  # self.log in hooks
    "gathers",  # all_gather and reduce in steps
    "reads",  # all metrics in training steps
    "reads later",  # all metrics after each training step
    "reads alone",  # all metrics on rank 1, as soon as it has logged a value
    "infers",  # logs in inference mode
    "many",  # values of a step, some of them twice
    "group",  # of ranks, which a value is of
    "profiles",  # a part of the training step
    "estimates",  # the number of steps, in the first hook
    "stops",  # trainer.should_stop after three steps
    "unused",  # parameters
    "skips",  # the rest of an epoch after two batches
)
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
AFTERWARDS = (
    "validate",
    "test",
    "predict",
    "fit again",  # for another epoch
    "new Trainer",  # which fits the trained model
)
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
MANY = 130  # more values than one collective has


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


def draw(seed: int) -> Program:
    """Draw a program that stock can run."""
    chance = random.Random(seed)

    def some(names: Iterable[str], share: float) -> tuple[str, ...]:
        return tuple(name for name in names if chance.random() < share)

    train = chance.choice([*LOADERS])
    model = some(MODEL, 0.2)
    if train == "own sampler":  # which needs the process group, and that opens later
        model = tuple(name for name in model if name != "estimates")
    options = {name: chance.choice(values) for name, values in TRAINER.items()}
    if train in ("shuffled", "own generator"):  # ours draws another order if it is not divided
        options["use_distributed_sampler"] = True
    afterwards = some(AFTERWARDS, 0.25)
    if train == "kept worker":  # read ahead, with stock, by iterators that nothing reads
        options["reload_dataloaders_every_n_epochs"] = 0
        afterwards = tuple(name for name in afterwards if name != "fit again")
    if "manual" in model:
        options |= {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    return Program(
        seed,
        train=train,
        # Of a shuffled loader, stock draws an order of predictions on each rank.
        validation=chance.choice(["in order", "own sampler", "stream", "kept worker"]),
        samples=chance.choice([20, 24, 25]),
        batch_size=chance.choice([2, 3]),
        drops_last=chance.choice([True, False]),
        options=tuple(options.items()),
        metric=chance.choice([*METRICS]),
        model=model,
        logged=some(LOGGED, 0.4),
        callbacks=some(CALLBACKS, 0.2),
        afterwards=afterwards,
    )


def parts_of(program: Program) -> set[Any]:
    """Return the parts that a program uses, apart from its numbers of samples; if it ends
    early, only that counts.
    """
    early = EARLY_ENDS.intersection(program.options)
    if early:
        return early
    loaders = {("train", program.train), ("validation", program.validation)}
    several = {*program.model, *program.logged, *program.callbacks, *program.afterwards}
    return {*loaders, *program.options, ("metric", program.metric), *several}


def cover() -> list[Program]:
    """Return few programs that together use each part but the workers that start in each
    epoch, which take seconds.
    """
    drawn = [program for program in map(draw, range(300)) if program.train != "worker"]
    return sweeps.greedy_cover({program: parts_of(program) for program in drawn}, lambda _: 1)


# What a program sees.


class Watching(L.Callback):
    """Records the calls of all hooks, and draws a random number in most of them."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        for name in dir(L.Callback):
            if name.startswith("on_"):
                setattr(self, name, partial(self._record, name))

    def _record(self, name: str, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        draws = name == "setup" or name.endswith(("_start", "_end"))
        self.calls.append((name, trainer.global_step, *([torch.rand(())] if draws else [])))


class Writer(callbacks.BasePredictionWriter):
    """Has the module record what it is to write."""

    def write_on_batch_end(
        self, trainer: Any, module: Any, prediction: Any, indices: Any, *_: Any
    ) -> None:
        module.seen.append((prediction, indices))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        module.seen.append((predictions, indices))


class Watched(L.LightningModule):
    """The model of a program, which records its batches and the values that it reads.

    Attributes:
        parts: those of ``MODEL`` that it has.
        seen: the records, in order.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.parts = program.model
        self.seen: list[Any] = []
        self.automatic_optimization = "manual" not in self.parts
        dropout = nn.Dropout(0.3) if "dropout" in self.parts else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), dropout, nn.Linear(6, 1))
        self.unused = nn.Linear(2, 2) if "unused" in self.parts else None
        metric = METRICS[program.metric]
        self.metric = None if metric is None else metric()

    def forward(self, x: Tensor) -> Tensor:
        predicted: Tensor = self.layers(x.to(next(self.parameters()).dtype))
        return predicted

    def loss(self, stage: str, batch: Any) -> Tensor:
        """Record the batch; return its loss, after logging it as the program does."""
        x, y, numbers = batch
        self.seen.append((stage, self.current_epoch, numbers))
        loss: Tensor = (self(x) - y).square().mean()
        value = loss.detach() + self.global_rank
        for name in self.program.logged:
            function, options = LOGGED[name]
            self.log_value(f"{stage}_{name}", function(value), **options)
        if "infers" in self.parts:
            with torch.inference_mode():
                self.log_value("inferred", value + 1, sync_dist=True, on_step=True, on_epoch=False)
        if "many" in self.parts:
            self.log_dict({f"{number}": value + number for number in range(MANY)}, sync_dist=True)
            self.log("0", value / 2, sync_dist=True)
        if "group" in self.parts:
            self.log("group", value, sync_dist=True, sync_dist_group=dist.group.WORLD)
        if "gathers" in self.parts:
            self.seen.append(self.all_gather({"loss": loss.detach()}))
            self.seen.append(self.trainer.strategy.reduce(loss.detach(), reduce_op="max"))
        return loss

    def log_value(self, name: str, value: Any, **options: Any) -> None:
        self.log(name, value, **options)
        if "reads alone" in self.parts and self.global_rank == 1:
            self.read_metrics()

    def configure_callbacks(self) -> list[L.Callback]:
        if "estimates" in self.parts:
            self.seen.append(self.trainer.estimated_stepping_batches)
        return []

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.loss("train", batch)
        if "profiles" in self.parts:
            with self.trainer.profiler.profile("a part"):
                self.seen.append(float(loss))
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.log_value("after a collective", float(self.global_rank), sync_dist=True, **EACH)
            optimizer.step()
        if "reads" in self.parts:
            self.read_metrics()
        if "stops" in self.parts and self.global_step == 3:
            self.trainer.should_stop = True
        return loss

    def on_train_batch_start(self, batch: Any, index: int) -> int | None:
        return -1 if "skips" in self.parts and index == 2 else None

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

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if "hooks" in self.parts:
            total = sum(each.grad.sum() for each in self.parameters() if each.grad is not None)
            self.log_value("gradients", total + self.global_rank, sync_dist=True)

    def read_metrics(self) -> None:
        trainer = self.trainer
        kinds = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
        self.seen += [dict(metrics) for metrics in kinds]

    def on_train_batch_end(self, *_: Any) -> None:
        if "reads later" in self.parts:
            self.read_metrics()
        if "hooks" in self.parts:
            self.log_value("after the step", float(self.global_rank), sync_dist=True, **EACH)

    def on_train_epoch_end(self) -> None:
        if "reads alone" not in self.parts or self.global_rank == 1:
            self.read_metrics()
        if "hooks" in self.parts:
            self.log("end", float(self.global_rank), sync_dist=True, reduce_fx="sum")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        if "plateau" not in self.parts:
            return optimizer
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        plateau = {"scheduler": scheduler, "monitor": "val_loss", "strict": False}
        return {"optimizer": optimizer, "lr_scheduler": plateau}

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


@dataclass
class Play:
    """A program on this rank, with ours or with stock.

    Attributes:
        program: the program.
        kind: whose strategy it uses.
        shared: where the ranks connect; the programs on the same ranks share it.
        place: where this program writes.
    """

    program: Program
    kind: training.Kind
    shared: Path
    place: Path

    def __post_init__(self) -> None:
        self.module = Watched(self.program)
        self.watching = Watching()

    def make_trainer(self) -> L.Trainer:
        made = [CALLBACKS[name](self.place) for name in self.program.callbacks]
        finds_unused = {"find_unused_parameters": True} if "unused" in self.program.model else {}
        return training.make_trainer(
            training.make_strategy(self.kind, self.shared, **finds_unused),
            callbacks=[self.watching, Writer("batch_and_epoch"), *made],
            default_root_dir=self.place,
            logger=[
                CSVLogger(self.place, name="logged", version="0"),
                TensorBoardLogger(self.place, name="board", version="0"),
            ],
            enable_checkpointing=any(isinstance(each, callbacks.Checkpoint) for each in made),
            **dict(self.program.options),
        )

    def run(self) -> list[Any]:
        """Run the program; return what it has seen after the fit and each later call."""
        trainer = self.make_trainer()
        trainer.fit(self.module)
        found: list[Any] = [self.seen_with(trainer)]
        for name in self.program.afterwards:
            if name == "new Trainer":
                trainer = self.make_trainer()
            found += [self.call(name, trainer), self.seen_with(trainer)]
        return found

    def call(self, name: str, trainer: L.Trainer) -> Any:
        """Make a call after the fit, and return its result."""
        if name in ("validate", "test"):
            return getattr(trainer, name)(self.module, verbose=False)
        if name == "predict":
            return trainer.predict(self.module)
        trainer.should_stop = False
        trainer.fit_loop.max_epochs = (trainer.max_epochs or 0) + 1
        return trainer.fit(self.module)

    def seen_with(self, trainer: L.Trainer) -> dict[str, Any]:
        """Return what the program has seen so far, and the state of its last Trainer."""
        dist.barrier()  # rank 0 has written its files
        table = self.place / "logged" / "0" / "metrics.csv"
        files = [str(path.relative_to(self.place)) for path in self.place.rglob("*")]
        return {
            "seen": list(self.module.seen),
            "calls": list(self.watching.calls),
            "progress": (trainer.global_step, trainer.current_epoch, trainer.num_training_batches),
            "metrics": dict(trainer.callback_metrics),
            "weights": training.weights(self.module),
            # TensorBoard's names contain the time and the process.
            "files": sorted(name.partition(".tfevents")[0] for name in files),
            "table": table.read_text() if table.exists() else "",
        }


def play(kind: training.Kind, program: Program, rank: int, ranks: int, place: Path) -> Any:
    """Run a program on this rank; return what it sees, or its error as a text."""
    shared = place.parent
    if kind == "stock" and not dist.is_initialized():
        dist.init_process_group(
            "gloo", init_method=f"file://{shared}/store", rank=rank, world_size=ranks
        )
    L.seed_everything(7, verbose=False)
    try:
        return Play(program, kind, shared, place / "program").run()
    except RankFailedError:
        raise  # no program can be played with the other ranks
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def differences(programs: Sequence[Program], directory: Path) -> dict[Program, str]:
    """Run programs with ours and with stock; describe the first difference of each that
    has one.
    """
    ours, stock = (
        sweeps.play_cases(partial(play, kind), programs, lambda _: 2, directory / kind)
        for kind in training.KINDS
    )
    texts = {program: difference(ours[program], stock[program]) for program in programs}
    return {program: text for program, text in texts.items() if text}


def difference(ours: list[Any] | str, stock: list[Any] | str) -> str:
    """Describe the first difference between the results of all ranks, which are texts
    after an error; return an empty string without any.
    """
    if isinstance(stock, str) or any(isinstance(result, str) for result in stock):
        return f"stock cannot run it: {stock}"
    pairs = zip_longest(lines_of(ours), lines_of(stock))
    return next((f"{own} instead of {others}" for own, others in pairs if own != others), "")


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
    programs = [draw(number) for number in range(seed, seed + count)]
    sweeps.expect_nothing_wrong(differences(programs, tmp_path), REPEAT)
