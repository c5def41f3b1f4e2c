"""Ranks with different training data are refused, and those with the same warned."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from lightning_ddp_ext import SamplingError, ScalableDistributedSampler
from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.integration.data.uneven import TrainingData, describe_difference
from tests.harness.ranks import run_ranks
from tests.harness.training import Net, make_strategy, make_trainer, warnings_with
from tests.integration.continuing import Numbers, Stream, Training

STOP = {"uneven_inputs": "stop_at_shortest"}


class Sized(Stream):
    """A stream with a length."""

    def __len__(self) -> int:
        return len(self.numbers)


def other_lengths(rank: int) -> DataLoader[Any]:
    return DataLoader(Numbers(3 + rank))


def no_length_on_rank_zero(rank: int) -> DataLoader[Any]:
    return DataLoader(Stream(3, rank) if rank == 0 else Numbers(3))


def part_of_nine(rank: int) -> DataLoader[Any]:
    """Return a loader of this rank's own part, which the strategy divides once more."""
    return DataLoader(Subset(Numbers(9), range(9)[rank::2]))


def sampler_on_rank_one(rank: int) -> DataLoader[Any]:
    sampler = ScalableDistributedSampler(range(8))
    return DataLoader(Numbers(8), sampler=sampler) if rank == 1 else DataLoader(Sized(4, rank))


def train(
    directory: Path, loader: Iterable[Any], strategy: dict[str, Any] | None = None, **options: Any
) -> int:
    """Train, and return the number of steps."""
    options = {"max_epochs": 2, "use_distributed_sampler": False, **options}
    return len(Training(lambda: loader, directory, strategy=strategy or {}).run(**options).steps)


class Difference(NamedTuple):
    """Loaders that differ by rank, and the error of all ranks.

    Attributes:
        make: returns a rank's loader.
        options: of the training, see ``train``.
        message: the end of the error.
    """

    make: Callable[[int], DataLoader[Any]]
    options: dict[str, Any]
    message: str


DIFFERENCES = {
    "lengths": Difference(
        other_lengths,
        options={},
        message=(
            "the ranks have different numbers of training batches (3 on rank 0, 4 on rank 1), so"
            " some ranks would wait forever after 3 batches; pass"
            " DDPExtStrategy(uneven_inputs='stop_at_shortest'), or use a sampler or drop_last=True"
            " so that every rank gets the same number of batches"
        ),
    ),
    "a stream on one rank": Difference(
        no_length_on_rank_zero,
        options={"strategy": STOP},
        message=(
            "training loader DataLoader must have a length on every rank or on none, or training"
            " would hang (lengths by rank: (inf, 3); inf means no length); define __len__ on every"
            " rank"
        ),
    ),
    "datasets": Difference(
        part_of_nine,
        options={"use_distributed_sampler": True},
        message=(
            "the ranks cannot share out the samples of Subset, because the length differs (5 on"
            " rank 0, 4 on rank 1); create the same dataset and sampler on every rank, or pass"
            " Trainer(use_distributed_sampler=False) if each rank has different data"
        ),
    ),
    "a sampler on one rank": Difference(
        sampler_on_rank_one,
        options={"use_distributed_sampler": True},
        # Each rank names its own dataset before this.
        message=(
            ", because the kind differs (None on rank 0, scalable on rank 1); create the same"
            " dataset and sampler on every rank, or pass Trainer(use_distributed_sampler=False) if"
            " each rank has different data"
        ),
    ),
}


def refuse(rank: int, world_size: int, directory: Path, name: str) -> str:
    """Return the error."""
    difference = DIFFERENCES[name]
    with pytest.raises(SamplingError) as refused:
        train(directory, difference.make(rank), **difference.options)
    return str(refused.value)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_data_that_differ_are_refused(name: str, tmp_path: Path) -> None:
    """Every rank raises, instead of waiting, with the values of all and a remedy."""
    for error in run_ranks(refuse, 2, tmp_path, name):
        assert error.endswith(DIFFERENCES[name].message)


def train_with_limit(rank: int, world_size: int, directory: Path, limit: dict[str, int]) -> int:
    return train(directory, other_lengths(rank), **limit)


@pytest.mark.parametrize(
    ("limit", "steps"), [({"limit_train_batches": 3}, 6), ({"max_steps": 3, "max_epochs": -1}, 3)]
)
def test_a_limit_makes_lengths_even(limit: dict[str, int], steps: int, tmp_path: Path) -> None:
    """Ranks with other lengths train if each stops at the limit."""
    assert run_ranks(train_with_limit, 2, tmp_path, limit) == [steps, steps]


class Counting(Net):
    def configure_callbacks(self) -> list[L.Callback]:
        assert self.trainer.estimated_stepping_batches
        return []


def count_too_early(rank: int, world_size: int, directory: Path) -> str:
    trainer = make_trainer(make_strategy("ours", directory, **STOP))
    with pytest.raises(ConfigurationError) as caught:
        trainer.fit(Counting())
    return str(caught.value)


def test_lengths_that_the_ranks_cannot_compare_yet_are_refused(tmp_path: Path) -> None:
    """The error names a hook that runs after the ranks have connected.

    `configure_callbacks` runs before.
    """
    for error in run_ranks(count_too_early, 2, tmp_path):
        assert (
            "configure_callbacks runs before they connect; read estimated_stepping_batches in setup"
            in error
        )


def train_and_catch(rank: int, world_size: int, directory: Path) -> dict[str, list[str]]:
    """Return the warnings of each run."""
    loaders = {
        "the same stream": DataLoader(Stream(2, rank=0)),
        "a stream of each rank": DataLoader(Stream(2, rank)),
        "the same tensor": torch.ones(2, 1, 1),
        "samples by index": DataLoader(Numbers(2)),
    }
    warned = {}
    for name, loader in loaders.items():
        with warnings_with("the same on ranks") as warned[name]:
            train(directory, loader)
    return warned


@pytest.mark.lowest
def test_ranks_that_read_the_same_are_warned_once(tmp_path: Path) -> None:
    """Rank 0 names the class of data that are not divided among the ranks.

    Other data cause no warning.
    """
    first, second = run_ranks(train_and_catch, 2, tmp_path)
    (stream_warning,) = first.pop("the same stream")
    (tensor_warning,) = first.pop("the same tensor")
    assert stream_warning.startswith(
        "the first training batch is the same on ranks 0, 1: Stream is probably not split among the"
        " ranks, so each sample is trained on 2 times per epoch; in __iter__, yield only the"
        " samples of this rank (call torch.distrib"
    )
    assert "Tensor is probably not split" in tensor_warning
    assert not any([*first.values(), *second.values()])


def test_the_rank_that_differs_from_many_is_named() -> None:
    """The rarest value comes first, with its rank, however many ranks there are."""
    lengths = [5] * 16
    lengths[12] = 4
    data_by_rank = [TrainingData(1, (), [{"length": length}]) for length in lengths]
    difference = describe_difference(data_by_rank, [DataLoader(Numbers(5))])
    assert "length differs (4 on rank 12, 5 on ranks 0-11, 13-15);" in str(difference)
