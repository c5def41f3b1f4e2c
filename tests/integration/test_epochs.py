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
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Sampler, Subset

from lightning_ddp_ext import SamplerEpochSeeding, ScalableDistributedSampler
from lightning_ddp_ext.data.seeding import seed_generators
from tests.harness.training import KINDS, Kind, make_strategy, make_trainer, on_ranks
from tests.integration.continuing import KEPT, Net, Numbers, Saver

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
        batch_sampler=Around(EpochSampler(2)), **KEPT
    ),
    "a stream, persistent workers": lambda: loader(Stream(), **KEPT),
    "several loaders": lambda: CombinedLoader([loader(Samples()), loader(Stream())], "min_size"),
    "a dataset in others": lambda: loader(ConcatDataset([Subset(Samples(), range(4))])),
    "a loader that is not a DataLoader": OwnLoader,
}


class Reader(Net):
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
            epoch: {x for each, _, *xs in self.steps if each == epoch for x in xs}
            for epoch, *_ in self.steps
        }

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        self.validated.setdefault(self.trainer.current_epoch, set()).update(
            batch.int().flatten().tolist()
        )


def train(
    kind: Kind, directory: Path, net: Reader, *callbacks: L.Callback, **options: Any
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
        trainer = make_trainer(
            make_strategy(kind, directory), callbacks=[*own, *callbacks], **chosen
        )
        trainer.fit(net, ckpt_path=ckpt_path)
    return net


def read_epochs(kind: Kind, directory: Path) -> dict[str, Any]:
    """Return the epochs that each loader read in each epoch, after a resume, and in
    validation.
    """
    seeding = [SamplerEpochSeeding()] if kind == "stock" else []
    found: dict[str, Any] = {}
    for name, make in LOADERS.items():
        saver = Saver(directory / name, ["train_epoch_end-2"])
        found[name] = train(kind, directory, Reader(make), saver, *seeding).read
        if "persistent workers" in name:
            found[f"{name}, resumed"] = train(
                kind, directory, Reader(make), ckpt_path=saver.saved["train_epoch_end-2"]
            ).read
    validation = Reader(
        OwnLoader, lambda: [loader(Samples(), **KEPT), loader(batch_sampler=EpochSampler(2))]
    )
    found["validation"] = train(kind, directory, validation).validated
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_epoch_reaches_whatever_the_batches_are_made_from(kind: Kind, tmp_path: Path) -> None:
    """Each batch has the epoch that it is read in, from the first epoch on, after a
    resume and in validation.
    """
    whole = {0: {0}, 1: {1}, 2: {2}}
    resumed = {1: {1}, 2: {2}}
    for found in on_ranks(kind, read_epochs, tmp_path):
        assert found == {name: resumed if "resumed" in name else whole for name in found}
        assert len(found) == len(LOADERS) + 2


def validate_shared(kind: Kind, directory: Path) -> Epochs:
    """Return the validated samples of a run that enters an epoch with a sampler that
    its validation also has.
    """
    sampler = ScalableDistributedSampler(Numbers(8))
    make = partial(loader, Numbers(8), sampler=sampler)
    saver = Saver(directory, ["train_batch_end-1"])
    train(kind, directory, Reader(make, make), saver, max_epochs=1)
    return train(
        kind,
        directory,
        Reader(make, make),
        max_epochs=1,
        ckpt_path=saver.saved["train_batch_end-1"],
    ).validated


def test_a_sampler_that_continues_an_epoch_validates_all_of_its_samples(tmp_path: Path) -> None:
    """A position of training does not apply to the validation that shares the sampler."""
    first, second = on_ranks("ours", validate_shared, tmp_path)
    assert (first[0] | second[0], len(first[0]), len(second[0])) == (set(range(8)), 4, 4)


class Chance(Samples):
    """Random numbers from all three generators."""

    def __getitem__(self, index: int) -> Tensor:
        drawn = random.getrandbits(50), np.random.randint(2**50), int(torch.randint(2**50, ()))
        return torch.tensor([[number] for number in drawn])


def draw(kind: Kind, directory: Path) -> list[Epochs]:
    found = []
    for seed in (5, 5, 6):
        torch.manual_seed(len(found))  # another beginning each time
        net = Reader(
            partial(loader, Chance(), **({**KEPT, "num_workers": 2} if kind == "ours" else {}))
        )
        found.append(train(kind, directory, net, SamplerEpochSeeding(seed=seed), max_epochs=2).read)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_random_streams_belong_to_seed_epoch_rank_and_worker(kind: Kind, tmp_path: Path) -> None:
    """Runs with the same seed draw the same numbers; two epochs, ranks, workers or
    seeds never share a number.
    """
    by_rank = on_ranks(kind, draw, tmp_path)
    assert all(first == again for first, again, _ in by_rank)
    drawn = [
        epoch for first, _, other in by_rank for run in (first, other) for epoch in run.values()
    ]
    assert [len(numbers) for numbers in drawn] == [4 * 3] * 2 * 2 * 2
    assert len(set().union(*drawn)) == 4 * 3 * 2 * 2 * 2


def draw_without_callback(kind: Kind, directory: Path) -> bool:
    """Whether workers draw from a seed in a run before which its callback was removed
    from the Trainer.
    """
    seeding = SamplerEpochSeeding(seed=5)
    net = Reader(partial(loader, Chance(), num_workers=1))
    trainer = make_trainer(make_strategy(kind, directory), callbacks=[seeding], max_epochs=1)
    trainer.fit(net)
    trainer.callbacks.remove(seeding)  # type: ignore[attr-defined]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(net)
    drawn = []
    for epoch in range(2):
        seed_generators(5, epoch=epoch, rank=trainer.global_rank, worker=0)
        drawn.append(random.getrandbits(50) in net.read[epoch])
    assert drawn[0]
    return drawn[1]


def test_a_seed_is_forgotten_with_its_callback(tmp_path: Path) -> None:
    """A run without the callback draws what follows from torch's seed, also where an
    earlier one had it.
    """
    assert on_ranks("ours", draw_without_callback, tmp_path) == [False, False]
