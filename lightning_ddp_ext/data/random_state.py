"""Record, restore and seed the states of random number generators."""

from __future__ import annotations

import hashlib
import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# The global generators of `torch`, `numpy.random` and `random`. The last two have no
# public names, but functions of these modules are bound to them.
GLOBAL_GENERATORS: tuple[Any, ...] = (
    torch.default_generator,
    np.random.get_state.__self__,  # type: ignore[attr-defined]
    random.getstate.__self__,  # type: ignore[attr-defined]
)


def generators_of(*owners: object) -> list[Any]:
    """Return the generators among the attributes of these objects, each once.

    A generator is one of torch, NumPy or Python.
    """
    values = [value for owner in owners for value in getattr(owner, "__dict__", {}).values()]
    # A `SystemRandom` has no state.
    generators = {
        id(value): value
        for value in values
        if isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom)
    }
    return list(generators.values())


def record_random_state(generators: Sequence[Any] = ()) -> list[Any]:
    """Return the states of the global generators and of further generators.

    The global generators are those of torch, NumPy and Python. The states only contain
    tensors, numbers and strings, so a checkpoint with them can be read with
    ``weights_only=True``.

    Args:
        generators: generators of any of these kinds, such as those of samplers or of a
            CUDA device.

    >>> state = record_random_state()
    >>> drawn = torch.rand(()), np.random.rand(), random.random()
    >>> restore_random_state(state)
    >>> (torch.rand(()), np.random.rand(), random.random()) == drawn
    True
    """
    return [_state_of(generator) for generator in (*GLOBAL_GENERATORS, *generators)]


def restore_random_state(recorded: Sequence[Any], generators: Sequence[Any] = ()) -> None:
    """Restore the states that :func:`record_random_state` returned.

    Generators beyond those that were recorded are left as they are.
    """
    for generator, state in zip((*GLOBAL_GENERATORS, *generators), recorded, strict=False):
        _set_state(generator, state)


def keys_of(generators: Iterable[Any]) -> list[int]:
    """Return a number for each generator, which tells how it was seeded.

    For a generator of torch it is the seed, regardless of later draws, because torch
    draws the seeds of workers from a loader's generator.
    """
    return [
        each.initial_seed()
        if isinstance(each, torch.Generator)
        else zlib.crc32(repr(_state_of(each)).encode())
        for each in generators
    ]


def _state_of(generator: Any) -> Any:
    """Return a state; that of a global generator as tensors, numbers and strings."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        state: Any = generator.get_state()
        return [state[0], state[1].tolist(), *state[2:]]  # an array is not a plain value
    return generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


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
        mix(seed, epoch, rank, process, generator) for generator in range(3)
    )
    random.seed(for_python)
    np.random.seed([for_numpy % 2**32, for_numpy >> 32])  # NumPy takes 32 bits at a time
    torch.manual_seed(for_torch)


@contextmanager
def seeded(seed: int, *owners: object, keys: Sequence[int] = ()) -> Iterator[None]:
    """Give each generator its own seed within the block, and restore all afterwards.

    These are the global generators of Python, NumPy and torch (CPU), and those among
    the owners' attributes. If ``keys`` are given, as by :func:`keys_of`, generators
    that were seeded in the same way get the same seed.

    >>> with seeded(1):
    ...     first = random.random()
    >>> with seeded(1):
    ...     print(random.random() == first)
    True
    """
    others = generators_of(*owners)
    states = record_random_state(others)
    # Generators without a key differ only in their number.
    pairs = zip_longest((*GLOBAL_GENERATORS, *others), keys, fillvalue=0)
    for number, (generator, key) in enumerate(pairs):
        _seed(generator, mix(seed, number, key))
    try:
        yield
    finally:
        restore_random_state(states, others)


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = type(generator.bit_generator)(seed).state
    else:
        generator.seed(seed % 2**32)
