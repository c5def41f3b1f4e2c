"""The user's loaders, samplers and datasets: left as they are, found again in the Trainer, and told the epoch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader

from tests.harness.ranks import by_hand_env, run_ranks
from tests.integration.continuing import (
    Moment,
    Net,
    Numbers,
    Points,
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
POINTS: Points = ("train_batch_end-1", "train_epoch_end-4")


class InTwos(BatchSampler):
    """A batch sampler of the user's own."""


class OwnLoader(DataLoader[Any]):
    """A loader of the user's own."""


def own_batches(rank: int, world_size: int) -> DataLoader[Any]:
    sampler = InTwos(Turning(SAMPLES, rank, world_size), 2, drop_last=False)
    return DataLoader(Numbers(SAMPLES), batch_sampler=sampler)  # type: ignore[arg-type]


def stream(rank: int, world_size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Stream(8, rank), batch_size=2, **options)


def both(rank: int, world_size: int) -> list[Any]:
    return [ordered("distributed", SAMPLES, rank, world_size), stream(rank, world_size)]


LOADERS: dict[str, tuple[Loaders, dict[str, Any]]] = {
    "shuffled": (lambda *own: OwnLoader(Numbers(SAMPLES), 2, shuffle=True), {}),
    "a sampler, workers that stay": (lambda *own: ordered("distributed", SAMPLES, *own, **KEPT), {}),
    "a batch sampler": (own_batches, {"use_distributed_sampler": False}),
    "a stream": (stream, {}),
}


def training(directory: Path, name: str, make: Loaders, rank: int, world_size: int, **options: Any) -> Training:
    chosen = {"max_epochs": 3, "dropout": False, **options}
    return Training(lambda: make(rank, world_size), directory, world_size, chosen, name=name)


def snapshot(loader: Any) -> dict[str, Any]:
    """What there is of a loader, its samplers and its dataset. Some are told the epoch, and torch keeps workers."""
    parts = {"loader": loader, "dataset": loader.dataset, "sampler": loader.sampler}
    parts |= {"batch sampler": loader.batch_sampler}
    found = {}
    for name, part in parts.items():
        attributes = {key: id(value) for key, value in vars(part).items() if key not in ("epoch", "_iterator")}
        found[name] = (id(part), type(part), attributes)
    return found


def is_as_before(rank: int, world_size: int, directory: Path) -> list[str]:
    """What is different after a run, after one that was resumed, and after one that failed."""
    wrong = []
    for name, (make, options) in LOADERS.items():
        loader = make(rank, world_size)
        before = snapshot(loader)
        runs = training(directory, name, lambda *_, loader=loader: loader, rank, world_size, **options)  # type: ignore[misc]
        checkpoint = runs.saving("whole", "train_batch_end").saved[1][0]
        for how in ({}, {"ckpt_path": checkpoint}, {"ckpt_path": checkpoint, "fail_at": (0, 3)}):
            runs.run(**how)
            wrong += [f"{part} of {name} after {how}" for part, was in before.items() if snapshot(loader)[part] != was]
    return wrong


def test_the_users_objects_are_as_they_were(tmp_path: Path) -> None:
    """Loader, sampler, batch sampler and dataset have the class and the attributes that they had before the run."""
    assert run_ranks(is_as_before, 2, tmp_path, env=by_hand_env(2), time_limit=110) == [[], []]


class Peeks(Net):
    """Looks at a batch wherever it can."""

    def peek(self) -> None:
        loaders: Any = self.trainer.train_dataloader
        for loader in loaders if isinstance(loaders, list) else [loaders]:
            assert next(iter(loader)) is not None

    on_train_start = on_train_epoch_start = peek

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if index in (0, 2):
            self.peek()

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if index in (1, 3):
            self.peek()

    def on_train_epoch_end(self) -> None:
        super().on_train_epoch_end()
        self.peek()


def peek(rank: int, world_size: int, directory: Path) -> dict[str, dict[str, str]]:
    found = {}
    for name, (make, options) in {**LOADERS, "a list": (both, dict[str, Any]())}.items():
        runs = training(directory, name, make, rank, world_size, kind=Peeks, **options)
        undisturbed, peeking = runs.run(kind=Net), runs.run()
        found[name] = {} if name.endswith("that stay") else generations(runs, MOMENTS, POINTS)
        if undisturbed.steps != peeking.steps or not torch.equal(undisturbed.weights, peeking.weights):
            found[name]["peeked at"] = "differs"
    return found


def test_a_look_at_a_batch_changes_nothing(tmp_path: Path) -> None:
    """With `next(iter(trainer.train_dataloader))` in any hook, a run and those that resume it read the same batches."""
    found = run_ranks(peek, 2, tmp_path, env=by_hand_env(2), time_limit=110)
    assert found == [{name: {} for name in (*LOADERS, "a list")}] * 2
