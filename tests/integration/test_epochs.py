"""Every kind of loader, sampler and dataset gets the epoch: with ours, and with stock and
``SamplerEpochSeeding``.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    get_worker_info,
)

from lightning_ddp_ext import SamplerEpochSeeding
from tests.harness.training import KINDS, Kind, fit, on_ranks
from tests.integration import continuing
from tests.integration.continuing import KEPT, Numbers

Epochs = dict[int, set[int]]  # the numbers that are read in each epoch


class TakesEpoch:
    """Keeps the last epoch that it was given; 99 without any."""

    epoch = 99

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Samples(TakesEpoch, Dataset[Tensor]):
    """Four samples, each of which is the epoch."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(self.epoch)])


class Stream(TakesEpoch, IterableDataset[Tensor]):
    """The same without a length."""

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


class OwnLoader(TakesEpoch):
    """A loader that is not a DataLoader."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.full((2, 1), float(self.epoch))] * 3)


def kept_stream() -> DataLoader[Any]:
    """Return a loader with a persistent worker."""
    return DataLoader(Stream(), 2, **KEPT)


LOADERS: dict[str, Callable[[], Any]] = {
    "a sampler in a sampler": lambda: DataLoader(Numbers(4), 2, sampler=Around(EpochSampler())),
    "a batch sampler in another, workers": lambda: DataLoader(
        Numbers(4), batch_sampler=Around(EpochBatchSampler()), **KEPT
    ),
    "a stream, persistent workers": kept_stream,
    "several loaders": lambda: CombinedLoader(
        [DataLoader(Samples(), 2), DataLoader(Stream(), 2)], "min_size"
    ),
    "a dataset in others": lambda: DataLoader(ConcatDataset([Subset(Samples(), range(4))]), 2),
    "a loader that is not a DataLoader": OwnLoader,
    "a worker_init_fn of the user's": lambda: DataLoader(
        Stream(samples=0), 2, worker_init_fn=fill_stream, **KEPT
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
    return {name: read(kind, directory, make) for name, make in LOADERS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_epoch_reaches_whatever_the_batches_are_made_from(kind: Kind, tmp_path: Path) -> None:
    """Each batch has the epoch in which it is read, from the first epoch on."""
    for by_loader in on_ranks(kind, read_all, tmp_path):
        assert by_loader == {name: {0: {0}, 1: {1}, 2: {2}} for name in LOADERS}


def resume_stream(kind: Kind, directory: Path) -> Epochs:
    """Resume after the first epoch, which has two batches."""
    end_of_first_epoch = "train_epoch_end-2"
    saver = continuing.Saver(directory, [end_of_first_epoch])
    read(kind, directory, kept_stream, saver)
    return read(kind, directory, kept_stream, ckpt_path=saver.saved[end_of_first_epoch])


@pytest.mark.parametrize("kind", KINDS)
def test_workers_of_a_resumed_run_get_its_epoch(kind: Kind, tmp_path: Path) -> None:
    """Persistent workers have each epoch, from the resumed one on."""
    for epochs in on_ranks(kind, resume_stream, tmp_path):
        assert epochs == {1: {1}, 2: {2}}


class Validated(continuing.Net):
    """Records what it reads in the validations of each epoch."""

    def __init__(self) -> None:
        super().__init__(OwnLoader)
        self.validated: Epochs = {}

    def val_dataloader(self) -> Any:
        return [
            DataLoader(Samples(), 2, **KEPT),
            DataLoader(Numbers(4), batch_sampler=EpochBatchSampler()),
        ]

    def validation_step(self, batch: Tensor, index: int, dataloader_idx: int = 0) -> None:
        numbers = batch.int().flatten().tolist()
        self.validated.setdefault(self.trainer.current_epoch, set()).update(numbers)


def validate_each_epoch(kind: Kind, directory: Path) -> Epochs:
    net = Validated()
    options: dict[str, Any] = {"use_distributed_sampler": False, "num_sanity_val_steps": 0}
    fit(kind, directory, net, *setting_epochs(kind), max_epochs=3, **options)
    return net.validated


@pytest.mark.parametrize("kind", KINDS)
def test_validation_loaders_get_the_training_epoch(kind: Kind, tmp_path: Path) -> None:
    """Each validation reads with the epoch of training, also in persistent workers."""
    for epochs in on_ranks(kind, validate_each_epoch, tmp_path):
        assert epochs == {0: {0}, 1: {1}, 2: {2}}


class CountingBatchSampler(Sampler[list[int]]):
    """Draws the sample whose number says how often an epoch was set."""

    times_set = 0

    def set_epoch(self, epoch: int) -> None:
        self.times_set += 1

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[self.times_set]] * 4)

    def __len__(self) -> int:
        return 4


def count_calls(kind: Kind, directory: Path) -> continuing.Batches:
    """Read a batch sampler that starts again within each epoch, beside a longer loader."""
    counting = DataLoader(Numbers(4), batch_sampler=CountingBatchSampler())
    longer = DataLoader(Numbers(10), batch_size=1)
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
