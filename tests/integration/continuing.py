"""Stop and resume runs, and compare the batches and weights of each rank with those of
an unbroken run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from tests.harness.training import At, Kind, make_strategy, make_trainer

# a hook of a callback without its "on_", and the steps of the whole run by then:
# "train_batch_end-4"
Point = str
Points = Collection[Point]
Order = Literal["lightning's", "distributed", "plain"]
Loaders = Callable[[int, int], Any]  # of a rank in a world of this size


class Step(NamedTuple):
    """A training step of one rank, with the samples of its batch."""

    epoch: int
    batch: int
    samples: tuple[int, ...]

    @property
    def moment(self) -> tuple[int, int]:
        """The epoch and the batch, which are the same on all ranks."""
        return self.epoch, self.batch


class Numbers(Dataset[Tensor]):
    """Samples that are their own indices."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Stream(IterableDataset[Tensor]):
    """A stream of numbers that only this rank has, in another order each epoch, without
    a length.
    """

    def __init__(self, length: int, rank: int) -> None:
        self.numbers = range(rank * 1000, rank * 1000 + length)
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        shift = self.epoch % len(self.numbers)
        for number in (*self.numbers[shift:], *self.numbers[:shift]):
            yield torch.tensor([float(number)])


class Reversed(DistributedSampler[Any]):
    """A user's sampler with ranks and epochs."""

    def __iter__(self) -> Iterator[Any]:
        return reversed(list(super().__iter__()))


class Turning(Sampler[int]):
    """A user's sampler that divides the samples itself, and begins each epoch one
    sample further.
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


def workers(number: int = 1, **options: Any) -> dict[str, Any]:
    return {"num_workers": number, "multiprocessing_context": "fork", **options}


KEPT = workers(persistent_workers=True)


def sampled(order: Order, samples: int, **options: Any) -> Loaders:
    """Return loaders of batches of two samples in some order."""
    data: Dataset[Any] = Numbers(samples)

    def make(rank: int, world_size: int) -> DataLoader[Any]:
        if order == "distributed":
            return DataLoader(data, 2, sampler=Reversed(data, world_size, rank, seed=3), **options)
        if order == "plain":
            return DataLoader(data, 2, sampler=Turning(samples, rank, world_size), **options)
        return DataLoader(data, 2, shuffle=True, **options)

    return make


def stream(samples: int = 9, kind: Any = DataLoader, number: int = 0, **options: Any) -> Loaders:
    """Return loaders with batches of two numbers from each rank's stream."""
    return lambda rank, world_size: kind(Stream(samples, rank + number), batch_size=2, **options)


def shuffled(samples: int = 12, **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(Numbers(samples), **{"batch_size": 2, "shuffle": True, **options})


def signalled(
    hook: str,
    earlier: int = 0,
    signum: int = signal.SIGTERM,
    *,
    ranks: Collection[int] = (),
) -> At:
    """Return a callback that signals its process at the n-th call of a hook, on these
    ranks or on all.
    """
    return At(hook, lambda trainer: os.kill(os.getpid(), signum), earlier=earlier, ranks=ranks)


class Stopped(Exception):
    """The exception that stops a run."""


class Net(L.LightningModule):
    """Records the batches that it is trained on.

    With dropout its weights also depend on the random numbers.
    """

    validation: Mapping[str, Any] = MappingProxyType({})  # options of its loader

    def __init__(
        self,
        loaders: Callable[[], Any],
        fail_at: tuple[int, int] | None = None,
        plateau: bool = False,
    ) -> None:
        super().__init__()
        self.loaders = loaders
        self.fail_at = fail_at
        self.plateau = plateau
        self.layers = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.steps: list[Step] = []
        self.events: list[
            tuple[Any, ...]
        ] = []  # steps, validations and ends of epochs, each with its step count

    def happens(self, what: str, *results: float) -> None:
        self.events.append((what, steps_done(self.trainer), *results))

    def on_fit_start(self) -> None:
        # Lightning has seeded all ranks equally.
        torch.manual_seed(torch.initial_seed() + 10 * self.global_rank)

    def training_step(self, batch: Any, index: int) -> Tensor:
        epoch = self.trainer.fit_loop.epoch_progress.current.processed
        parts = [
            part
            for part in (batch if isinstance(batch, (list, tuple)) else [batch])
            if part is not None
        ]
        if self.fail_at == (epoch, index):
            raise Stopped
        self.happens("step")
        samples = tuple(int(number) for part in parts for number in part.flatten())
        self.steps.append(Step(epoch, index, samples))
        loss: Tensor = torch.cat([self.layers(part / 100) for part in parts]).square().mean()
        return loss

    def on_validation_start(self) -> None:
        self.happens("validation")

    def on_train_epoch_end(self) -> None:
        self.happens("epoch end")
        self.log("epoch", float(self.current_epoch), batch_size=1)

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.layers(batch)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        schedulers: list[dict[str, Any]] = [
            {"scheduler": StepLR(optimizer, 2, 0.7), "interval": "step"},
            {"scheduler": StepLR(optimizer, 1, 0.6), "interval": "epoch"},
            {"scheduler": ReduceLROnPlateau(optimizer, patience=0, factor=0.5), "monitor": "epoch"},
        ]
        return [optimizer], schedulers if self.plateau else schedulers[:2]

    def train_dataloader(self) -> Any:
        return self.loaders()

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Numbers(4), batch_size=1, **self.validation)


class LongValidated(Net):
    """Can be stopped in the middle of a validation: its ranks stay in step, or one
    might finish it before the stop.
    """

    samples = 120

    def val_dataloader(self) -> Any:
        return DataLoader(Numbers(self.samples), batch_size=1)

    def validation_step(self, batch: Tensor, index: int) -> None:
        dist.all_reduce(torch.zeros(1))
        self.log("result", self.layers(batch).sum(), sync_dist=True)

    def on_validation_end(self) -> None:
        self.happens("result", float(self.trainer.callback_metrics["result"]))


def samples_of(steps: Iterable[Step]) -> list[int]:
    """Return the samples of all batches, in order."""
    return [sample for step in steps for sample in step.samples]


def steps_done(trainer: L.Trainer) -> int:
    """Return the steps of a whole run, including those before it was resumed."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.processed


class Saver(L.Callback):
    """Saves a checkpoint at each of these points."""

    def __init__(self, directory: Path, points: Points) -> None:
        self.saved = {point: f"{directory}/{point}.ckpt" for point in points}
        for moment in {point.partition("-")[0] for point in points}:
            setattr(self, f"on_{moment}", partial(self.save, moment))

    def save(self, moment: str, trainer: L.Trainer, *_: Any) -> None:
        path = self.saved.get(f"{moment}-{steps_done(trainer)}")
        if path is not None:
            trainer.save_checkpoint(path)


@dataclass
class Run:
    """The record of one run on this rank."""

    steps: list[Step]
    weights: Tensor
    counts: tuple[Any, ...]
    events: list[tuple[Any, ...]]
    saved: dict[Point, str]
    status: int | None = None  # of a run that a signal has stopped


@dataclass
class Training:
    """A training on this rank, with options for the Trainer and for ``run``."""

    loaders: Callable[[], Any]
    directory: Path
    devices: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    name: str = "run"  # of the folder for its checkpoints; ranks connect in the directory itself
    side: Kind = "ours"

    def run(self, *points: Point, into: str = "", **options: Any) -> Run:
        """Train from the beginning, or from a checkpoint with another seed; save at
        these points.
        """
        defaults = {
            "devices": self.devices,
            "max_epochs": 3,
            "limit_val_batches": 0,
            "num_sanity_val_steps": 0,
        }
        chosen: dict[str, Any] = {**defaults, **self.options, **options}
        model = chosen.pop("model", Net)
        fail_at = chosen.pop("fail_at", None)
        plateau = chosen.pop("plateau", False)
        ckpt_path = chosen.pop("ckpt_path", None)
        saver = Saver(self.directory / self.name / into, points)
        L.seed_everything(7 if ckpt_path is None else 8, verbose=False)
        net = model(self.loaders, fail_at, plateau)
        net.validation = chosen.pop("validation", {})
        status: int | None = None
        if not chosen.pop("dropout", True):
            net.layers[1] = nn.Identity()
        strategy = make_strategy(self.side, self.directory, **self.strategy)
        chosen["callbacks"] = [saver, *chosen.get("callbacks", ())]
        trainer = make_trainer(strategy, **chosen)
        try:
            trainer.fit(net, ckpt_path=ckpt_path)
        except Stopped:
            assert fail_at is not None
        except SystemExit as end:
            status = int(end.code or 0)
        loop = trainer.fit_loop.epoch_loop
        counts = (
            trainer.global_step,
            loop._batches_that_stepped,
            loop.batch_progress.total.completed,
        )
        weights = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
        return Run(net.steps, weights, counts, net.events, saver.saved, status)


def difference(training: Training, whole: Run, done: int, resumed: Run) -> str:
    """Describe how a run that was resumed after ``done`` steps differs from the whole
    one; empty if equal.
    """
    # Steps that no optimiser step had followed yet.
    again = len(resumed.steps) - len(whole.steps[done:])
    is_within_step = 0 <= again < training.options.get("accumulate_grad_batches", 1)
    if not is_within_step or resumed.steps != whole.steps[done - again :]:
        return f"reads {resumed.steps} instead of {whole.steps[done:]}"
    if resumed.steps and resumed.counts != whole.counts:
        return f"counts {resumed.counts} instead of {whole.counts}"
    if resumed.events != whole.events[len(whole.events) - len(resumed.events) :]:
        return f"continues with {resumed.events} after {whole.events}"
    return "" if torch.equal(resumed.weights, whole.weights) else "ends with other weights"


def generations(training: Training, *chosen: Points) -> dict[str, str]:
    """By checkpoints, each saved by a run that was resumed from the one before, what
    the last run does otherwise.

    ``chosen`` says which ones are resumed from: of a run without a stop, then of each
    resumed run, and so on. The last ones save nothing, which shows that saving changes
    nothing.
    """
    whole = training.run(*chosen[0])
    found: dict[str, str] = {}
    runs = [("from", whole)]
    for points, later in zip(chosen, [*chosen[1:], ()], strict=True):
        earlier = runs
        runs = []
        for before, run in earlier:
            for point in points:
                name = f"{before}/{point}"
                done = int(point.rpartition("-")[2])
                resumed = training.run(*later, into=name, ckpt_path=run.saved[point])
                if wrong := difference(training, whole, done, resumed):
                    found[name] = wrong
                else:
                    runs.append((name, resumed))
    return found
