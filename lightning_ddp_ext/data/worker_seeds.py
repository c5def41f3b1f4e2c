"""Begin an epoch in loaders and their workers, with random streams that belong to it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from lightning_ddp_ext.data.epochs import data_loaders, epoch_takers, set_epoch
from lightning_ddp_ext.data.loader import forget_workers
from lightning_ddp_ext.errors import SamplerError

__all__ = ["Seeds", "StartWorker", "begin_epoch", "seed_generators", "seeds_for"]

_WIDTH = 32  # bits in a word of NumPy's seeds
_WORDS = (4, 4, 2)  # of Python's, NumPy's and torch's seed


class Seeds(NamedTuple):
    """Seeds of the three generators: of ``random.seed``, ``numpy.random.seed`` and ``torch.manual_seed``."""

    python: int
    numpy: tuple[int, ...]
    torch: int


def seeds_for(seed: int, *, epoch: int, rank: int, worker: int | None = None) -> Seeds:
    """Return seeds that are independent of each other, and of those of any other epoch, rank or worker.

    They are words of NumPy's ``SeedSequence`` over (seed, epoch, rank, worker + 1), the last one 0 where there is no
    worker, each number as two words of 32 bits. So nothing is added up: (seed 0, epoch 1) is not (seed 1, epoch 0).

    Args:
        seed: the seed of the run, like the others from 0 to below 2^63.
        epoch: from 0.
        rank: from 0.
        worker: the worker's id, or None for the rank's main process.

    Raises:
        SamplerError: for a number outside of these limits.

    Example:
        >>> seeds_for(42, epoch=3, rank=0) == seeds_for(42, epoch=3, rank=0)
        True
        >>> seeds_for(42, epoch=3, rank=0) == seeds_for(42, epoch=3, rank=0, worker=0)
        False
    """
    numbers = {"seed": seed, "epoch": epoch, "rank": rank, "worker": 0 if worker is None else worker}
    for name, number in numbers.items():
        _check(name, number)
    numbers["worker"] = 0 if worker is None else worker + 1
    entropy = [word for number in numbers.values() for word in (number % 2**_WIDTH, number >> _WIDTH)]
    words = [int(word) for word in np.random.SeedSequence(entropy).generate_state(sum(_WORDS))]
    python, numpy, torchs = (tuple(words.pop() for _ in range(count)) for count in _WORDS)
    return Seeds(_joined(python), numpy, _joined(torchs))


def seed_generators(seed: int, *, epoch: int, rank: int, worker: int | None = None) -> None:
    """Seed the global generators of Python's ``random``, NumPy and torch (on all devices) with ``seeds_for``'s seeds.

    Not collective. Arguments and errors are those of ``seeds_for``.

    Example:
        >>> seed_generators(42, epoch=0, rank=1)
        >>> first = random.random(), float(torch.rand(()))
        >>> seed_generators(42, epoch=0, rank=1)
        >>> first == (random.random(), float(torch.rand(())))
        True
    """
    seeds = seeds_for(seed, epoch=epoch, rank=rank, worker=worker)
    random.seed(seeds.python)
    np.random.seed(seeds.numpy)
    torch.manual_seed(seeds.torch)


class StartWorker:
    """A ``worker_init_fn`` that calls the former one, and then begins an epoch in the worker.

    Args:
        former: the loader's own ``worker_init_fn``, if it has one; what it makes is told the epoch, too.
        epoch: the epoch that the worker reads.
        rank: this process's rank.
        seed: with one, the worker's generators are seeded by :func:`seed_generators`.
    """

    def __init__(self, former: Callable[[int], None] | None, *, epoch: int, rank: int, seed: int | None) -> None:
        self.former = former
        self.epoch = epoch
        self.rank = rank
        self.seed = seed

    def __call__(self, worker: int) -> None:
        """Start a worker."""
        if self.former is not None:
            self.former(worker)
        if self.seed is not None:
            seed_generators(self.seed, epoch=self.epoch, rank=self.rank, worker=worker)
        info = get_worker_info()
        if info is not None:
            set_epoch(info.dataset, self.epoch)


def begin_epoch(loader: Any, epoch: int, *, rank: int, seed: int | None = None) -> None:
    """Tell everything below a loader the epoch, before a pass over it begins.

    ``set_epoch`` is called on every sampler, dataset and loader inside. Workers that persist would not notice that:
    where a dataset takes epochs, or with a seed, the next pass starts new ones.

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
        ...     begin_epoch(loader, epoch, rank=0)
        ...     print(list(loader))
        [0]
        [1]
        [2]
    """
    set_epoch(loader, epoch)
    if isinstance(loader, DataLoader) and loader.num_workers:
        former = loader.worker_init_fn
        own = former.former if isinstance(former, StartWorker) else former
        if own is not None or seed is not None:
            loader.worker_init_fn = StartWorker(own, epoch=epoch, rank=rank, seed=seed)
    for each in data_loaders(loader):
        if each.persistent_workers and (seed is not None or epoch_takers(each.dataset)):
            forget_workers(each)


def _check(name: str, number: object) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**63:
        raise SamplerError(f"{name} must be an integer from 0 to below 2^63 (got {number!r})")


def _joined(words: tuple[int, ...]) -> int:
    return sum(word << (_WIDTH * place) for place, word in enumerate(words))
