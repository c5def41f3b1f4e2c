"""Evaluation of data that users limit or divide among ranks: each rank evaluates its
part, and values are those of all samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from tests.harness.ranks import run_ranks
from tests.integration.evaluating import AtTheEnd, Ragged, loader, make_on, scores


class Dealt(DistributedSampler[Any]):
    """A user's sampler for several ranks that repeats nothing, so that some have more
    samples or none.
    """

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(range(self.rank, len(self.dataset), self.num_replicas))  # type: ignore[arg-type]


class Part(IterableDataset[Any]):
    """A stream of a rank's part of the samples, without a length."""

    def __init__(self, samples: int, rank: int, world_size: int) -> None:
        self.samples = samples
        self.part = slice(rank, None, world_size)

    def __iter__(self) -> Iterator[Any]:
        return iter(scores(self.samples)[self.part])


class Unsized(Ragged):
    """Has no length."""

    __len__ = None  # type: ignore[assignment]


@dataclass
class Divided:
    """What an evaluation logged, and the sizes of this rank's batches."""

    logged: dict[str, float]
    sizes: list[int]


def divide(rank: int, world_size: int, directory: Path) -> dict[str, Divided]:
    """Evaluate data that the user divides, so that ranks have other numbers of batches,
    or none.
    """
    trainer = make_on(world_size, directory, use_distributed_sampler=False)
    own = trainer.global_rank
    loaders: dict[str, list[DataLoader[Any]]] = {
        "sampler": [loader(n, 1, sampler=Dealt(scores(n), world_size, own)) for n in (5, 1)],
        "stream": [DataLoader(Part(n, own, world_size), 2) for n in (7, 1, 2, 9)],
        "without length": [
            DataLoader(scores(9), batch_sampler=Unsized(range(own, 9, world_size), 2, False))
        ],
    }
    found = {}
    for name, each in loaders.items():
        model = AtTheEnd(len(each))
        logged = {
            key: value
            for values in trainer.validate(model, each, verbose=False)
            for key, value in values.items()
        }
        found[name] = Divided(logged, [len(indices) for indices in model.seen])
    return found


def test_ranks_that_have_other_numbers_of_batches_or_none(tmp_path: Path) -> None:
    """Each rank evaluates its own batches, and values are those of all samples.

    A rank without a batch evaluates one that counts for nothing.
    """
    (one,) = run_ranks(divide, 1, tmp_path)
    ranks = run_ranks(divide, 3, tmp_path)
    for found in ranks:
        for name, alone in one.items():
            assert found[name].logged == pytest.approx(alone.logged, rel=1e-6), name
    assert {name: [found[name].sizes for found in ranks] for name in one} == {
        "sampler": [[1, 1, 1], [1, 1, 1], [1, 1]],  # the second loader has one sample
        "stream": [[2, 1, 1, 1, 2, 1], [2, 1, 1, 2, 1], [2, 1, 1, 2, 1]],
        "without length": [[1, 2]] * 3,
    }
