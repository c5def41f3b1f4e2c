"""Ranks evaluate data that the user divides, and values are those of all samples."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_ddp_ext.data.samplers import ExactDistributedSampler
from lightning_ddp_ext.errors import RankAbsentError, RankFailedError
from tests.harness.ranks import run_ranks
from tests.harness.training import make_strategy, make_trainer
from tests.integration.evaluating import Ragged, Scorer, loader, scores


class Dealt(DistributedSampler[Any]):
    """A user's sampler for several ranks that repeats nothing.

    Some ranks have more samples than others, or none.
    """

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.rank, len(self.dataset), self.num_replicas))

    def __len__(self) -> int:
        return len(range(self.rank, len(self.dataset), self.num_replicas))


class Part(IterableDataset[Any]):
    """A stream of a rank's part of the samples, without a length."""

    def __init__(self, samples: int, rank: int, world_size: int) -> None:
        self.samples = samples
        self.part = slice(rank, None, world_size)

    def __iter__(self) -> Iterator[Any]:
        return iter(scores(self.samples)[self.part])


class Unsized(Ragged):
    """Yields batches of one, two, three and more samples, and has no length."""

    __len__ = None


def sampled(samples: int, rank: int, world_size: int) -> DataLoader[Any]:
    return loader(samples, sampler=Dealt(scores(samples), world_size, rank))


def sampled_in_reverse(samples: int, rank: int, world_size: int) -> DataLoader[Any]:
    sampler = ExactDistributedSampler(range(samples), world_size, world_size - 1 - rank)
    return loader(samples, sampler=sampler)


def streamed(samples: int, rank: int, world_size: int) -> DataLoader[Any]:
    return DataLoader(Part(samples, rank, world_size), 2)


def unsized(samples: int, rank: int, world_size: int) -> DataLoader[Any]:
    return loader(samples, batch_sampler=Unsized(range(rank, samples, world_size), 2, False))


Sizes = list[int]  # of a rank's batches


class Case(NamedTuple):
    """How data are divided.

    By the number of samples in a loader, ``sizes`` has those of the batches that each
    of three ranks evaluates.
    """

    make: Callable[[int, int, int], DataLoader[Any]]
    sizes: dict[int, list[Sizes]]


CASES = {
    # Five samples in batches of one are two, two and one.
    "sampler": Case(sampled, {5: [[1, 1], [1, 1], [1]], 4: [[1, 1], [1], [1]]}),
    "sampler of another rank": Case(sampled_in_reverse, {5: [[1], [1, 1], [1, 1]]}),
    # Seven samples in batches of two are three, two and two.
    "stream": Case(streamed, {7: [[2, 1], [2], [2]], 9: [[2, 1], [2, 1], [2, 1]]}),
    "without length": Case(unsized, {9: [[1, 2], [1, 2], [1, 2]]}),
}


class Divided(NamedTuple):
    """What an evaluation logged, and the sizes of this rank's batches by loader."""

    logged: dict[str, float]
    sizes: list[Sizes]


def trainer_on(world_size: int, directory: Path) -> L.Trainer:
    strategy: Any = make_strategy("ours", directory) if world_size > 1 else "auto"
    return make_trainer(strategy, devices=world_size, use_distributed_sampler=False)


def divide(rank: int, world_size: int, directory: Path, name: str) -> Divided:
    """Evaluate this rank's part of each loader."""
    case = CASES[name]
    loaders = [case.make(samples, rank, world_size) for samples in case.sizes]
    model = Scorer(len(loaders))
    trainer = trainer_on(world_size, directory)
    trainer.validate(model, loaders, verbose=False)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    sizes = [[len(batch) for batch in batches] for batches in model.samples.values()]
    return Divided(logged, sizes)


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_have_other_numbers_of_batches(name: str, tmp_path: Path) -> None:
    """Each rank evaluates its own batches, and values are those of all samples."""
    (alone,) = run_ranks(divide, 1, tmp_path, name)
    sizes_of_ranks = zip(*CASES[name].sizes.values(), strict=True)
    for divided, sizes in zip(run_ranks(divide, 3, tmp_path, name), sizes_of_ranks, strict=True):
        assert divided.logged == pytest.approx(alone.logged, rel=1e-6)
        assert divided.sizes == list(sizes)


def evaluate_one_sample(
    rank: int, world_size: int, directory: Path, make: Callable[[int, int, int], DataLoader[Any]]
) -> tuple[type[BaseException], str]:
    """Evaluate data of which only rank 0 has a sample; return the error's type and text."""
    only_on_rank_0 = make(1, rank, world_size)
    with pytest.raises((RankFailedError, RuntimeError)) as caught:
        trainer_on(world_size, directory).validate(Scorer(), only_on_rank_0, verbose=False)
    return caught.type, str(caught.value)


def test_a_rank_whose_loader_has_no_batch_ends_the_evaluation(tmp_path: Path) -> None:
    """This rank raises stock's error; the other one names it with this cause."""
    (kind, message), (kind_on_rank_1, _) = run_ranks(evaluate_one_sample, 2, tmp_path, sampled)
    assert kind is RankFailedError
    assert message.startswith("rank 1 (host ")
    assert "Please make sure that it returns at least 1 batch" in message
    assert kind_on_rank_1 is RuntimeError


def test_a_rank_whose_stream_yields_no_batch_ends_the_evaluation(tmp_path: Path) -> None:
    """Every rank's error names the ranks and the remedy."""
    first, second = run_ranks(evaluate_one_sample, 2, tmp_path, streamed)
    assert first == second
    kind, message = first
    assert kind is RankAbsentError
    assert "if the ranks have different numbers of batches, use" in message
