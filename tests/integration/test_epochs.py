"""Each epoch has its own order and its own random numbers, for every kind of loader,
sampler and dataset.
"""

from __future__ import annotations

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
    IterableDataset,
    Sampler,
    Subset,
    get_worker_info,
)

from lightning_ddp_ext import SamplerEpochSeeding
from tests.harness import training
from tests.integration import continuing

Epochs = dict[int, set[int]]  # what has been read in each


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
    """A sampler, or batch sampler, around another one, which it holds in its own
    attribute.
    """

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
    """Records its batches by epoch, also in validation."""

    def __init__(self, train: Callable[[], Any], val: Callable[[], Any] = list) -> None:
        super().__init__(train)
        self.val = val
        self.validated: Epochs = {}

    def val_dataloader(self) -> Any:
        return self.val()

    @property
    def read(self) -> Epochs:
        return {
            epoch: {x for step in self.steps if step.epoch == epoch for x in step.samples}
            for epoch in {step.epoch for step in self.steps}
        }

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        self.validated.setdefault(self.trainer.current_epoch, set()).update(
            batch.int().flatten().tolist()
        )


def train(
    kind: training.Kind, directory: Path, net: Reader, *callbacks: L.Callback, **options: Any
) -> Reader:
    """Train with ours, or with stock and ``SamplerEpochSeeding``."""
    own = [] if kind == "ours" or callbacks else [SamplerEpochSeeding()]
    ckpt_path = options.pop("ckpt_path", None)
    chosen = {
        "max_epochs": 3,
        "use_distributed_sampler": False,
        "num_sanity_val_steps": 0,
        **options,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = training.make_trainer(
            training.make_strategy(kind, directory), callbacks=[*own, *callbacks], **chosen
        )
        trainer.fit(net, ckpt_path=ckpt_path)
    return net


def read_epochs(kind: training.Kind, directory: Path) -> dict[str, Any]:
    """Return the epochs that each loader read in each epoch, after a resume, and in
    validation.
    """
    seeding = [SamplerEpochSeeding()] if kind == "stock" else []
    found: dict[str, Any] = {}
    for name, make in LOADERS.items():
        saver = continuing.Saver(directory / name, ["train_epoch_end-2"])
        found[name] = train(kind, directory, Reader(make), saver, *seeding).read
        if "persistent workers" in name:
            found[f"{name}, resumed"] = train(
                kind, directory, Reader(make), ckpt_path=saver.saved["train_epoch_end-2"]
            ).read
    validation = Reader(
        OwnLoader,
        lambda: [loader(Samples(), **continuing.KEPT), loader(batch_sampler=EpochSampler(2))],
    )
    found["validation"] = train(kind, directory, validation).validated
    return found


@pytest.mark.parametrize("kind", training.KINDS)
def test_the_epoch_reaches_whatever_the_batches_are_made_from(
    kind: training.Kind, tmp_path: Path
) -> None:
    """Each batch has the epoch that it is read in, from the first epoch on, after a
    resume and in validation.
    """
    whole = {0: {0}, 1: {1}, 2: {2}}
    resumed = {1: {1}, 2: {2}}
    for found in training.on_ranks(kind, read_epochs, tmp_path):
        assert found == {name: resumed if "resumed" in name else whole for name in found}
        assert len(found) == len(LOADERS) + 2


class Chance(Samples):
    """Random numbers from all three generators."""

    def __getitem__(self, index: int) -> Tensor:
        drawn = random.getrandbits(50), np.random.randint(2**50), int(torch.randint(2**50, ()))
        return torch.tensor([[number] for number in drawn])


def draw(kind: training.Kind, directory: Path) -> list[Epochs]:
    found = []
    for seed in (5, 5, 6):
        torch.manual_seed(len(found))  # another beginning each time
        net = Reader(
            partial(
                loader,
                Chance(),
                **({**continuing.KEPT, "num_workers": 2} if kind == "ours" else {}),
            )
        )
        found.append(train(kind, directory, net, SamplerEpochSeeding(seed=seed), max_epochs=2).read)
    return found


@pytest.mark.parametrize("kind", training.KINDS)
def test_random_streams_belong_to_seed_epoch_rank_and_worker(
    kind: training.Kind, tmp_path: Path
) -> None:
    """Runs with the same seed draw the same numbers; two epochs, ranks, workers or
    seeds never share a number.
    """
    by_rank = training.on_ranks(kind, draw, tmp_path)
    assert all(first == again for first, again, _ in by_rank)
    drawn = [
        epoch for first, _, other in by_rank for run in (first, other) for epoch in run.values()
    ]
    assert [len(numbers) for numbers in drawn] == [4 * 3] * 2 * 2 * 2
    assert len(set().union(*drawn)) == 4 * 3 * 2 * 2 * 2
