"""Every kind of loader, sampler and dataset gets the epoch, and its random numbers."""

import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    get_worker_info,
)

from lightning_ddp_ext import SamplerEpochSeeding
from tests.harness import training
from tests.integration import continuing

Epochs = dict[int, set[int]]  # what is read in each epoch


class TakesEpoch:
    """Keeps the last epoch that it was given; 99 without any."""

    epoch = 99

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Samples(TakesEpoch, Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(self.epoch)])


class Stream(TakesEpoch, IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.tensor([float(self.epoch)])] * 4)


class Started(Stream):
    """Yields nothing in a worker whose ``worker_init_fn`` was not called."""

    is_started = False

    def __iter__(self) -> Iterator[Tensor]:
        return super().__iter__() if self.is_started else iter(())


def start(worker: int) -> None:
    dataset: Any = get_worker_info().dataset
    dataset.is_started = True


class Echo(Samples):
    """Returns its index: samplers encode the epoch in their indices."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class EpochSampler(TakesEpoch, Sampler[Any]):
    """A sampler, or, with a batch, a batch sampler that does not inherit from torch's."""

    def __init__(self, batch: int = 0) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        return iter([[self.epoch] * self.batch if self.batch else self.epoch] * 4)

    def __len__(self) -> int:
        return 4


class Around(Sampler[Any]):
    """A sampler, or batch sampler, that holds another one in its own attribute."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __iter__(self) -> Iterator[Any]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class OwnLoader(TakesEpoch):
    """A loader that is not a DataLoader."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.full((2, 1), float(self.epoch))] * 3)


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    chosen = options if "batch_sampler" in options else {"batch_size": 2, **options}
    return DataLoader(Echo() if dataset is None else dataset, **chosen)


LOADERS: dict[str, Callable[[], Any]] = {
    "a sampler in a sampler": lambda: loader(sampler=Around(EpochSampler())),
    "a batch sampler in another, workers": lambda: loader(
        batch_sampler=Around(EpochSampler(2)), **continuing.KEPT
    ),
    "a stream, persistent workers": lambda: loader(Stream(), **continuing.KEPT),
    "several loaders": lambda: CombinedLoader([loader(Samples()), loader(Stream())], "min_size"),
    "a dataset in others": lambda: loader(ConcatDataset([Subset(Samples(), range(4))])),
    "a loader that is not a DataLoader": OwnLoader,
    "a worker_init_fn of the user's": lambda: loader(
        Started(), worker_init_fn=start, **continuing.KEPT
    ),
}


class Reader(continuing.Net):
    """Records what it reads in each epoch, also in validation."""

    def __init__(self, train: Callable[[], Any], val: Callable[[], Any] = list) -> None:
        super().__init__(train)
        self.val = val
        self.validated: Epochs = {}

    def val_dataloader(self) -> Any:
        return self.val()

    @property
    def read(self) -> Epochs:
        read: Epochs = {}
        for step in self.steps:
            read.setdefault(step.epoch, set()).update(step.samples)
        return read

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        samples = batch.int().flatten().tolist()
        self.validated.setdefault(self.trainer.current_epoch, set()).update(samples)


def train(
    kind: training.Kind,
    directory: Path,
    net: Reader,
    *callbacks: L.Callback,
    ckpt_path: str | None = None,
    **options: Any,
) -> Reader:
    """Train with ours, or with stock and a ``SamplerEpochSeeding``."""
    has_seeding = any(isinstance(callback, SamplerEpochSeeding) for callback in callbacks)
    if kind == "stock" and not has_seeding:
        callbacks = (*callbacks, SamplerEpochSeeding())
    chosen = {
        "max_epochs": 3,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        **options,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        training.fit(kind, directory, net, *callbacks, ckpt_path=ckpt_path, **chosen)
    return net


def read_epochs(kind: training.Kind, directory: Path) -> dict[str, Epochs]:
    return {name: train(kind, directory, Reader(make)).read for name, make in LOADERS.items()}


@pytest.mark.parametrize("kind", training.KINDS)
def test_the_epoch_reaches_whatever_the_batches_are_made_from(
    kind: training.Kind, tmp_path: Path
) -> None:
    """Each batch has the epoch in which it is read, from the first epoch on."""
    for by_loader in training.on_ranks(kind, read_epochs, tmp_path):
        assert by_loader == {name: {0: {0}, 1: {1}, 2: {2}} for name in LOADERS}


def resume_stream(kind: training.Kind, directory: Path) -> Epochs:
    """Resume after the first epoch, which has two batches."""
    make = LOADERS["a stream, persistent workers"]
    point = "train_epoch_end-2"
    saver = continuing.Saver(directory, [point])
    train(kind, directory, Reader(make), saver)
    return train(kind, directory, Reader(make), ckpt_path=saver.saved[point]).read


@pytest.mark.parametrize("kind", training.KINDS)
def test_workers_of_a_resumed_run_get_its_epoch(kind: training.Kind, tmp_path: Path) -> None:
    """Persistent workers have each epoch, from the resumed one on."""
    for epochs in training.on_ranks(kind, resume_stream, tmp_path):
        assert epochs == {1: {1}, 2: {2}}


def validate_each_epoch(kind: training.Kind, directory: Path) -> Epochs:
    validation = [loader(Samples(), **continuing.KEPT), loader(batch_sampler=EpochSampler(2))]
    return train(kind, directory, Reader(OwnLoader, lambda: validation)).validated


@pytest.mark.parametrize("kind", training.KINDS)
def test_validation_loaders_get_the_training_epoch(kind: training.Kind, tmp_path: Path) -> None:
    """Each validation reads with the epoch of training, also in persistent workers."""
    for epochs in training.on_ranks(kind, validate_each_epoch, tmp_path):
        assert epochs == {0: {0}, 1: {1}, 2: {2}}


class Turned(Sampler[int]):
    """Turns its order at each call of ``set_epoch``."""

    def __init__(self) -> None:
        self.order = [0, 1, 2, 3]

    def set_epoch(self, epoch: int) -> None:
        self.order = [*self.order[1:], self.order[0]]

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        return iter(self.order)


class TurnedBatches(Turned):
    """A batch sampler that turns in the same way."""

    def __iter__(self) -> Iterator[Any]:
        return iter([[sample] for sample in self.order])


def count_turns(kind: training.Kind, directory: Path) -> list[continuing.Step]:
    """Read a batch sampler that turns, in a loader that starts again within each epoch."""
    longer = DataLoader(continuing.Numbers(10), batch_size=1)
    loaders = [loader(batch_sampler=TurnedBatches()), longer]
    return train(kind, directory, Reader(lambda: loaders), max_epochs=2).steps


@pytest.mark.parametrize("kind", training.KINDS)
def test_an_object_gets_each_epoch_once(kind: training.Kind, tmp_path: Path) -> None:
    """A batch sampler that turns at each call turns once in an epoch, although it is read
    several times.
    """
    for steps in training.on_ranks(kind, count_turns, tmp_path):
        for epoch, first in enumerate([1, 2]):
            samples = [step.samples[0] for step in steps if step.epoch == epoch]
            assert samples == [(first + place) % 4 for place in range(10)]


class Chance(Samples):
    """Random numbers from all three generators."""

    def __getitem__(self, index: int) -> Tensor:
        drawn = random.getrandbits(50), np.random.randint(2**50), int(torch.randint(2**50, ()))
        return torch.tensor([[number] for number in drawn])


NUMBERS = 3 * 4  # of three generators for each of four samples


def draw(kind: training.Kind, directory: Path) -> tuple[Epochs, Epochs, Epochs]:
    """Return what a rank draws in each epoch, twice with one seed and once with another."""
    # One kind draws in workers and the other in the rank's own process, to cover both.
    workers = {**continuing.KEPT, "num_workers": 2} if kind == "ours" else {}

    def draw_with(seed: int, *, start: int) -> Epochs:
        torch.manual_seed(start)  # what the run would draw without the callback
        net = Reader(partial(loader, Chance(), **workers))
        return train(kind, directory, net, SamplerEpochSeeding(seed=seed), max_epochs=2).read

    return draw_with(5, start=0), draw_with(5, start=1), draw_with(6, start=2)


@pytest.mark.parametrize("kind", training.KINDS)
def test_random_streams_belong_to_seed_epoch_rank_and_worker(
    kind: training.Kind, tmp_path: Path
) -> None:
    """Only runs with the same seed draw the same numbers, on the same rank and epoch."""
    epochs = []
    for first, again, with_other_seed in training.on_ranks(kind, draw, tmp_path):
        assert first == again
        epochs += [*first.values(), *with_other_seed.values()]
    assert [len(numbers) for numbers in epochs] == [NUMBERS] * 2 * 2 * 2  # ranks, seeds, epochs
    assert len(set().union(*epochs)) == NUMBERS * len(epochs)


# What users and Lightning set, without ``SamplerEpochSeeding``.


class Levels(Samples):
    """Has a ``set_epoch`` with two arguments, which only its user can call."""

    def set_epoch(self, epoch: int, level: float) -> None:  # type: ignore[override]
        self.epoch = epoch


def own_sampler() -> Any:
    return loader(sampler=DistributedSampler(range(8), 2, seed=1))


class SetsEpoch(L.Callback):
    """Gives a sampler another number than the epoch."""

    def on_train_epoch_start(self, trainer: L.Trainer, module: Any) -> None:
        trainer.train_dataloader.sampler.set_epoch(100 + trainer.current_epoch)


READS = ("on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_end")


class ReadsOrder(L.Callback):
    """Reads the training loader in hooks."""

    def __init__(self) -> None:
        self.read: list[tuple[str, list[Any]]] = []
        for hook in READS:
            setattr(self, hook, partial(self._read, hook))

    def _read(self, hook: str, trainer: L.Trainer, module: Any) -> None:
        self.read.append((hook, [batch.tolist() for batch in trainer.train_dataloader]))


SET_BY_USERS: dict[str, Callable[[], Any]] = {
    "a sampler that the user sets": own_sampler,
    "a sampler that turns": lambda: loader(sampler=Turned()),
    "a dataset that takes two numbers": lambda: loader(Levels()),
}


def read_as_set(kind: training.Kind, directory: Path) -> dict[str, Any]:
    """Return the steps of each training, and what a callback reads in hooks."""
    results: dict[str, Any] = {}
    options: dict[str, Any] = {"use_distributed_sampler": False, "max_epochs": 2}
    for name, make in SET_BY_USERS.items():
        net = Reader(make)
        callbacks = [SetsEpoch()] if make is own_sampler else []
        training.fit(kind, directory, net, *callbacks, **options)
        results[name] = net.steps
    reader = ReadsOrder()
    training.fit(kind, directory, Reader(partial(loader, shuffle=True)), reader, max_epochs=3)
    return {**results, "read in hooks": reader.read}


def test_what_lightning_or_the_user_sets_is_not_set_again(tmp_path: Path) -> None:
    """A user's sampler reads the number that its user sets, and is set once in an epoch.

    In each hook, user code reads the order that stock reads there.
    """
    ours, stock = training.on_both(read_as_set, tmp_path)
    assert ours == stock
    assert len(ours[0]["read in hooks"]) == 2 + 2 * 3
