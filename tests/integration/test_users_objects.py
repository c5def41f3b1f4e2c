"""The user's loaders, samplers and datasets: left as they are, found again in the Trainer, and told the epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from tests.harness.ranks import by_hand_env, run_ranks
from tests.integration.continuing import (
    Moment,
    Net,
    Numbers,
    Points,
    Reversed,
    Run,
    Stream,
    Training,
    Turning,
    generations,
    ordered,
    workers,
)

Loaders = Callable[[int, int], Any]  # of a rank among so many
SAMPLES = 16
KEPT = workers(persistent_workers=True)
MOMENTS: tuple[Moment, ...] = ("train_batch_end", "train_epoch_end")
POINTS: tuple[Points, ...] = (
    ("train_batch_end-1", "train_batch_end-4", "train_epoch_end-4"),
    ("train_batch_end-6", "train_epoch_end-8"),
)


class InTwos(BatchSampler):
    """A batch sampler of the user's own."""


class OwnLoader(DataLoader[Any]):
    """A loader of the user's own."""


def own_batches(rank: int, world_size: int) -> DataLoader[Any]:
    sampler = InTwos(Turning(SAMPLES, rank, world_size), 2, drop_last=False)
    return DataLoader(Numbers(SAMPLES), batch_sampler=sampler)  # type: ignore[arg-type]


def stream(rank: int, world_size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Stream(8, rank), batch_size=2, **options)


LOADERS: dict[str, tuple[Loaders, dict[str, Any]]] = {
    "shuffled": (lambda *own: ordered("lightning's", SAMPLES, *own), {}),
    "shuffled, by nobody": (
        lambda *own: DataLoader(Numbers(8), 2, sampler=RandomSampler(range(8))),
        {"use_distributed_sampler": False},
    ),
    "a sampler": (lambda *own: ordered("distributed", SAMPLES, *own), {}),
    "a sampler, workers": (lambda *own: ordered("distributed", SAMPLES, *own, **workers()), {}),
    "a sampler, workers that stay": (lambda *own: ordered("distributed", SAMPLES, *own, **KEPT), {}),
    "a plain sampler": (lambda *own: ordered("plain", SAMPLES, *own), {"use_distributed_sampler": False}),
    "a batch sampler": (own_batches, {"use_distributed_sampler": False}),
    "a loader": (lambda *own: OwnLoader(Numbers(SAMPLES), 2, shuffle=True), {}),
    "a stream": (stream, {}),
}


def snapshot(loader: Any) -> dict[str, Any]:
    """What there is of a loader, its samplers and its dataset. Some are told the epoch, and torch keeps workers."""
    parts = {"loader": loader, "dataset": loader.dataset, "sampler": loader.sampler}
    parts |= {"batch sampler": loader.batch_sampler}
    found = {}
    for name, part in parts.items():
        attributes = {key: id(value) for key, value in vars(part).items() if key not in ("epoch", "_iterator")}
        found[name] = (id(part), type(part), attributes)
    return found


def is_as_before(rank: int, world_size: int, directory: Path) -> dict[str, list[str]]:
    """What is different after a run, after one that was resumed, and after one that failed."""
    found = {}
    for name, (make, options) in LOADERS.items():
        loader = make(rank, world_size)
        before = snapshot(loader)
        training = Training(
            lambda loader=loader: loader, directory, world_size, {**options, "max_epochs": 2}, name=name
        )  # type: ignore[misc]
        whole = training.saving("whole", "train_batch_end")
        wrong = [f"{part} after a run" for part, was in before.items() if snapshot(loader)[part] != was]
        training.run(ckpt_path=whole.saved[1][0])
        wrong += [f"{part} after a resume" for part, was in before.items() if snapshot(loader)[part] != was]
        training.run(ckpt_path=whole.saved[1][0], fail_at=(0, 3))
        wrong += [f"{part} after a failure" for part, was in before.items() if snapshot(loader)[part] != was]
        found[name] = wrong
    return found


def test_the_users_objects_are_as_they_were(tmp_path: Path) -> None:
    """Loader, sampler, batch sampler and dataset have the class and the attributes that they had before the run."""
    found = run_ranks(is_as_before, 2, tmp_path, env=by_hand_env(2), time_limit=110)
    assert found == [{name: [] for name in LOADERS}] * 2


class Peeks(Net):
    """Looks at a batch wherever it can."""

    def peek(self) -> None:
        assert next(iter(self.trainer.train_dataloader)) is not None  # type: ignore[arg-type]

    def on_train_start(self) -> None:
        self.peek()

    def on_train_epoch_start(self) -> None:
        self.peek()

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index in (0, 2):
            self.peek()

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if index in (1, 3):
            self.peek()

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.peek()


class PeeksAtLoaders(Peeks):
    """The same where there are several."""

    def peek(self) -> None:
        for loader in self.trainer.train_dataloader:  # type: ignore[union-attr]
            assert next(iter(loader)) is not None


def both(rank: int, world_size: int) -> list[Any]:
    return [ordered("distributed", SAMPLES, rank, world_size), stream(rank, world_size)]


PEEKED: dict[str, tuple[Loaders, dict[str, Any]]] = {
    **{name: LOADERS[name] for name in ("shuffled", "a sampler", "a sampler, workers", "a batch sampler", "a stream")},
    "a list": (both, {"kind": PeeksAtLoaders}),
}


def peek(rank: int, world_size: int, directory: Path, names: list[str]) -> dict[str, dict[str, str]]:
    found = {}
    for name in names:
        make, options = PEEKED[name]
        chosen = {"max_epochs": 3, "dropout": False, **options}
        training = Training(lambda make=make: make(rank, world_size), directory, world_size, chosen, name=name)  # type: ignore[misc]
        undisturbed = training.run(kind=Net)
        peeking = Training(training.loaders, directory, world_size, {"kind": Peeks, **chosen}, name=name)
        found[name] = generations(peeking, MOMENTS, *POINTS)
        if not _same(undisturbed, peeking.run()):
            found[name]["peeked at"] = "differs"
    return found


def peek_at_workers(rank: int, world_size: int, directory: Path) -> dict[str, bool]:
    found = {}
    for order in ("lightning's", "distributed"):
        chosen = {"max_epochs": 3, "dropout": False}
        training = Training(lambda order=order: ordered(order, SAMPLES, rank, world_size, **KEPT), directory, 2, chosen)  # type: ignore[misc]
        found[order] = _same(training.run(), training.run(kind=Peeks))
    return found


def test_who_peeks_at_a_batch_of_workers_that_stay_changes_nothing(tmp_path: Path) -> None:
    """One iterator is all that torch has for such a loader; what others read of it must not be taken from training."""
    found = run_ranks(peek_at_workers, 2, tmp_path, env=by_hand_env(2), time_limit=60)
    assert found == [{"lightning's": True, "distributed": True}] * 2


def _same(run: Run, other: Run) -> bool:
    return run.steps == other.steps and torch.equal(run.weights, other.weights)


@pytest.mark.parametrize("names", [list(PEEKED)[::2], list(PEEKED)[1::2]], ids=["one half", "other half"])
def test_who_peeks_at_a_batch_changes_nothing(names: list[str], tmp_path: Path) -> None:
    """With `next(iter(trainer.train_dataloader))` in any hook, a run and those that resume it read the same batches."""
    found = run_ranks(peek, 2, tmp_path, names, env=by_hand_env(2), time_limit=110)
    assert found == [{name: {} for name in names}] * 2


class Plans(Net):
    """Has Lightning make its loaders before anything is restored."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches > 0
        return super().configure_optimizers()


def combined(rank: int, world_size: int) -> CombinedLoader:
    return CombinedLoader([ordered("lightning's", SAMPLES, rank, world_size), stream(rank, world_size)], "max_size")


PLANNED: dict[str, tuple[Loaders, dict[str, Any]]] = {
    "samples": LOADERS["shuffled"],
    "accumulation": (LOADERS["shuffled"][0], {"accumulate_grad_batches": 2}),
    "a stream, workers that stay": (lambda *own: stream(*own, **KEPT), {"max_epochs": -1, "max_steps": 11}),
    "a stream among others": (combined, {"max_epochs": -1, "max_steps": 11}),
}


def plan(rank: int, world_size: int, directory: Path, names: list[str]) -> dict[str, dict[str, str]]:
    found = {}
    for name in names:
        make, options = PLANNED[name]
        chosen = {"max_epochs": 3, "kind": Plans, "dropout": False, **options}
        training = Training(lambda make=make: make(rank, world_size), directory, world_size, chosen, name=name)  # type: ignore[misc]
        found[name] = generations(training, MOMENTS, *POINTS)
    return found


@pytest.mark.parametrize("names", [list(PLANNED)[:2], list(PLANNED)[2:]], ids=["samples", "streams"])
def test_a_plan_of_the_steps_makes_no_difference_to_a_resume(names: list[str], tmp_path: Path) -> None:
    """With `estimated_stepping_batches` in `configure_optimizers`, what is left of the epoch comes first."""
    found = run_ranks(plan, 2, tmp_path, names, env=by_hand_env(2), time_limit=110)
    assert found == [{name: {} for name in names}] * 2


class TellingSamples(Numbers):
    """Samples that tell the epoch, too."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + 100 * (self.epoch + 1)


class TellingStream(IterableDataset[Tensor]):
    """The same without a length."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(8):
            yield torch.tensor([float(index + 100 * (self.epoch + 1))])


TELLING: dict[str, Loaders] = {
    "samples": lambda *_: DataLoader(TellingSamples(SAMPLES), 2, shuffle=True, **KEPT),
    "a sampler": lambda rank, size: DataLoader(
        TellingSamples(SAMPLES), 2, sampler=Reversed(range(SAMPLES), size, rank), **KEPT
    ),
    "a stream": lambda *_: DataLoader(TellingStream(), 2, **KEPT),
}


def tell(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    """Batches that tell another epoch than that in which they are trained on, and what differs after resumes."""
    found: dict[str, Any] = {}
    for name, make in TELLING.items():
        chosen = {"max_epochs": 3, "dropout": False}
        training = Training(lambda make=make: make(rank, world_size), directory, world_size, chosen, name=name)  # type: ignore[misc]
        wrong = [step for step in training.run().steps if any(number // 100 != step[0] + 1 for number in step[2:])]
        found[name] = wrong, generations(training, MOMENTS, *POINTS)
    return found


def test_the_epoch_reaches_datasets_in_workers_that_stay(tmp_path: Path) -> None:
    """`set_epoch` of the dataset is called in each worker before each epoch, after resumes as well."""
    found = run_ranks(tell, 2, tmp_path, env=by_hand_env(2), time_limit=110)
    assert found == [{name: ([], {}) for name in TELLING}] * 2
