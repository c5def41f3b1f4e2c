"""Start an epoch in loaders and their workers, and seed random generators for it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_ddp_ext.data.epochs import all_below, has_set_epoch, set_epoch
from lightning_ddp_ext.data.generators import mix
from lightning_ddp_ext.data.loader import forget_workers


def seed_generators(seed: int, *, epoch: int, rank: int, worker: int | None = None) -> None:
    """Seed the global generators of Python's ``random``, NumPy and torch (on all devices), each by a hash of all four.

    So nothing is added up: (seed 0, epoch 1) is not (seed 1, epoch 0), and practically no other epoch, rank or worker
    has one of these seeds. Not collective.

    Args:
        seed: the seed of the run.
        epoch: from 0.
        rank: from 0.
        worker: the worker's id, or ``None`` for the rank's main process.

    Raises:
        ConfigurationError: a number is negative.

    Example:
        >>> seed_generators(42, epoch=0, rank=1)
        >>> first = random.random(), float(torch.rand(()))
        >>> seed_generators(42, epoch=0, rank=1)
        >>> first == (random.random(), float(torch.rand(())))
        True
    """
    process = 0 if worker is None else worker + 1
    for_python, for_numpy, for_torch = (mix(seed, epoch, rank, process, generator) for generator in range(3))
    random.seed(for_python)
    np.random.seed([for_numpy % 2**32, for_numpy >> 32])  # it takes 32 bits at a time
    torch.manual_seed(for_torch)


@dataclass(frozen=True)
class SeedWorker:
    """A ``worker_init_fn`` that calls the loader's ``own`` one, and then :func:`seed_generators`."""

    own: Callable[[int], None] | None
    epoch: int
    rank: int
    seed: int

    def __call__(self, worker: int) -> None:
        """Start a worker."""
        if self.own is not None:
            self.own(worker)
        seed_generators(self.seed, epoch=self.epoch, rank=self.rank, worker=worker)


def start_epoch(loader: Any, epoch: int, *, rank: int, seed: int | None = None) -> None:
    """Call ``set_epoch`` on every sampler, dataset and loader inside a loader, before it is iterated over.

    Workers that persist would not notice that: where a dataset takes epochs, or with a seed, the next iterator starts
    new ones.

    Args:
        loader: a loader of our own, see ``loader.own_copy``, since its ``worker_init_fn`` may be replaced.
        epoch: the epoch, from 0.
        rank: this process's rank.
        seed: with one, the generators of the loader's workers are seeded by :func:`seed_generators`.

    Example:
        >>> from torch.utils.data import IterableDataset
        >>> class Epochs(IterableDataset[int]):
        ...     def set_epoch(self, epoch):
        ...         self.epoch = epoch
        ...     def __iter__(self):
        ...         yield self.epoch
        >>> loader = DataLoader(Epochs(), batch_size=None, num_workers=1, persistent_workers=True)
        >>> for epoch in range(3):
        ...     start_epoch(loader, epoch, rank=0)
        ...     print([int(epoch) for epoch in loader])
        [0]
        [1]
        [2]
    """
    set_epoch(loader, epoch)
    if seed is not None and isinstance(loader, DataLoader):
        own = loader.worker_init_fn
        loader.worker_init_fn = SeedWorker(own.own if isinstance(own, SeedWorker) else own, epoch, rank, seed)
    kept = [each for each in all_below(loader) if isinstance(each, DataLoader) and each.persistent_workers]
    for each in kept:
        if seed is not None or any(has_set_epoch(below) for below in all_below(each.dataset)):
            forget_workers(each)
