"""Ranks with uneven numbers of batches are refused, or all end an epoch when the first one
has no more, with ``uneven_inputs="stop_at_shortest"``. Ranks that read the same are warned.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext import ConfigurationError, SamplingError, ScalableDistributedSampler
from tests.harness.ranks import message_of, run_ranks
from tests.harness.training import Net, fit_on, raised, warnings_with
from tests.integration import continuing

Lengths = list[int]  # of a rank's data, by epoch
STOP = {"uneven_inputs": "stop_at_shortest"}


class Stream(continuing.Stream):
    """Numbers that only this rank has, as many as the epoch has."""

    def __init__(self, rank: int, lengths: Lengths) -> None:
        super().__init__(100, rank)
        self.lengths = lengths

    def __iter__(self) -> Iterator[torch.Tensor]:
        length = self.lengths[self.epoch % len(self.lengths)]
        first = 10 * self.epoch
        return (torch.tensor([float(number)]) for number in self.numbers[first : first + length])


Loaders = Callable[[int, Lengths], Any]


def stream(rank: int, lengths: Lengths) -> Any:
    return DataLoader(Stream(rank, lengths), batch_size=1)


def indexed(rank: int, lengths: Lengths) -> Any:
    return DataLoader(continuing.Numbers(*lengths), batch_size=1)


def stateful(rank: int, lengths: Lengths) -> Any:
    return StatefulDataLoader(Stream(rank, lengths), batch_size=1)


def stream_and_samples(rank: int, lengths: Lengths) -> Any:
    return [stream(rank, lengths), indexed(rank, [2])]


def two_streams(mode: Any, rank: int, lengths: Lengths) -> Any:
    return CombinedLoader([stream(rank, lengths), stream(rank, [3])], mode)


@dataclass
class Case:
    """Lengths by rank and epoch, the kind of loader, and the options of training."""

    lengths: list[Lengths]
    loaders: Loaders = stream
    options: dict[str, Any] = field(default_factory=dict)

    def training(self, rank: int, directory: Path) -> continuing.Training:
        """Return a training whose ranks stop at the shortest."""
        loaders = partial(self.loaders, rank, self.lengths[rank])
        return continuing.Training(loaders, directory, options=self.all_options(), strategy=STOP)

    def training_on_cut_data(self, rank: int, directory: Path) -> continuing.Training:
        """Return a training on data that are cut to equal lengths on all ranks."""
        options = self.all_options()
        limit = options.pop("limit_train_batches", math.inf)
        lengths = [min(*of_ranks, limit) for of_ranks in zip(*self.lengths, strict=True)]
        return continuing.Training(partial(self.loaders, rank, lengths), directory, options=options)

    def all_options(self) -> dict[str, Any]:
        return {
            "max_epochs": len(self.lengths[0]),
            "use_distributed_sampler": False,
            "limit_val_batches": 1.0,
            "model": continuing.WITHOUT_DROPOUT,
            **self.options,
        }


CASES = {
    "streams": Case([[5, 4, 0, 3], [3, 6, 2, 3]]),
    "no data on one rank": Case([[0, 0], [3, 3]]),
    "samples": Case([[4], [3]], indexed, {"max_epochs": 2}),
    "a loader with a state": Case([[4, 2], [3, 5]], stateful, {"accumulate_grad_batches": 2}),
    "limit": Case(
        [[5, 2, 6], [3, 6, 7]], options={"limit_train_batches": 4, "val_check_interval": 2}
    ),
    "max_steps": Case([[5, 4], [3, 6]], options={"max_steps": 5, "max_epochs": -1}),
    "max_size": Case([[5, 4], [4, 6]], partial(two_streams, "max_size")),
    "max_size_cycle": Case([[5, 4], [4, 6]], partial(two_streams, "max_size_cycle")),
}


def run_cases(rank: int, world_size: int, directory: Path) -> dict[str, dict[str, continuing.Run]]:
    """Return the runs on uneven data, and on data that are cut to equal lengths."""
    return {
        name: {
            "uneven": case.training(rank, directory).run(),
            "cut": case.training_on_cut_data(rank, directory).run(),
        }
        for name, case in CASES.items()
    }


def test_an_epoch_ends_as_if_no_rank_had_more_data_than_the_shortest(tmp_path: Path) -> None:
    """A run is the same as on data that are cut to equal lengths.

    Steps, validations, ends of epochs, counts and weights are equal, and the weights also
    on both ranks.
    """
    first, second = run_ranks(run_cases, 2, tmp_path)
    for name in CASES:
        for runs in (first[name], second[name]):
            assert runs["uneven"].steps == runs["cut"].steps, name
            assert runs["uneven"].events == runs["cut"].events, name
            assert runs["uneven"].counts == runs["cut"].counts, name
            assert torch.equal(runs["uneven"].weights, runs["cut"].weights), name
        assert torch.equal(first[name]["uneven"].weights, second[name]["uneven"].weights), name


def resume(rank: int, world_size: int, directory: Path, loaders: Loaders) -> dict[str, str]:
    """Return how resumed runs differ from a run without a stop."""
    training = Case(
        [[4, 2], [3, 3]], loaders, {"accumulate_grad_batches": 2, "limit_val_batches": 0}
    ).training(rank, directory)
    return continuing.generations(training, ["train_batch_end-1", "train_batch_end-4"])


@pytest.mark.lowest
@pytest.mark.parametrize("loaders", [stateful, stream_and_samples])
def test_an_epoch_that_will_end_early_can_be_resumed_in_its_middle(
    loaders: Loaders, tmp_path: Path
) -> None:
    """From each checkpoint a run trains on the same batches as without a stop.

    Its epochs end at the same step.
    """
    for differences in run_ranks(resume, 2, tmp_path, loaders):
        assert differences == {}


# Data that differ, or are the same.


class Sized(continuing.Stream):
    """A stream with a length."""

    def __len__(self) -> int:
        return len(self.numbers)


def other_lengths(rank: int) -> DataLoader[Any]:
    return DataLoader(continuing.Numbers(3 if rank == 0 else 4))


def own_seed(rank: int) -> DataLoader[Any]:
    """Return a loader with an order that only this rank draws."""
    numbers = continuing.Numbers(9)
    return DataLoader(numbers, sampler=ScalableDistributedSampler(numbers, seed=rank % 2))


def sampler_on_rank_one(rank: int) -> DataLoader[Any]:
    sampler = ScalableDistributedSampler(range(8))
    return (
        DataLoader(continuing.Numbers(8), sampler=sampler)
        if rank == 1
        else DataLoader(Sized(4, rank))
    )


def train(
    directory: Path, loader: Iterable[Any], strategy: dict[str, Any] | None = None, **options: Any
) -> int:
    """Train, and return the number of steps."""
    options = {"max_epochs": 2, "use_distributed_sampler": False, **options}
    return len(
        continuing.Training(lambda: loader, directory, strategy=strategy or {}).run(**options).steps
    )


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


SAME_ON_EVERY_RANK = (
    "; create the same dataset and sampler on every rank, or pass"
    " Trainer(use_distributed_sampler=False) if each rank has different data"
)
DIFFERENCES = {
    "lengths": Difference(
        other_lengths,
        options={},
        message=(
            "the ranks have different numbers of training batches (3 on rank 0, 4 on ranks 1, 2),"
            " so some ranks would wait forever after 3 batches; pass"
            " DDPExtStrategy(uneven_inputs='stop_at_shortest'), or use a sampler or drop_last=True"
            " so that every rank gets the same number of batches"
        ),
    ),
    "a stream on one rank": Difference(
        lambda rank: DataLoader(continuing.Stream(3, rank) if rank == 0 else continuing.Numbers(3)),
        options={"strategy": STOP},
        message=(
            "training loader DataLoader must have a length on every rank or on none, or training"
            " would hang (lengths by rank: (inf, 3, 3); inf means no length); define __len__ on"
            " every rank"
        ),
    ),
    "datasets": Difference(
        # Each rank has its own part, which the strategy divides once more.
        lambda rank: DataLoader(Subset(continuing.Numbers(10), range(10)[rank::3])),
        options={"use_distributed_sampler": True},
        message=(
            "the ranks cannot share out the samples, because their samplers differ (length 4 of"
            f" loader 1 on rank 0, length 3 of loader 1 on ranks 1, 2){SAME_ON_EVERY_RANK}"
        ),
    ),
    "seeds": Difference(
        own_seed,
        options={},
        message=(
            "their samplers differ (seed 1 of loader 1 on rank 1, seed 0 of loader 1 on ranks 0, 2)"
            f"{SAME_ON_EVERY_RANK}"
        ),
    ),
    "a sampler on one rank": Difference(
        sampler_on_rank_one,
        options={"use_distributed_sampler": True},
        message=f" on rank 1, none on ranks 0, 2){SAME_ON_EVERY_RANK}",
    ),
}


def refuse(rank: int, world_size: int, directory: Path) -> dict[str, str]:
    """Return the errors."""
    errors = {}
    for name, difference in DIFFERENCES.items():
        options = {"devices": world_size, **difference.options}
        errors[name] = str(
            raised(SamplingError, train, directory, difference.make(rank), **options)
        )
    return errors


def test_data_that_differ_are_refused(tmp_path: Path) -> None:
    """Every rank raises, instead of waiting, with the values of all, the rarest first, and
    a remedy.
    """
    for errors in run_ranks(refuse, 3, tmp_path):
        for name, error in errors.items():
            assert error.endswith(DIFFERENCES[name].message)


def train_with_limits(rank: int, world_size: int, directory: Path) -> list[int]:
    """Return the steps of two epochs with a limit, and of a run of three steps."""
    limits: list[dict[str, int]] = [
        {"limit_train_batches": 3},
        {"max_steps": 3, "max_epochs": -1},
    ]
    return [train(directory, other_lengths(rank), **limit) for limit in limits]


def test_a_limit_makes_lengths_even(tmp_path: Path) -> None:
    """Ranks with other lengths train if each stops at the limit."""
    assert run_ranks(train_with_limits, 2, tmp_path) == [[6, 3], [6, 3]]


class Counting(Net):
    def configure_callbacks(self) -> list[L.Callback]:
        assert self.trainer.estimated_stepping_batches
        return []


def test_lengths_that_the_ranks_cannot_compare_yet_are_refused(tmp_path: Path) -> None:
    """The error names a hook that runs after the ranks have connected.

    `configure_callbacks` runs before.
    """
    for outcome in fit_on(2, tmp_path, Counting(), strategy=STOP):
        assert (
            "configure_callbacks runs before they connect; read estimated_stepping_batches in setup"
            in message_of(outcome, ConfigurationError)
        )


def train_and_catch(rank: int, world_size: int, directory: Path) -> dict[str, list[str]]:
    """Return the warnings of each run."""
    loaders = {
        "the same stream": DataLoader(continuing.Stream(2, rank=0)),
        "a stream of each rank": DataLoader(continuing.Stream(2, rank)),
        "the same tensor": torch.ones(2, 1, 1),
        "samples by index": DataLoader(continuing.Numbers(2)),
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
