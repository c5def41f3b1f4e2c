"""Make seeds, and seed random number generators with them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from lightning_ddp_ext.data.random_state import generators_of, preserve_random_state


def mix(*words: int) -> int:
    """Mix whole numbers of any size into one 64-bit seed; their order, number and grouping all count.

    >>> mix(0, 1) == mix(1, 0), mix(0) == mix(0, 0)
    (False, False)
    """
    text = ",".join(f"{word:x}" for word in words)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def seed_generators(seed: int, *, epoch: int, rank: int, worker: int | None = None) -> None:
    """Seed the global generators of Python's ``random``, NumPy and torch (on all devices), each by a hash of all four.

    The numbers are not added: (seed 0, epoch 1) differs from (seed 1, epoch 0), and practically no other epoch, rank
    or worker has one of these seeds. Not collective.

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
    for_python, for_numpy, for_torch = (mix(seed, epoch, rank, process, generator) for generator in range(3))
    random.seed(for_python)
    np.random.seed([for_numpy % 2**32, for_numpy >> 32])  # it takes 32 bits at a time
    torch.manual_seed(for_torch)


@contextmanager
def workers_seeded_apart(loader: Any, *words: int) -> Iterator[None]:
    """Have workers that start in the block draw their seed from another generator than the loader's.

    With persistent workers, a resumed run starts them at a different time than the original run. That must not change
    any other random number.
    """
    own = loader.generator
    loader.generator = torch.Generator()
    loader.generator.manual_seed(mix(torch.initial_seed(), *words))
    try:
        yield
    finally:
        loader.generator = own


@contextmanager
def seeded(seed: int, *owners: object) -> Iterator[None]:
    """Seed all generators in the block, each with its own stream, and restore them after it.

    These are the global generators of Python, NumPy and torch (CPU), and those that are attributes of an owner.

    >>> with seeded(1):
    ...     first = random.random()
    >>> with seeded(1):
    ...     print(random.random() == first)
    True
    """
    others = generators_of(*owners)
    with preserve_random_state(others):
        for number, generator in enumerate(others):
            _seed(generator, mix(seed, 3, number))
        random.seed(mix(seed, 0))
        np.random.seed(mix(seed, 1) % 2**32)
        torch.default_generator.manual_seed(mix(seed, 2))
        yield


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed % 2**32)
