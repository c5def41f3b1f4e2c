"""A user's loader, samplers and dataset keep their classes and attributes."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
from torch.utils.data import BatchSampler, DataLoader

from tests.harness import ranks, training
from tests.harness.training import Net
from tests.integration import continuing

SAMPLES = 16
POINT = "train_batch_end-2"


class InTwos(BatchSampler):
    """A batch sampler of the user's own."""


class OwnLoader(DataLoader[Any]):
    """A loader of the user's own, with arguments like those of torch_geometric's."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        own: Any = None,
        **options: Any,
    ):
        self.own = own
        super().__init__(dataset, batch_size, shuffle, **options)


def own_batches(rank: int, world_size: int) -> DataLoader[Any]:
    own = continuing.Turning(SAMPLES, rank, world_size)
    sampler = InTwos(own, 2, drop_last=False)
    return DataLoader(continuing.Numbers(SAMPLES), batch_sampler=sampler)


class LoaderCase(NamedTuple):
    make: continuing.Loaders
    divided_by_user: bool = False


LOADERS = {
    "shuffled": LoaderCase(lambda *_: OwnLoader(continuing.Numbers(SAMPLES), 2, shuffle=True)),
    "a sampler, workers that stay": LoaderCase(
        continuing.sampled("distributed", SAMPLES, **continuing.KEPT)
    ),
    "a batch sampler": LoaderCase(own_batches, divided_by_user=True),
    "a stream": LoaderCase(continuing.stream(8)),
}


class Snapshot(NamedTuple):
    """An object, its class and its attributes, without epochs and torch's workers."""

    identity: int
    type: type
    attributes: dict[str, int]


def snapshots(loader: Any) -> dict[str, Snapshot]:
    parts = {
        "loader": loader,
        "dataset": loader.dataset,
        "sampler": loader.sampler,
        "batch sampler": loader.batch_sampler,
    }
    return {
        name: Snapshot(
            id(part),
            type(part),
            {key: id(vars(part)[key]) for key in vars(part).keys() - {"epoch", "_iterator"}},
        )
        for name, part in parts.items()
    }


def train_and_fail(
    rank: int, world_size: int, directory: Path, name: str
) -> list[dict[str, Snapshot]]:
    """Return the loader's parts before a run, after it, and after one that was resumed
    and failed.
    """
    case = LOADERS[name]
    loader = case.make(rank, world_size)
    options = {
        "max_epochs": 2,
        "dropout": False,
        "use_distributed_sampler": not case.divided_by_user,
    }
    runs = continuing.Training(lambda: loader, directory, world_size, options)
    found = [snapshots(loader)]
    path = runs.run(POINT).saved[POINT]
    found.append(snapshots(loader))
    runs.run(ckpt_path=path, fail_at=(0, 3))
    return [*found, snapshots(loader)]


@pytest.mark.parametrize("name", LOADERS)
def test_the_users_objects_are_as_they_were(name: str, tmp_path: Path) -> None:
    """Loader, sampler, batch sampler and dataset have the attributes from before.

    Their classes are also those from before the run.
    """
    for before, trained, failed in ranks.run_ranks(train_and_fail, 2, tmp_path, name):
        assert trained == before
        assert failed == before


class Seen(NamedTuple):
    """What user code sees of a loader."""

    type_name: str
    is_users: bool
    length: int
    attributes: set[str]


def seen(loader: Any) -> Seen:
    return Seen(type(loader).__name__, isinstance(loader, OwnLoader), len(loader), {*vars(loader)})


def copy_loaders(kind: training.Kind, directory: Path, is_injected: bool) -> dict[str, Seen]:
    """Return the loader and copies of it, as a callback sees them."""
    found: dict[str, Seen] = {}

    def copy_loader(trainer: L.Trainer) -> None:
        loader: Any = trainer.train_dataloader
        found["itself"] = seen(loader)
        found["made again"] = seen(type(loader)(loader.dataset))
        found["copied"] = seen(copy.copy(loader))
        found["pickled"] = seen(pickle.loads(pickle.dumps(loader)))

    trainer = training.make_trainer(
        training.make_strategy(kind, directory),
        callbacks=[training.At("on_train_start", copy_loader)],
        use_distributed_sampler=is_injected,
        max_epochs=1,
    )
    loader = OwnLoader(training.data(SAMPLES), batch_size=2, shuffle=True, own="given")
    trainer.fit(Net(), loader)
    return found


@pytest.mark.parametrize("is_injected", [True, False])
def test_copies_of_a_loader_in_a_run_are_as_with_stock(is_injected: bool, tmp_path: Path) -> None:
    """A loader, and one that is copied, pickled or made again, have the user's class."""
    ours, stock = training.on_both(copy_loaders, tmp_path, is_injected)
    assert ours == stock
