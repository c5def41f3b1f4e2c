"""A run leaves the user's loaders as they were, and a copy that user code makes of a loader
within the run has the user's class.
"""

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
from torch.utils.data import DataLoader, DistributedSampler

from tests.harness import training
from tests.harness.ranks import run_ranks
from tests.integration import continuing

NUMBERS = continuing.Numbers(16)


class OwnLoader(DataLoader[Any]):
    """A loader of the user's own, with arguments like those of torch_geometric's."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        shuffle: bool = False,
        own: Any = None,
        **options: Any,
    ) -> None:
        self.own = own
        super().__init__(dataset, batch_size, shuffle, **options)


# After a run.


class Reversed(DistributedSampler[Any]):
    """A user's sampler with ranks and epochs."""

    def __iter__(self) -> Iterator[Any]:
        return reversed(list(super().__iter__()))


def with_batch_sampler(rank: int) -> DataLoader[Any]:
    part = DistributedSampler(NUMBERS, 2, rank, shuffle=False)
    return DataLoader(NUMBERS, batch_sampler=continuing.Backwards(part, 2, drop_last=False))


# Functions that make a rank's loader. The strategy divides the samples of the first one, the
# user those of the others.
DIVIDED = "shuffled"
LOADERS: dict[str, Callable[[int], DataLoader[Any]]] = {
    DIVIDED: lambda rank: OwnLoader(NUMBERS, 2, shuffle=True),
    "a sampler, persistent workers": lambda rank: DataLoader(
        NUMBERS, 2, sampler=Reversed(NUMBERS, 2, rank), **continuing.KEPT
    ),
    "a batch sampler": with_batch_sampler,
    "a stream": lambda rank: continuing.stream(8, rank),
}


class Snapshot(NamedTuple):
    """An object's identity and class, and the identities of its attributes without those
    that each epoch changes: the epoch, and torch's workers.
    """

    identity: int
    type: type
    attributes: dict[str, int]


def snapshot(part: Any) -> Snapshot:
    names = vars(part).keys() - {"epoch", "_iterator"}
    return Snapshot(id(part), type(part), {name: id(vars(part)[name]) for name in names})


def snapshots(loader: DataLoader[Any]) -> list[Snapshot]:
    """Return one of the loader and of each of its parts."""
    parts = (loader, loader.dataset, loader.sampler, loader.batch_sampler)
    return [snapshot(part) for part in parts]


class Kept(NamedTuple):
    """The snapshots before a run, after it, and after one that resumed and failed."""

    before: list[Snapshot]
    after_training: list[Snapshot]
    after_failure: list[Snapshot]


def train_and_fail(rank: int, world_size: int, directory: Path, name: str) -> Kept:
    """Train on a loader; resume within the first epoch, and fail in its fourth batch."""
    loader = LOADERS[name](rank)
    command = continuing.Training(
        lambda: loader,
        directory,
        world_size,
        {"max_epochs": 2, "use_distributed_sampler": name == DIVIDED},
    )
    before = snapshots(loader)
    [path] = command.run("train_batch_end-2").saved.values()
    after_training = snapshots(loader)
    command.run(ckpt_path=path, fail_at=(0, 3))
    return Kept(before, after_training, snapshots(loader))


@pytest.mark.parametrize("name", LOADERS)
def test_the_users_objects_are_as_they_were(name: str, tmp_path: Path) -> None:
    """Loader, sampler, batch sampler and dataset keep their classes and attributes."""
    for kept in run_ranks(train_and_fail, 2, tmp_path, name):
        assert kept.after_training == kept.before
        assert kept.after_failure == kept.before


# Within a run.


class Seen(NamedTuple):
    """What user code sees of a loader."""

    type: str
    is_the_users: bool
    length: int
    attributes: set[str]


def look_at(loader: Any) -> Seen:
    return Seen(
        type=type(loader).__name__,
        is_the_users=isinstance(loader, OwnLoader),
        length=len(loader),
        attributes={*vars(loader)},
    )


def copy_in_run(
    kind: training.Kind, directory: Path, use_distributed_sampler: bool
) -> dict[str, Seen]:
    """Return what a callback sees of a loader and of copies of it."""
    found: dict[str, Seen] = {}

    def copy_loader(trainer: L.Trainer) -> None:
        loader: Any = trainer.train_dataloader
        found["loader"] = look_at(loader)
        found["created again"] = look_at(type(loader)(loader.dataset))
        found["copied"] = look_at(copy.copy(loader))
        found["pickled"] = look_at(pickle.loads(pickle.dumps(loader)))

    loader = OwnLoader(NUMBERS, batch_size=2, shuffle=True, own="given")
    copying = training.At("on_train_start", copy_loader)
    options = {"use_distributed_sampler": use_distributed_sampler, "max_epochs": 1}
    continuing.read(kind, directory, lambda: loader, [copying], **options)
    return found


@pytest.mark.parametrize("use_distributed_sampler", [True, False], ids=["divided", "not divided"])
def test_copies_of_a_loader_in_a_run_are_as_with_stock(
    use_distributed_sampler: bool, tmp_path: Path
) -> None:
    """A loader, and one that is copied, pickled or created again, have the user's class,
    whether or not the strategy divides its samples.
    """
    ours, stock = training.on_both(copy_in_run, tmp_path, use_distributed_sampler)
    assert ours == stock
    assert len(ours[0]) == 4
