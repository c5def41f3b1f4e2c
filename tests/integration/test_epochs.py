"""Every loader, sampler and dataset gets the current epoch, and its random numbers follow
from the seed and the epoch: with our strategy, and with stock and ``SamplerEpochSeeding``.
"""

import random
from collections.abc import Callable, Iterator, Sequence
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
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    get_worker_info,
)

from lightning_ddp_ext import SamplerEpochSeeding
from tests.harness.training import KINDS, Kind, fit, on_both, on_ranks
from tests.integration import continuing

Epochs = dict[int, set[int]]  # the numbers that are read in each epoch


class TakesEpoch:
    """Keeps the last epoch that it was given; 99 without any."""

    epoch = 99

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Samples(TakesEpoch, continuing.Numbers):
    """Samples, each of which is the epoch."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(self.epoch)])


class Stream(TakesEpoch, IterableDataset[Tensor]):
    """A stream, each sample of which is the epoch."""

    def __init__(self, samples: int = 4) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.tensor([float(self.epoch)])] * self.samples)


def fill_stream(worker: int) -> None:
    """Give samples to this worker's copy of a stream."""
    stream: Any = get_worker_info().dataset
    stream.samples = 4


class EpochSampler(TakesEpoch, Sampler[Any]):
    """Draws the sample whose number is the epoch."""

    def __iter__(self) -> Iterator[Any]:
        return iter([self.epoch] * 4)

    def __len__(self) -> int:
        return 4


class EpochBatchSampler(EpochSampler):
    """A batch sampler of the same numbers that does not inherit from torch's."""

    def __iter__(self) -> Iterator[Any]:
        return iter([[self.epoch] * 2] * 4)


class Around(Sampler[Any]):
    """A sampler, or batch sampler, that holds another one in its own attribute."""

    def __init__(self, held: EpochSampler) -> None:
        self.held = held

    def __iter__(self) -> Iterator[Any]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class Keeping(Around):
    """Keeps the epoch that Lightning sets to itself."""

    def set_epoch(self, epoch: int) -> None:
        """Do nothing."""


class OwnLoader(TakesEpoch):
    """A loader that is not a DataLoader; each number in its batches is the epoch."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.full((2, 1), float(self.epoch))] * 3)


def kept_stream() -> DataLoader[Any]:
    """Return a loader with a persistent worker."""
    return DataLoader(Stream(), 2, **continuing.KEPT)


LOADERS: dict[str, Callable[[], Any]] = {
    "a sampler in a sampler": lambda: DataLoader(
        continuing.Numbers(4), 2, sampler=Around(EpochSampler())
    ),
    "a sampler in one that Lightning sets": lambda: DataLoader(
        continuing.Numbers(4), 2, sampler=Keeping(EpochSampler())
    ),
    "a batch sampler in another, workers": lambda: DataLoader(
        continuing.Numbers(4), batch_sampler=Around(EpochBatchSampler()), **continuing.KEPT
    ),
    "a stream, persistent workers": kept_stream,
    "several loaders": lambda: CombinedLoader(
        [DataLoader(Samples(4), 2), DataLoader(Stream(), 2)], "min_size"
    ),
    "a dataset in others": lambda: DataLoader(ConcatDataset([Subset(Samples(4), range(4))]), 2),
    "a loader that is not a DataLoader": OwnLoader,
    "a worker_init_fn of the user's": lambda: DataLoader(
        Stream(samples=0), 2, worker_init_fn=fill_stream, **continuing.KEPT
    ),
}


def setting_epochs(kind: Kind) -> list[L.Callback]:
    """Return the callbacks that set epochs: our strategy needs none."""
    return [SamplerEpochSeeding()] if kind == "stock" else []


def read(
    kind: Kind,
    directory: Path,
    make: Callable[[], Any],
    *callbacks: L.Callback,
    ckpt_path: str | None = None,
) -> Epochs:
    """Train to the end of the third epoch; return the numbers that are read in each."""
    by_epoch = continuing.read(
        kind,
        directory,
        make,
        [*callbacks, *setting_epochs(kind)],
        max_epochs=3,
        use_distributed_sampler=False,
        ckpt_path=ckpt_path,
    )
    return {epoch: set().union(*batches) for epoch, batches in by_epoch.items()}


def read_all(kind: Kind, directory: Path) -> dict[str, Epochs]:
    """Read each loader, and one again that resumes after the first epoch of two batches."""
    by_loader = {name: read(kind, directory, make) for name, make in LOADERS.items()}
    saver = continuing.Saver(directory, ["train_epoch_end-2"])
    read(kind, directory, kept_stream, saver)
    path = saver.saved["train_epoch_end-2"]
    return {**by_loader, "resumed": read(kind, directory, kept_stream, ckpt_path=path)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_epoch_reaches_whatever_the_batches_are_made_from(kind: Kind, tmp_path: Path) -> None:
    """Each batch has the epoch in which it is read, from the first epoch on, or from the
    resumed one.
    """
    for by_loader in on_ranks(kind, read_all, tmp_path):
        assert by_loader.pop("resumed") == {1: {1}, 2: {2}}
        assert by_loader == {name: {0: {0}, 1: {1}, 2: {2}} for name in LOADERS}


class Validated(continuing.Net):
    """Records what it reads in the validations of each epoch."""

    def __init__(self) -> None:
        super().__init__(OwnLoader)
        self.validated: Epochs = {}

    def val_dataloader(self) -> Any:
        return [
            DataLoader(Samples(4), 2, **continuing.KEPT),
            DataLoader(continuing.Numbers(4), batch_sampler=EpochBatchSampler()),
        ]

    def validation_step(self, batch: Tensor, index: int, dataloader_idx: int = 0) -> None:
        numbers = batch.int().flatten().tolist()
        self.validated.setdefault(self.trainer.current_epoch, set()).update(numbers)


def validate_each_epoch(kind: Kind, directory: Path) -> Epochs:
    net = Validated()
    fit(
        kind,
        directory,
        net,
        *setting_epochs(kind),
        max_epochs=3,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
    )
    return net.validated


@pytest.mark.parametrize("kind", KINDS)
def test_validation_loaders_get_the_training_epoch(kind: Kind, tmp_path: Path) -> None:
    """Each validation reads with the epoch of training, also in persistent workers."""
    for epochs in on_ranks(kind, validate_each_epoch, tmp_path):
        assert epochs == {0: {0}, 1: {1}, 2: {2}}


class Counting(Sampler[Any]):
    """Yields the sample, or the batch of it, whose number says how often an epoch was set."""

    def __init__(self, is_in_batch: bool = False) -> None:
        self.is_in_batch = is_in_batch
        self.times_set = 0

    def set_epoch(self, epoch: int) -> None:
        self.times_set += 1

    def __iter__(self) -> Iterator[Any]:
        return iter([[self.times_set] if self.is_in_batch else self.times_set] * 4)

    def __len__(self) -> int:
        return 4


def count_calls(kind: Kind, directory: Path) -> continuing.Batches:
    """Read a batch sampler that starts again within each epoch, beside a longer loader."""
    counting = DataLoader(continuing.Numbers(4), batch_sampler=Counting(is_in_batch=True))
    longer = DataLoader(continuing.Numbers(10), batch_size=1)
    return continuing.read(
        kind,
        directory,
        lambda: [counting, longer],
        setting_epochs(kind),
        use_distributed_sampler=False,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_an_object_gets_each_epoch_once(kind: Kind, tmp_path: Path) -> None:
    """A batch sampler is set once in an epoch, although it is read several times."""
    for batches in on_ranks(kind, count_calls, tmp_path):
        assert batches == {epoch: [[epoch + 1, number] for number in range(10)] for epoch in (0, 1)}


def count_calls_of_divided(kind: Kind, directory: Path) -> list[int]:
    """Read samplers that the strategy divides; return how often each was set in two epochs."""
    counting = [Counting(), Counting(is_in_batch=True)]
    for sampler in counting:
        name = "batch_sampler" if sampler.is_in_batch else "sampler"
        options: Any = {name: sampler}
        continuing.read(kind, directory, partial(DataLoader, continuing.Numbers(9), **options))
    return [sampler.times_set for sampler in counting]


def test_a_sampler_that_is_divided_gets_each_epoch_once(tmp_path: Path) -> None:
    """This holds for samplers and batch samplers of the user's."""
    assert on_ranks("ours", count_calls_of_divided, tmp_path) == [[2, 2]] * 2


# What users or Lightning set.


class Levels(continuing.Numbers):
    """Has a ``set_epoch`` with two arguments, which only its user can call."""

    def set_epoch(self, epoch: int, level: float) -> None:
        raise AssertionError("the user did not call it")


class Refusing:
    """Must not get an epoch."""

    def set_epoch(self, epoch: int) -> None:
        raise AssertionError("got an epoch")


class Answering:
    """Claims to have any method."""

    def __getattr__(self, name: str) -> Any:
        return Refusing().set_epoch


class Module(Refusing, L.LightningModule):
    """Has the method, and must not get an epoch either."""


class Holder(continuing.Numbers):
    """Holds objects that get no epoch: modules, Trainers and what is in them, classes, and
    false claims of a method.
    """

    def __init__(self) -> None:
        super().__init__(4)
        outer: list[Any] = [Module(), L.LightningDataModule(), L.Trainer(barebones=True)]
        for each in outer:
            each.held = Refusing()
        self.held = [*outer, Module, Answering()]


class SetsEpoch(L.Callback):
    """Gives a sampler another number than the epoch."""

    def on_train_epoch_start(self, trainer: L.Trainer, module: Any) -> None:
        trainer.train_dataloader.sampler.set_epoch(100 + trainer.current_epoch)


class ReadsInHooks(L.Callback):
    """Reads the training loader in hooks.

    Attributes:
        read: the hook and the batches of each call.
    """

    def __init__(self) -> None:
        self.read: list[Any] = []
        for hook in ("on_train_start", "on_train_epoch_start", "on_train_epoch_end"):
            setattr(self, hook, partial(self._read, hook))

    def _read(self, hook: str, trainer: L.Trainer, module: Any) -> None:
        self.read.append((hook, [batch.tolist() for batch in trainer.train_dataloader]))


# Training loaders, and the callbacks beside them.
CASES: dict[str, tuple[Callable[[], DataLoader[Any]], Sequence[L.Callback]]] = {
    "a sampler that the user sets": (
        lambda: DataLoader(
            continuing.Numbers(8), 2, sampler=DistributedSampler(range(8), 2, seed=1)
        ),
        [SetsEpoch()],
    ),
    "a sampler that Lightning sets": (
        lambda: DataLoader(continuing.Numbers(4), 2, sampler=Counting()),
        [],
    ),
    "a dataset that takes two numbers": (lambda: DataLoader(Levels(4), 2), []),
    "a dataset of other objects": (lambda: DataLoader(Holder(), 2), []),
}


def read_cases(kind: Kind, directory: Path) -> dict[str, Any]:
    batches: dict[str, Any] = {
        name: continuing.read(kind, directory, make, callbacks, use_distributed_sampler=False)
        for name, (make, callbacks) in CASES.items()
    }
    reader = ReadsInHooks()
    continuing.read(kind, directory, continuing.shuffled(), [reader])
    return {**batches, "in hooks": reader.read}


def test_what_lightning_or_the_user_sets_is_not_set_again(tmp_path: Path) -> None:
    """Each case reads the same batches as with stock, so a sampler keeps the epoch that
    its user sets; one that Lightning sets is set once in an epoch. A hook reads stock's
    order.
    """
    ours, stock = on_both(read_cases, tmp_path)
    assert ours == stock
    for cases in ours:
        assert cases["a sampler that Lightning sets"] == {0: [[1, 1]] * 2, 1: [[2, 2]] * 2}
        assert len(cases["in hooks"]) == 5


# Random numbers.

SAMPLES = 4
GENERATORS = 3


class Chance(continuing.Numbers):
    """Samples of one random number from each of the three generators."""

    def __getitem__(self, index: int) -> Tensor:
        drawn = random.getrandbits(50), np.random.randint(2**50), int(torch.randint(2**50, ()))
        return torch.tensor([[number] for number in drawn])


def draw(kind: Kind, directory: Path, workers: int) -> list[list[set[int]]]:
    """Return the numbers of each epoch that one rank draws in three runs: two with the same
    seed, and one with another.
    """
    options: Any = continuing.workers(workers, persistent_workers=True) if workers else {}
    drawn = []
    for start, seed in enumerate((5, 5, 6)):
        torch.manual_seed(start)  # what the run would draw without the callback
        make = partial(DataLoader, Chance(SAMPLES), 2, **options)
        read = continuing.read(
            kind, directory, make, [SamplerEpochSeeding(seed=seed)], use_distributed_sampler=False
        )
        drawn.append([set().union(*batches) for batches in read.values()])
    return drawn


@pytest.mark.parametrize(("kind", "workers"), [("ours", 2), ("stock", 0)])
def test_random_streams_belong_to_seed_epoch_rank_and_worker(
    kind: Kind, workers: int, tmp_path: Path
) -> None:
    """Only runs with the same seed draw the same numbers, on the same rank and epoch."""
    epochs = []
    for first, again, with_another_seed in on_ranks(kind, draw, tmp_path, workers):
        assert first == again
        epochs += [*first, *with_another_seed]
    assert len(epochs) == 2 * 2 * 2  # ranks, seeds, epochs
    assert [len(numbers) for numbers in epochs] == [SAMPLES * GENERATORS] * len(epochs)
    assert len(set().union(*epochs)) == SAMPLES * GENERATORS * len(epochs)
