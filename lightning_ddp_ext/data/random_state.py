"""Record, restore and seed the states of random number generators."""

from __future__ import annotations

import hashlib
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class _Access:
    """How the generators of one class are read, restored and seeded.

    Attributes:
        state: returns a state; that of a global generator contains only tensors, numbers
            and strings.
        restore: sets such a state.
        seed: seeds a generator with a 64-bit number.
    """

    state: Callable[[Any], Any]
    restore: Callable[[Any, Any], object]
    seed: Callable[[Any, int], object]


def _state_of_legacy(generator: np.random.RandomState) -> Any:
    state = generator.get_state()
    if isinstance(state, dict):  # the user has replaced MT19937
        return state
    # An array is not a plain value.
    return [each.tolist() if isinstance(each, np.ndarray) else each for each in state]


def _set_bits(generator: np.random.Generator, state: Any) -> None:
    generator.bit_generator.state = state


# The classes have no common interface; only this table distinguishes them. Two of them
# get 32 bits of a seed, because a ``RandomState`` takes no more.
_ACCESS: dict[type, _Access] = {
    torch.Generator: _Access(
        state=lambda generator: generator.get_state(),
        restore=lambda generator, state: generator.set_state(state.cpu()),
        seed=lambda generator, seed: generator.manual_seed(seed),
    ),
    random.Random: _Access(
        state=lambda generator: generator.getstate(),
        restore=lambda generator, state: generator.setstate(state),
        seed=lambda generator, seed: generator.seed(seed % 2**32),
    ),
    np.random.RandomState: _Access(
        state=_state_of_legacy,
        restore=lambda generator, state: generator.set_state(state),
        seed=lambda generator, seed: generator.seed(seed % 2**32),
    ),
    np.random.Generator: _Access(
        state=lambda generator: generator.bit_generator.state,
        restore=_set_bits,
        # It has no method for this, so it gets the state of a new one of its class.
        seed=lambda generator, seed: _set_bits(
            generator, type(generator.bit_generator)(seed).state
        ),
    ),
}
# The global generators of `torch`, `numpy.random` and `random`. The last two have no
# public names, but functions of these modules are their methods.
GLOBAL_GENERATORS: tuple[Any, ...] = (
    torch.default_generator,
    np.random.get_state.__self__,  # type: ignore[attr-defined]
    random.getstate.__self__,  # type: ignore[attr-defined]
)


def _access_to(generator: object) -> _Access:
    return next(access for kind, access in _ACCESS.items() if isinstance(generator, kind))


def generators_of(*owners: object) -> list[Any]:
    """Return the generators among the attributes of these objects, each once.

    A generator is one of torch, NumPy or Python.
    """
    generators = {
        id(value): value
        for owner in owners
        for value in getattr(owner, "__dict__", {}).values()
        # A `SystemRandom` has no state.
        if isinstance(value, tuple(_ACCESS)) and not isinstance(value, random.SystemRandom)
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
    return [_access_to(each).state(each) for each in (*GLOBAL_GENERATORS, *generators)]


def restore_random_state(recorded: Sequence[Any], generators: Sequence[Any] = ()) -> None:
    """Restore the states that :func:`record_random_state` returned.

    Generators beyond those that were recorded are left as they are.
    """
    for generator, state in zip((*GLOBAL_GENERATORS, *generators), recorded, strict=False):
        _access_to(generator).restore(generator, state)


def keys_of(generators: Iterable[Any]) -> list[int]:
    """Return a number for each generator, which tells how it was seeded.

    For a generator of torch it is the seed, regardless of later draws, because torch
    draws the seeds of workers from a loader's generator.
    """
    return [
        each.initial_seed()
        if isinstance(each, torch.Generator)
        else zlib.crc32(repr(_access_to(each).state(each)).encode())
        for each in generators
    ]


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
    the owners' attributes. If ``keys`` are given, one for each of them in this order, as
    by :func:`keys_of`, processes with equal keys give the generators equal seeds.

    >>> with seeded(1):
    ...     first = random.random()
    >>> with seeded(1):
    ...     print(random.random() == first)
    True
    """
    others = generators_of(*owners)
    states = record_random_state(others)
    for number, generator in enumerate((*GLOBAL_GENERATORS, *others)):
        # Generators without a key differ only in their number.
        key = keys[number] if number < len(keys) else 0
        _access_to(generator).seed(generator, mix(seed, number, key))
    try:
        yield
    finally:
        restore_random_state(states, others)
