"""``SamplerEpochSeeding(seed=...)`` seeds what each rank and worker draws in an epoch."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_ddp_ext import SamplerEpochSeeding
from tests.harness.training import KINDS, Kind, on_ranks
from tests.integration import continuing

SAMPLES = 4
GENERATORS = 3
Drawn = list[set[int]]  # the numbers of each epoch


class Chance(Dataset[Tensor]):
    """Samples of one random number from each of the three generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        drawn = random.getrandbits(50), np.random.randint(2**50), int(torch.randint(2**50, ()))
        return torch.tensor([[number] for number in drawn])


def draw(kind: Kind, directory: Path, workers: int) -> dict[str, Drawn]:
    """Return what one rank draws in three runs, before which torch is seeded differently."""
    options: Any = continuing.workers(workers, persistent_workers=True) if workers else {}

    def draw_with(seed: int, *, start: int) -> Drawn:
        torch.manual_seed(start)  # what the run would draw without the callback
        make = partial(DataLoader, Chance(), 2, **options)
        seeding = SamplerEpochSeeding(seed=seed)
        read = continuing.read(kind, directory, make, [seeding], use_distributed_sampler=False)
        return [set().union(*batches) for batches in read.values()]

    return {
        "first": draw_with(5, start=0),
        "again": draw_with(5, start=1),
        "with another seed": draw_with(6, start=2),
    }


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_random_streams_belong_to_seed_epoch_rank_and_worker(
    kind: Kind, workers: int, tmp_path: Path
) -> None:
    """Only runs with the same seed draw the same numbers, on the same rank and epoch."""
    epochs = []
    for draws in on_ranks(kind, draw, tmp_path, workers):
        assert draws["first"] == draws["again"]
        epochs += [*draws["first"], *draws["with another seed"]]
    assert len(epochs) == 2 * 2 * 2  # ranks, seeds, epochs
    assert [len(numbers) for numbers in epochs] == [SAMPLES * GENERATORS] * len(epochs)
    assert len(set().union(*epochs)) == SAMPLES * GENERATORS * len(epochs)
