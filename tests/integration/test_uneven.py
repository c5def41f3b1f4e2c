"""With `uneven_inputs="stop_at_shortest"`, all ranks end an epoch when the first one has no
more batches.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.harness.ranks import run_ranks
from tests.integration.continuing import WITHOUT_DROPOUT, Run, Training, generations

Lengths = list[int]  # of a rank's data, by epoch
STOP = {"uneven_inputs": "stop_at_shortest"}


class Data:
    """A dataset with this rank's numbers, as many as the epoch has."""

    def __init__(self, rank: int, lengths: Lengths) -> None:
        self.rank = rank
        self.lengths = lengths
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    @property
    def length(self) -> int:
        return self.lengths[self.epoch % len(self.lengths)]

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([100.0 * self.rank + 10 * self.epoch + index])


class Stream(Data, IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return map(self.__getitem__, range(self.length))


class Samples(Data, Dataset[Tensor]):
    def __len__(self) -> int:
        return self.length


Loaders = Callable[[int, Lengths], Any]


def stream(rank: int, lengths: Lengths) -> Any:
    return DataLoader(Stream(rank, lengths), batch_size=1)


def indexed(rank: int, lengths: Lengths) -> Any:
    return DataLoader(Samples(rank, lengths), batch_size=1)


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

    def training(self, rank: int, directory: Path) -> Training:
        """Return a training whose ranks stop at the shortest."""
        loaders = partial(self.loaders, rank, self.lengths[rank])
        return Training(loaders, directory, options=self.all_options(), strategy=STOP)

    def training_on_cut_data(self, rank: int, directory: Path) -> Training:
        """Return a training on data that are cut to equal lengths on all ranks."""
        options = self.all_options()
        limit = options.pop("limit_train_batches", math.inf)
        lengths = [min(*of_ranks, limit) for of_ranks in zip(*self.lengths, strict=True)]
        # A DataLoader over samples has one length for all epochs.
        kind = stream if self.loaders is indexed else self.loaders
        return Training(partial(kind, rank, lengths), directory, options=options)

    def all_options(self) -> dict[str, Any]:
        return {
            "max_epochs": len(self.lengths[0]),
            "use_distributed_sampler": False,
            "limit_val_batches": 1.0,
            "model": WITHOUT_DROPOUT,
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


def run_cases(rank: int, world_size: int, directory: Path) -> dict[str, dict[str, Run]]:
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
    options = {"accumulate_grad_batches": 2, "limit_val_batches": 0}
    training = Case([[4, 2], [3, 3]], loaders, options).training(rank, directory)
    return generations(training, ["train_batch_end-1", "train_batch_end-4"])


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


class Broken(Stream):
    def __iter__(self) -> Iterator[Tensor]:
        yield from super().__iter__()
        raise OSError("the disk of this rank failed")


def break_on_one(rank: int, world_size: int, directory: Path) -> tuple[str, int | None]:
    """Return the kind of the error, and the failed rank that it names."""
    data = Broken(rank, [4]) if rank == 1 else Stream(rank, [40])
    with pytest.raises(Exception, match="the disk of this rank failed") as caught:
        Training(lambda: DataLoader(data, batch_size=1), directory, strategy=STOP).run()
    return type(caught.value).__name__, getattr(caught.value, "rank", None)


def test_data_that_raise_on_one_rank_end_all(tmp_path: Path) -> None:
    """The other rank, which waits for the next exchange, raises the cause."""
    errors = run_ranks(break_on_one, 2, tmp_path)
    assert errors == [("RankFailedError", 1), ("OSError", None)]
