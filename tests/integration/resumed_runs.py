"""Runs that save at many points, and what differs when they are resumed there, and resumed again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from tests.harness.training import make_strategy
from tests.integration.continuing import Moment, Net, Numbers, Run, Saver, fit

Order = Literal["lightning's", "distributed", "plain", "drawn"]


class SavesAtAll(Saver):
    """Saves at each of these moments; a file is named after its moment and the steps that this run had done."""

    def __init__(self, moments: Iterable[Moment], directory: Path) -> None:
        super().__init__("train_batch_end", directory)
        self.moments = set(moments)
        directory.mkdir(parents=True, exist_ok=True)

    def _save(self, trainer: L.Trainer, moment: Moment) -> None:
        if moment in self.moments and not trainer.sanity_checking:
            assert isinstance(trainer.lightning_module, Net)
            done = len(trainer.lightning_module.steps)
            self.saved.append((f"{self.directory}/{moment}-{done}.ckpt", done))
            trainer.save_checkpoint(self.saved[-1][0])


class Reversed(DistributedSampler[Any]):
    """A sampler of the user's own that knows about ranks and epochs."""

    def __iter__(self) -> Iterator[Any]:
        return reversed(list(super().__iter__()))


class Turning(Sampler[int]):
    """A sampler of the user's own that deals out by itself, and begins each epoch one sample further on."""

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


class ValidatesWithWorkers(Net):
    """Has a worker for its validation, too, that stays."""

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(Numbers(4), batch_size=1, **workers(persistent_workers=True))


def workers(number: int = 1, **options: Any) -> dict[str, Any]:
    return {"num_workers": number, "multiprocessing_context": "fork", **options}


def ordered(order: Order, samples: int, rank: int, world_size: int, **options: Any) -> DataLoader[Any]:
    """A loader of batches of two samples in some order."""
    data: Dataset[Any] = Numbers(samples)
    if order == "distributed":
        return DataLoader(data, 2, sampler=Reversed(data, world_size, rank, seed=3), **options)
    if order == "plain":
        return DataLoader(data, 2, sampler=Turning(samples, rank, world_size), **options)
    return DataLoader(data, 2, shuffle=True, **options)


@dataclass
class Training:
    """A way to train, on this rank."""

    loaders: Callable[[], Any]
    directory: Path
    devices: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    name: str = "run"  # of the folder for its checkpoints; ranks meet in the directory itself

    def run(self, **options: Any) -> Run:
        strategy = make_strategy("ours", self.directory, **self.strategy)
        chosen = {"devices": self.devices, "max_epochs": 4, "limit_val_batches": 0, **self.options, **options}
        return fit(strategy, self.loaders, **chosen)

    def saving(self, name: str, *moments: Moment, **options: Any) -> Run:
        return self.run(saver=SavesAtAll(moments, self.directory / self.name / name), **options)

    @property
    def accumulated(self) -> int:
        return int(self.options.get("accumulate_grad_batches", 1))


def point(path: str) -> str:
    """The moment of a checkpoint and the steps that its run had done."""
    return Path(path).stem


def again(training: Training, whole: Run, done: int, resumed: Run) -> int:
    """How many steps before ``done`` a resumed run repeats: those that no optimiser step had followed yet."""
    repeated = len(resumed.steps) - len(whole.steps[done:])
    return repeated if 0 <= repeated < training.accumulated else 0


def difference(training: Training, whole: Run, done: int, resumed: Run) -> str:
    """What a run that was resumed after so many steps has done otherwise than the whole one; empty: nothing."""
    left = whole.steps[done - again(training, whole, done, resumed) :]
    if resumed.steps != left:
        return f"reads {resumed.steps} instead of {left}"
    if resumed.steps and resumed.counts != whole.counts:
        return f"counts {resumed.counts} instead of {whole.counts}"
    return "" if torch.equal(resumed.weights, whole.weights) else "ends with other weights"


def differences(training: Training, whole: Run, saved: Iterable[tuple[str, int]], **options: Any) -> dict[str, str]:
    """By checkpoint, what a run that is resumed there does otherwise; those that do the same are left out."""
    found = {point(path): difference(training, whole, done, resume(training, path, options)) for path, done in saved}
    return {name: text for name, text in found.items() if text}


def resume(training: Training, path: str, options: dict[str, Any]) -> Run:
    return training.run(ckpt_path=path, **options)


Points = Collection[str]  # a moment and the steps that were done, of the run as a whole: "train_epoch_end-4"


def generations(training: Training, moments: Iterable[Moment], *chosen: Points, **options: Any) -> dict[str, str]:
    """By checkpoints, each saved by a run that was resumed from the one before, what the last run does otherwise.

    ``chosen`` says which checkpoints of a run without a stop are resumed from, then which of each resumed run, and
    so on. Every one that is chosen must be there.
    """
    moments = list(moments)
    whole = training.run(**options)
    first = training.saving("first", *moments, **options)
    found = {} if first.steps == whole.steps and torch.equal(first.weights, whole.weights) else {"first": "differs"}
    return found | _later(training, whole, "first", 0, first, moments, chosen, options)


def _later(
    training: Training,
    whole: Run,
    name: str,
    begun: int,
    run: Run,
    moments: list[Moment],
    chosen: Sequence[Points],
    options: dict[str, Any],
) -> dict[str, str]:
    if not chosen:
        return {}
    saved = {f"{point(path).rpartition('-')[0]}-{begun + done}": (path, begun + done) for path, done in run.saved}
    assert set(chosen[0]) <= saved.keys(), f"{name} has saved {list(saved)}, and not all of {chosen[0]}"
    found = {}
    for at in chosen[0]:
        path, done = saved[at]
        later = f"{name}/{at}"
        wanted = moments if chosen[1:] else []
        resumed = training.saving(later, *wanted, ckpt_path=path, **options)
        wrong = difference(training, whole, done, resumed)
        if wrong:
            found[later] = wrong
        else:
            start = done - again(training, whole, done, resumed)
            found |= _later(training, whole, later, start, resumed, moments, chosen[1:], options)
    return found
