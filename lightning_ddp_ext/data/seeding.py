"""Seed random number generators of a rank, and of the workers of its loaders."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_ddp_ext.data.random_state import generators_of, preserve_random_state

_DEFINED_IN_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE
# Mixed into the seed of each generator.
_FOR_PYTHON, _FOR_NUMPY, _FOR_TORCH, _FOR_OTHERS = range(4)


def mix(*words: int) -> int:
    """Mix integers of any size into one 64-bit seed.

    The seed depends on their values, number and order.

    >>> mix(0, 1) == mix(1, 0), mix(0) == mix(0, 0)
    (False, False)
    """
    text = ",".join(f"{word:x}" for word in words)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def seed_generators(seed: int, *, epoch: int, rank: int, worker: int | None = None) -> None:
    """Seed the global generators of Python's ``random``, NumPy and torch.

    Each seed is a hash of the arguments. Torch's generators are seeded on all devices.
    The arguments are not added: (seed 0, epoch 1) differs from (seed 1, epoch 0), and
    it is practically impossible that two epochs, ranks or workers share a seed. Not
    collective.

    Args:
        seed: the seed of the run.
        epoch: from 0.
        rank: from 0.
        worker: the worker's id, or ``None`` for the rank's main process.

    Example:
        >>> seed_generators(42, epoch=0, rank=1)
        >>> first = random.random(), float(torch.rand(()))
        >>> seed_generators(42, epoch=0, rank=1)
        >>> first == (random.random(), float(torch.rand(())))
        True
    """
    process = 0 if worker is None else worker + 1
    for_python, for_numpy, for_torch = (
        mix(seed, epoch, rank, process, generator)
        for generator in (_FOR_PYTHON, _FOR_NUMPY, _FOR_TORCH)
    )
    random.seed(for_python)
    np.random.seed([for_numpy % 2**32, for_numpy >> 32])  # NumPy takes 32 bits at a time
    torch.manual_seed(for_torch)


@dataclass(frozen=True)
class WorkerSeeding:
    """How the generators of a loader's workers are seeded in each epoch.

    Attributes:
        seed: the seed of the run.
        each_sample: whether they are also seeded before each sample.
    """

    seed: int
    each_sample: bool = False

    def seed_worker(self, dataset: Any, *, epoch: int, rank: int, worker: int) -> None:
        """Seed this process, which is a worker that reads ``dataset``."""
        seed_generators(self.seed, epoch=epoch, rank=rank, worker=worker)
        if self.each_sample:
            seed_each_sample(dataset, self.seed, epoch)


def seed_each_sample(dataset: Any, *words: int) -> None:
    """Make a map-style dataset seed the global generators before reading a sample.

    The seed is a hash of ``words`` and the sample's index. A dataset with
    ``__getitems__``, which reads the samples of a batch together, seeds them once for
    each batch. The class of the object is replaced by a subclass, so this is only for
    the copy of a dataset in a worker process.

    >>> class Draws(torch.utils.data.Dataset):
    ...     def __getitem__(self, index):
    ...         return random.random()
    >>> dataset = Draws()
    >>> seed_each_sample(dataset, 7)
    >>> dataset[0] == dataset[0], dataset[0] == dataset[1]
    (True, False)
    """
    users_class = type(dataset)
    if not users_class.__flags__ & _DEFINED_IN_PYTHON:
        return  # such as ``list``, which draws no random numbers

    names = [name for name in ("__getitem__", "__getitems__") if hasattr(users_class, name)]
    methods = {name: _seeding_before(getattr(users_class, name), words) for name in names}
    metaclass: Any = type(users_class)
    made = metaclass(users_class.__name__, (users_class,), {"__slots__": (), **methods})
    # Python looks up special methods in the class, not in the object. A frozen dataclass
    # refuses a plain assignment.
    object.__setattr__(dataset, "__class__", made)


def _seeding_before(read: Callable[[Any, Any], Any], words: Sequence[int]) -> Any:
    """Return a method that seeds the global generators, and then calls ``read``."""

    def seed_and_read(self: Any, index: Any) -> Any:
        _seed_on_cpu(mix(*words, *repr(index).encode()))
        return read(self, index)

    return seed_and_read


@contextmanager
def seeded(seed: int, *owners: object) -> Iterator[None]:
    """Give each generator its own seed within the block, and restore all afterwards.

    These are the global generators of Python, NumPy and torch (CPU), and those among
    the owners' attributes.

    >>> with seeded(1):
    ...     first = random.random()
    >>> with seeded(1):
    ...     print(random.random() == first)
    True
    """
    others = generators_of(*owners)
    with preserve_random_state(others):
        for number, generator in enumerate(others):
            _seed(generator, mix(seed, _FOR_OTHERS, number))
        _seed_on_cpu(seed)
        yield


def _seed_on_cpu(seed: int) -> None:
    """Seed the global generators, each with a different seed.

    It takes a tenth of the time of ``torch.manual_seed``.
    """
    random.seed(mix(seed, _FOR_PYTHON))
    np.random.seed(mix(seed, _FOR_NUMPY) % 2**32)  # a list of integers would take longer
    torch.default_generator.manual_seed(mix(seed, _FOR_TORCH))


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed % 2**32)
