"""Stop and resume runs, and compare their batches and weights with an unbroken run's.

``Training(loaders, directory).run("train_batch_end-3")`` trains from the beginning, and
saves a checkpoint at that point. ``run(ckpt_path=...)`` resumes, and ``difference``
describes how the resumed run differs from the whole one.
"""

import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    get_worker_info,
)

from tests.harness.training import (
    Kind,
    fit,
    make_strategy,
    make_trainer,
    signalled,
    warnings_with,
)

Loaders = Callable[[], Any]  # makes one loader or several

# What is read.


class Numbers(Dataset[Tensor]):
    """Samples that are their own indices."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Stream(IterableDataset[Tensor]):
    """Numbers that only this rank has, in another order each epoch, without a length.

    The workers of a rank split them. Rank 0's begin with ``first``, and those of each
    further rank are 1000 higher.
    """

    def __init__(self, length: int, rank: int, first: int = 0) -> None:
        begin = 1000 * rank + first
        self.numbers = range(begin, begin + length)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        own = self.numbers if worker is None else self.numbers[worker.id :: worker.num_workers]
        return (torch.tensor([float(own[place])]) for place in self.order(len(own)))

    def order(self, length: int) -> list[int]:
        """Return the order in which a worker, or the rank without workers, yields its part."""
        return [(place + self.epoch) % length for place in range(length)]


class Turning(Sampler[int]):
    """A user's sampler that divides the samples itself.

    It begins each epoch one sample further.
    """

    def __init__(self, samples: int, rank: int, world_size: int) -> None:
        self.own = range(rank, samples, world_size)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        shift = self.epoch % len(self.own)
        return iter([*self.own[shift:], *self.own[:shift]])

    def __len__(self) -> int:
        return len(self.own)


class Backwards(BatchSampler):
    """A batch sampler of which Lightning makes a new object, with a sampler for the rank."""

    def __iter__(self) -> Iterator[list[int]]:
        return (batch[::-1] for batch in super().__iter__())


def workers(number: int = 1, **options: Any) -> dict[str, Any]:
    """Return the options of a loader with worker processes."""
    return {"num_workers": number, "multiprocessing_context": "fork", **options}


KEPT = workers(persistent_workers=True)


def stream(samples: int, rank: int, **options: Any) -> DataLoader[Any]:
    """Return a loader of a rank's own stream, in batches of two."""
    return DataLoader(Stream(samples, rank), batch_size=2, **options)


def loader(length: int, **options: Any) -> Loaders:
    """Return a function that makes a loader of numbers, in batches of two unless the options
    say otherwise.
    """
    chosen = options if "batch_sampler" in options else {"batch_size": 2, **options}
    return partial(DataLoader, Numbers(length), **chosen)


def shuffled(samples: int = 12, **options: Any) -> Loaders:
    """Return a function that makes a shuffled loader with batches of two samples."""
    return loader(samples, **{"shuffle": True, **options})


# What is trained.


class Step(NamedTuple):
    """A training step of one rank, with the samples of its batch."""

    epoch: int
    batch: int
    samples: tuple[int, ...]

    @property
    def moment(self) -> tuple[int, int]:
        """The epoch and the batch, which are the same on all ranks."""
        return self.epoch, self.batch


def samples_of(steps: Iterable[Step]) -> list[int]:
    """Return the samples of all batches, in order."""
    return [sample for step in steps for sample in step.samples]


class Event(NamedTuple):
    """A step, a validation, its result or the end of an epoch.

    ``steps`` is the number of steps that the whole run has done before.
    """

    what: str
    steps: int
    results: tuple[float, ...]


class Stopped(Exception):
    """The exception that stops a run."""


class Net(L.LightningModule):
    """Records the batches that it is trained on.

    With dropout its weights also depend on the random numbers.

    Args:
        loaders: makes the training loaders.
        dropout: the probability to drop a value; 0 draws no random numbers.
        validation: options of the validation loader.

    Attributes:
        fail_at: the epoch and the batch whose step raises ``Stopped``.
    """

    def __init__(
        self,
        loaders: Loaders,
        *,
        dropout: float = 0.5,
        validation: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.loaders = loaders
        self.validation = dict(validation)  # weight averaging copies the model
        self.layers = nn.Sequential(nn.Linear(1, 4), nn.Dropout(dropout), nn.Linear(4, 1))
        self.fail_at: tuple[int, int] | None = None
        self.steps: list[Step] = []
        self.events: list[Event] = []

    def happens(self, what: str, *results: float) -> None:
        self.events.append(Event(what, steps_done(self.trainer), results))

    def on_fit_start(self) -> None:
        # Lightning has seeded all ranks equally.
        torch.manual_seed(torch.initial_seed() + 10 * self.global_rank)

    def training_step(self, batch: Any, index: int) -> Tensor:
        epoch = self.trainer.fit_loop.epoch_progress.current.processed
        if self.fail_at == (epoch, index):
            raise Stopped
        self.happens("step")
        by_loader = batch if isinstance(batch, (list, tuple)) else [batch]
        parts = [part for part in by_loader if part is not None]
        samples = tuple(int(number) for part in parts for number in part.flatten())
        self.steps.append(Step(epoch, index, samples))
        return torch.cat([self.layers(part / 100) for part in parts]).square().mean()

    def on_validation_start(self) -> None:
        self.happens("validation")

    def on_train_epoch_end(self) -> None:
        self.happens("epoch end")
        self.log("epoch", float(self.current_epoch), batch_size=1)

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.layers(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [
            {"scheduler": StepLR(optimizer, 2, 0.7), "interval": "step"},
            {"scheduler": StepLR(optimizer, 1, 0.6), "interval": "epoch"},
        ]

    def train_dataloader(self) -> Any:
        return self.loaders()

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Numbers(4), batch_size=1, **self.validation)


WITHOUT_DROPOUT = partial(Net, dropout=0.0)


# Where it is saved or stopped.


def steps_done(trainer: L.Trainer) -> int:
    """Return the steps of a whole run, including those before it was resumed."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.processed


class Saver(L.Callback):
    """Saves a checkpoint at each of these points.

    A point is a hook of a callback without its "on_", and the number of steps that the
    whole run has done by then, such as "train_batch_end-4".
    """

    def __init__(self, directory: Path, points: Sequence[str]) -> None:
        self.saved = {point: f"{directory}/{point}.ckpt" for point in points}
        for moment in {point.partition("-")[0] for point in points}:
            setattr(self, f"on_{moment}", partial(self.save, moment))

    def save(self, moment: str, trainer: L.Trainer, *_: Any) -> None:
        path = self.saved.get(f"{moment}-{steps_done(trainer)}")
        if path is not None:
            trainer.save_checkpoint(path)


def signal_rank_one(signum: int = signal.SIGTERM) -> L.Callback:
    """Return a callback that sends a signal to rank 1 in its second step."""
    return signalled("on_train_batch_end", 1, signum, ranks=[1])


# Reading without a stop.

Batches = dict[int, list[list[int]]]  # by epoch


def read(
    kind: Kind,
    directory: Path,
    make: Loaders,
    callbacks: Sequence[L.Callback] = (),
    **options: Any,
) -> Batches:
    """Train on what ``make`` returns, by default for two epochs; return the batches."""
    module = Net(make)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(kind, directory, module, *callbacks, limit_val_batches=0, **options)
    return {
        epoch: [list(step.samples) for step in module.steps if step.epoch == epoch]
        for epoch in {step.epoch for step in module.steps}
    }


# Running and comparing.


class Counts(NamedTuple):
    """The counts of a run: of optimiser steps, also as loggers count them, and batches."""

    optimiser_steps: int
    logged_steps: int
    batches: int


@dataclass
class Run:
    """The record of one run on this rank.

    Attributes:
        saved: the checkpoints by their points.
        status: the exit status of a run that a signal has stopped.
    """

    steps: list[Step]
    weights: Tensor
    counts: Counts
    events: list[Event]
    saved: dict[str, str]
    status: int | None = None


@dataclass
class Training:
    """A training on this rank.

    Attributes:
        loaders: makes the training loaders.
        directory: where the ranks connect.
        devices: the number of ranks.
        options: of the Trainer; "model" makes the module from ``loaders``.
        strategy: options of the strategy.
        name: the folder for checkpoints in ``directory``.
        side: whether the strategy is ours or stock's.
    """

    loaders: Loaders
    directory: Path
    devices: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    name: str = "run"
    side: Kind = "ours"

    def run(
        self,
        *points: str,
        ckpt_path: str | None = None,
        fail_at: tuple[int, int] | None = None,
        **options: Any,
    ) -> Run:
        """Train from the beginning, or from a checkpoint with another seed.

        Args:
            points: where to save, see ``Saver``.
            ckpt_path: the checkpoint to resume.
            fail_at: see ``Net``.
            **options: of the Trainer, in addition to those of the training.
        """
        chosen: dict[str, Any] = {
            "max_epochs": 3,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
            "devices": self.devices,
            **self.options,
            **options,
        }
        L.seed_everything(7 if ckpt_path is None else 8, verbose=False)
        module = chosen.pop("model", Net)(self.loaders)
        module.fail_at = fail_at
        saver = Saver(self.directory / self.name, points)
        chosen["callbacks"] = [saver, *chosen.get("callbacks", ())]
        trainer = make_trainer(make_strategy(self.side, self.directory, **self.strategy), **chosen)
        status = _fit_until_stop(trainer, module, ckpt_path)
        loop = trainer.fit_loop.epoch_loop
        return Run(
            steps=module.steps,
            weights=torch.cat([each.detach().flatten() for each in module.parameters()]),
            counts=Counts(
                optimiser_steps=trainer.global_step,
                logged_steps=loop._batches_that_stepped,
                batches=loop.batch_progress.total.completed,
            ),
            events=module.events,
            saved=saver.saved,
            status=status,
        )


class Resumed(NamedTuple):
    """A resumed run, and its warnings that an epoch starts again."""

    run: Run
    warned: list[str]


def resume(training: Training, path: str, **options: Any) -> Resumed:
    """Resume a checkpoint with more options of the Trainer."""
    with warnings_with("that epoch starts again") as warned:
        run = training.run(ckpt_path=path, **options)
    return Resumed(run, warned)


def _fit_until_stop(trainer: L.Trainer, module: Net, ckpt_path: str | None) -> int | None:
    """Train until the end or a stop; return the exit status if a signal stopped it."""
    try:
        trainer.fit(module, ckpt_path=ckpt_path)
    except Stopped:
        assert module.fail_at is not None
    except SystemExit as end:
        return int(end.code or 0)
    return None


def difference(whole: Run, done: int, resumed: Run, *, batches_of_step: int = 1) -> str:
    """Describe how a run that was resumed after ``done`` batches differs from the whole one,
    with this number of batches in an optimiser step.

    Return an empty string if both are equal.
    """
    steps = _last(whole.steps, len(resumed.steps))
    repeated = len(resumed.steps) - len(whole.steps[done:])  # those after the last optimiser step
    if not 0 <= repeated < batches_of_step or resumed.steps != steps:
        return f"reads {resumed.steps} instead of {whole.steps[done:]}"
    if resumed.steps and resumed.counts != whole.counts:
        return f"counts {resumed.counts} instead of {whole.counts}"
    if resumed.events != _last(whole.events, len(resumed.events)):
        return f"continues with {resumed.events} after {whole.events}"
    return "" if torch.equal(resumed.weights, whole.weights) else "ends with other weights"


def _last(items: list[Any], number: int) -> list[Any]:
    return items[len(items) - number :]


def generations(
    training: Training, points: Sequence[str], later_points: Sequence[str] = ()
) -> dict[str, str]:
    """Resume a run at each of its points, and the resumed runs at each of the later ones; return
    the differences from the whole run.

    The keys are the points at which the checkpoints were saved, such as
    "train_batch_end-1/train_batch_end-4". The last runs save nothing, which shows that
    saving changes nothing.
    """
    whole = training.run(*points)
    batches_of_step = training.options.get("accumulate_grad_batches", 1)
    differences: dict[str, str] = {}

    def resume_at(point: str, run: Run, name: str, *saved_at: str) -> Run:
        done = int(point.rpartition("-")[2])
        in_own_folder = replace(training, name=f"{training.name}/{name}")
        resumed = in_own_folder.run(*saved_at, ckpt_path=run.saved[point])
        differences[name] = difference(whole, done, resumed, batches_of_step=batches_of_step)
        return resumed

    for point in points:
        resumed = resume_at(point, whole, point, *later_points)
        for later in later_points:
            resume_at(later, resumed, f"{point}/{later}")
    return {name: text for name, text in differences.items() if text}
