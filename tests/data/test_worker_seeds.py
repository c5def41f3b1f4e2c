"""What a DataLoader's workers know of the epoch, seen in the data that they return."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_ddp_ext.data.epochs import start_epoch


class Mapped(Dataset[Any]):
    """What ``make`` returns in the process that reads the sample."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.make()


def draws() -> tuple[float, float, float]:
    """Random numbers of all three generators."""
    return random.random(), float(np.random.random()), float(torch.rand(()))


def read(make: Callable[[], Any], *, persistent: bool = True, **options: Any) -> list[list[Any]]:
    """Read two epochs with a worker, as a Trainer would, and return the samples of each."""
    options = {"multiprocessing_context": "fork", "persistent_workers": persistent, "collate_fn": list, **options}
    loader, samples = DataLoader(Mapped(make), num_workers=1, **options), []
    for epoch in range(2):
        start_epoch(loader, epoch, rank=0, seed=3 if make is draws else None)
        samples.append([sample for batch in loader for sample in batch])
    return samples


def test_the_users_own_start_runs_first() -> None:
    """A worker_init_fn of the user's still runs, in every epoch, and before the generators are seeded."""

    def start(worker: int) -> None:
        random.seed(worker)
        os.environ["STARTED"] = "yes"

    assert read(lambda: os.environ["STARTED"], worker_init_fn=start, persistent=False) == [["yes"] * 8] * 2
    assert read(draws, worker_init_fn=start, persistent=False) == read(draws)


def test_workers_stay_where_nothing_takes_epochs() -> None:
    """Persistent workers are started anew for those datasets alone that have to be told."""
    first, second = read(os.getpid)
    assert set(first) == set(second)
