"""Seed random number generators of a rank, and of the workers of its loaders."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_ddp_ext.data.random_state import generators_of, preserve_random_state

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
        random.seed(mix(seed, _FOR_PYTHON))
        np.random.seed(mix(seed, _FOR_NUMPY) % 2**32)
        torch.default_generator.manual_seed(mix(seed, _FOR_TORCH))
        yield


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed % 2**32)
