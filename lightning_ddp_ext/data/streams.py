"""Mix seeds, and run code with seeded random generators."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from lightning_ddp_ext.errors import SamplerError


def mix(*words: int) -> int:
    """Mix whole numbers of any size into one 64-bit seed; their order, number and grouping all count.

    Raises:
        SamplerError: a word is negative.

    >>> mix(0, 1) == mix(1, 0), mix(0) == mix(0, 0)
    (False, False)
    """
    if any(word < 0 for word in words):
        raise SamplerError(f"seeds and epochs must not be negative (got {words}); count from 0")
    text = ",".join(f"{word:x}" for word in words)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class Streams:
    """Seeded states of the generators of this process and of ``owners``, set inside a block of ``running()`` alone.

    These are the global generators of Python, NumPy and torch (CPU), and every ``torch.Generator``, NumPy ``Generator``
    and ``RandomState`` and ``random.Random`` that is an attribute of an owner, each with a stream of its own. A block
    continues where the block before has ended, whatever happened to the generators in between.

    >>> with Streams(1).running():
    ...     first = random.random()
    >>> with Streams(1).running():
    ...     print(random.random() == first)
    True
    """

    def __init__(self, seed: int, *owners: object) -> None:
        self._generators: list[_Generator] = []
        self._states: list[Any] = []
        known: set[int] = set()
        for words, found in _named_generators(owners):
            generator = None if id(found) in known else _generator(found)
            known.add(id(found))
            if generator is not None:
                self._generators.append(generator)
                self._states.append(generator.fresh(mix(seed, *words)))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Swap our states in for the block, and the states from outside back in after it."""
        outside = [generator.get() for generator in self._generators]
        self._put(self._states)
        try:
            yield
        finally:
            self._states = [generator.get() for generator in self._generators]
            self._put(outside)

    def _put(self, states: list[Any]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.put(state)


def with_wrapped(sampler: object) -> list[object]:
    """Return the sampler, and the samplers that are its attributes, at any depth."""
    found = [sampler]
    for owner in found:
        for name, value in sorted(_attributes(owner).items()):
            if _is_sampler(name, value) and not any(value is other for other in found):
                found.append(value)
    return found


@dataclass(frozen=True)
class _Generator:
    get: Callable[[], Any]
    put: Callable[[Any], Any]
    fresh: Callable[[int], Any]  # the state of such a generator with that seed


def _named_generators(owners: tuple[object, ...]) -> Iterator[tuple[tuple[int, ...], object]]:
    """Possible generators, each with numbers that identify it, whatever others there are."""
    yield (0, 0), random
    yield (0, 1), np.random
    yield (0, 2), torch.default_generator
    for number, owner in enumerate(owners, start=1):
        for name, value in _attributes(owner).items():
            yield (number, int.from_bytes(name.encode(), "little")), value


def _attributes(owner: object) -> dict[str, Any]:
    found = dict(getattr(owner, "__dict__", {}))
    found.setdefault("generator", getattr(owner, "generator", None))
    return found


def _is_sampler(name: str, value: object) -> bool:
    return isinstance(value, Sampler) or (name in ("sampler", "batch_sampler") and hasattr(value, "__iter__"))


def _generator(found: Any) -> _Generator | None:
    if found is random or (isinstance(found, random.Random) and not isinstance(found, random.SystemRandom)):
        return _Generator(found.getstate, found.setstate, lambda seed: random.Random(seed).getstate())
    if found is np.random or isinstance(found, np.random.RandomState):
        return _Generator(lambda: found.get_state(legacy=False), found.set_state, _fresh_bits(found.get_state(False)))
    if isinstance(found, np.random.Generator):
        bits = found.bit_generator
        return _Generator(lambda: bits.state, lambda state: setattr(bits, "state", state), _fresh_bits(bits.state))
    if isinstance(found, torch.Generator):
        return _Generator(found.get_state, found.set_state, lambda seed: _fresh_torch(found, seed))
    return None


def _fresh_bits(state: Any) -> Callable[[int], Any]:
    kind = getattr(np.random, state["bit_generator"])
    return lambda seed: kind(seed).state


def _fresh_torch(like: torch.Generator, seed: int) -> torch.Tensor:
    return torch.Generator(like.device).manual_seed(seed).get_state()
