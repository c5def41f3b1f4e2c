"""Ranks with different numbers of training batches end epochs together, or raise; and
ranks with the same data.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_ddp_ext import SamplingError, ScalableDistributedSampler
from lightning_ddp_ext.errors import ConfigurationError, RankFailedError
from tests.harness.ranks import run_ranks
from tests.harness.training import Net, make_strategy, make_trainer
from tests.integration.continuing import WITHOUT_DROPOUT, Numbers, Run, Training, generations

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


def two_streams(mode: Any) -> Loaders:
    return lambda rank, lengths: CombinedLoader([stream(rank, lengths), stream(rank, [3])], mode)


@dataclass
class Case:
    """Lengths by rank and epoch, the kind of loader, and the options of training."""

    lengths: list[Lengths]
    loaders: Loaders = stream
    options: dict[str, Any] = field(default_factory=dict)

    def training(self, rank: int, directory: Path, *, cut: bool = False) -> Training:
        """Return a training whose ranks stop at the shortest, or one on data that are
        ``cut`` to equal lengths.
        """
        defaults = {
            "max_epochs": len(self.lengths[0]),
            "use_distributed_sampler": False,
            "limit_val_batches": 1.0,
        }
        options = {**defaults, "model": WITHOUT_DROPOUT, **self.options}
        lengths = self.lengths[rank]
        if cut:
            limit = options.pop("limit_train_batches", 99)
            lengths = [min(*each, limit) for each in zip(*self.lengths, strict=True)]
        # A DataLoader over samples has one length for all epochs.
        loaders = stream if cut and self.loaders is indexed else self.loaders
        strategy = {} if cut else STOP
        return Training(
            lambda: loaders(rank, lengths), directory, options=options, strategy=strategy
        )


CASES = {
    "streams": Case([[5, 4, 0, 3], [3, 6, 2, 3]]),
    "no data on one rank": Case([[0, 0], [3, 3]]),
    "samples": Case([[4], [3]], indexed, {"max_epochs": 2}),
    "a loader with a state": Case([[4, 2], [3, 5]], stateful, {"accumulate_grad_batches": 2}),
    "limit": Case(
        [[5, 2, 6], [3, 6, 7]], options={"limit_train_batches": 4, "val_check_interval": 2}
    ),
    "max_steps": Case([[5, 4], [3, 6]], options={"max_steps": 5, "max_epochs": -1}),
    **{mode: Case([[5, 4], [4, 6]], two_streams(mode)) for mode in ("max_size", "max_size_cycle")},
}


def run_cases(rank: int, world_size: int, directory: Path) -> dict[str, list[Run]]:
    warnings.simplefilter("ignore")
    return {
        name: [case.training(rank, directory, cut=cut).run() for cut in (False, True)]
        for name, case in CASES.items()
    }


def test_an_epoch_ends_as_if_no_rank_had_more_data_than_the_shortest(tmp_path: Path) -> None:
    """Steps, validations, ends of epochs, counts and weights are those of data that are
    cut to equal lengths.
    """
    by_rank = run_ranks(run_cases, 2, tmp_path)
    for found in by_rank:
        for name, (uneven, cut) in found.items():
            assert (name, uneven.steps, uneven.events, uneven.counts) == (
                name,
                cut.steps,
                cut.events,
                cut.counts,
            )
            assert torch.equal(uneven.weights, cut.weights), name
            assert torch.equal(uneven.weights, by_rank[0][name][0].weights), name


def resume(rank: int, world_size: int, directory: Path) -> list[dict[str, str]]:
    warnings.simplefilter("ignore")
    found = []
    for loaders in (stateful, stream_and_samples):
        case = Case(
            [[4, 2], [3, 3]], loaders, {"accumulate_grad_batches": 2, "limit_val_batches": 0}
        )
        training = case.training(rank, directory)
        training.name = loaders.__name__
        found.append(generations(training, ["train_batch_end-1", "train_batch_end-4"]))
    return found


@pytest.mark.lowest
def test_an_epoch_that_will_end_early_can_be_resumed_in_its_middle(tmp_path: Path) -> None:
    """From each checkpoint a run trains on the same batches as without a stop, and its
    epochs end at the same step.
    """
    assert run_ranks(resume, 2, tmp_path) == [[{}, {}]] * 2


class Broken(Stream):
    def __iter__(self) -> Iterator[Tensor]:
        yield from super().__iter__()
        raise OSError("the disk of this rank failed")


def break_on_one(rank: int, world_size: int, directory: Path) -> Any:
    warnings.simplefilter("ignore")
    data = (Broken if rank == 1 else Stream)(rank, [4 if rank == 1 else 40])
    with pytest.raises(
        OSError if rank == 1 else RankFailedError, match="the disk of this rank failed"
    ) as caught:
        Training(lambda: DataLoader(data, batch_size=1), directory, strategy=STOP).run()
    return getattr(caught.value, "rank", None)


def test_data_that_raise_on_one_rank_end_all(tmp_path: Path) -> None:
    """The other ranks wait for the exchange about the next batch, and raise the cause
    instead.
    """
    assert run_ranks(break_on_one, 2, tmp_path) == [1, None]


def fit(
    directory: Path, loaders: Any, strategy: dict[str, Any] | None = None, **options: Any
) -> int:
    """Train, and return the number of steps."""
    training = Training(lambda: loaders, directory, strategy=strategy or {})
    return len(training.run(**{"max_epochs": 2, "use_distributed_sampler": False, **options}).steps)


def other_lengths(rank: int) -> DataLoader[Any]:
    return indexed(rank, [3 + rank])


def no_length_on_rank_zero(rank: int) -> DataLoader[Any]:
    return (stream, indexed)[rank](rank, [3])


def refused(
    rank: int,
    world_size: int,
    directory: Path,
    make: Callable[[int], DataLoader[Any]],
    strategy: dict[str, Any],
) -> str:
    """Return the error."""
    warnings.simplefilter("ignore")
    with pytest.raises(SamplingError) as caught:
        fit(directory, make(rank), strategy)
    return str(caught.value)


def test_lengths_that_differ_are_refused(tmp_path: Path) -> None:
    """Every rank raises with all numbers and a remedy, instead of waiting."""
    for message in run_ranks(refused, 2, tmp_path, other_lengths, {}):
        assert (
            message
            == "the ranks have different numbers of training batches (3 on rank 0, 4 on rank 1), so"
            " some ranks would wait forever after 3 batches; pass"
            " DDPExtStrategy(uneven_inputs='stop_at_shortest'), or use a sampler or drop_last=True"
            " so that every rank gets the same number of batches"
        )


def test_a_stream_beside_a_loader_with_a_length_is_refused(tmp_path: Path) -> None:
    """With "stop_at_shortest" each rank's error names its own loader."""
    for message in run_ranks(refused, 2, tmp_path, no_length_on_rank_zero, STOP):
        assert "or training would hang (lengths by rank: (inf, 3); inf means no length)" in message


def limited(rank: int, world_size: int, directory: Path, limit: dict[str, int]) -> int:
    """Return the steps of two epochs of three or four batches."""
    warnings.simplefilter("ignore")
    return fit(directory, other_lengths(rank), **limit)


@pytest.mark.parametrize(
    ("limit", "steps"), [({"limit_train_batches": 3}, 6), ({"max_steps": 3, "max_epochs": -1}, 3)]
)
def test_a_limit_makes_lengths_even(limit: dict[str, int], steps: int, tmp_path: Path) -> None:
    """Ranks with other lengths train if each stops at the limit."""
    assert run_ranks(limited, 2, tmp_path, limit) == [steps, steps]


class Counting(Net):
    def configure_callbacks(self) -> list[L.Callback]:
        assert self.trainer.estimated_stepping_batches
        return []


def count_too_early(rank: int, world_size: int, directory: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        make_trainer(make_strategy("ours", directory, uneven_inputs="stop_at_shortest")).fit(
            Counting()
        )
    return str(caught.value)


def test_lengths_that_the_ranks_cannot_compare_yet_are_refused(tmp_path: Path) -> None:
    """`configure_callbacks` runs before the ranks connect; the error names a hook that
    runs afterwards.
    """
    for message in run_ranks(count_too_early, 2, tmp_path):
        assert (
            "configure_callbacks runs before they connect; read estimated_stepping_batches in setup"
            in message
        )


def warned(rank: int, world_size: int, directory: Path) -> list[list[str]]:
    found = []
    for loaders in (stream(0, [2]), stream(rank, [2]), torch.ones(2, 1, 1), indexed(0, [2])):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(directory, loaders)
        found.append(
            [text for each in caught if "the same on ranks" in (text := str(each.message))]
        )
    return found


@pytest.mark.lowest
def test_ranks_that_read_the_same_are_warned_once(tmp_path: Path) -> None:
    """Rank 0 names the class of data that are not divided among the ranks; other data
    cause no warning.
    """
    first, second = run_ranks(warned, 2, tmp_path)
    assert [len(each) for each in first] == [1, 0, 1, 0]
    assert first[0][0].startswith(
        "the first training batch is the same on ranks 0, 1: Stream is probably not split among the"
        " ranks, so each sample is trained on 2 times per epoch; in __iter__, yield only the"
        " samples of this rank (call torch.distrib"
    )
    assert "Tensor is probably not split" in first[2][0]
    assert second == [[], [], [], []]


class Sized(Stream):
    """A stream with a length."""

    def __len__(self) -> int:
        return self.length


def part(rank: int, samples: int) -> DataLoader[Any]:
    """Return a loader of this rank's own part of the samples, which the strategy
    divides once more.
    """
    own = range(samples)[rank::2]
    return DataLoader(Subset(Numbers(samples), own), 1)


def refuse_lengths(rank: int, world_size: int, directory: Path) -> str:
    with pytest.raises(SamplingError) as refused:
        fit(directory, part(rank, 9), use_distributed_sampler=True)
    return str(refused.value)


def test_samples_that_differ_in_number_are_refused(tmp_path: Path) -> None:
    """Every rank's error names the dataset, the numbers and the remedies."""
    first, second = run_ranks(refuse_lengths, 2, tmp_path)
    assert second == first
    assert first == (
        "the ranks cannot share out the samples of Subset, because the length differs (5 on"
        " rank 0, 4 on rank 1); create the same dataset and sampler on every rank, or pass"
        " Trainer(use_distributed_sampler=False) if each rank has different data"
    )


def divide_on_one(rank: int, world_size: int, directory: Path) -> str:
    divided = DataLoader(Numbers(8), 1, sampler=ScalableDistributedSampler(range(8)))
    loader = divided if rank == 1 else DataLoader(Sized(rank, [4]), 1)
    with pytest.raises(SamplingError) as refused:
        fit(directory, loader, use_distributed_sampler=True)
    return str(refused.value)


def test_a_sampler_on_some_ranks_only_is_refused(tmp_path: Path) -> None:
    """Every rank's error names the kinds."""
    for message in run_ranks(divide_on_one, 2, tmp_path):
        assert "because the kind differs (None on rank 0, scalable on rank 1)" in message
