"""Seed, save and restore random number generators."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Sampler

from lightning_ddp_ext.errors import SamplerError

_KINDS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)


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


# The generators of this process, for a checkpoint.


def take_random(device: torch.device | None = None, *, generators: Sequence[torch.Generator] = ()) -> dict[str, Any]:
    """Return the states of the generators of Python, NumPy and torch, and of ``device`` if it is a CUDA one.

    They are made of tensors and numbers alone, so that a checkpoint which holds them can be read with
    ``weights_only=True``.

    Args:
        device: this rank's.
        generators: further ones.

    >>> state = take_random()
    >>> drawn = torch.rand(()), np.random.rand(), random.random()
    >>> restore_random(state)
    >>> (torch.rand(()), np.random.rand(), random.random()) == drawn
    True
    """
    _, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state()
    _, key, position, has_gauss, numpy_gauss = numpy_state
    is_cuda = device is not None and device.type == "cuda"
    return {
        "python_words": torch.tensor(words),
        "python_gauss": gauss,
        "numpy_words": torch.from_numpy(key.astype(np.int64)),
        "numpy_rest": (int(position), int(has_gauss), float(numpy_gauss)),
        "torch_bytes": torch.get_rng_state(),
        "cuda_bytes": torch.cuda.get_rng_state(device) if is_cuda else None,  # type: ignore[arg-type]
        "generators": [generator.get_state() for generator in generators],
    }


def restore_random(
    state: Mapping[str, Any], device: torch.device | None = None, *, generators: Sequence[torch.Generator] = ()
) -> None:
    """Restore what :func:`take_random` returned; the CUDA generator if ``device`` is a CUDA one, too."""
    random.setstate((3, tuple(state["python_words"].tolist()), state["python_gauss"]))
    np.random.set_state(("MT19937", state["numpy_words"].cpu().numpy().astype(np.uint32), *state["numpy_rest"]))
    torch.set_rng_state(state["torch_bytes"].cpu())
    if state["cuda_bytes"] is not None and device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda_bytes"].cpu(), device)
    for generator, own in zip(generators, state.get("generators", ()), strict=False):
        generator.set_state(own.cpu())


@contextmanager
def keep_random() -> Iterator[None]:
    """Restore the generators of Python, NumPy and torch after the block."""
    state = take_random()
    try:
        yield
    finally:
        restore_random(state)


# The generators that samplers draw from.


@contextmanager
def seeded(seed: int, *owners: object) -> Iterator[None]:
    """Seed all generators in the block, each with a stream of its own, and restore them after it.

    These are the global generators of Python, NumPy and torch (CPU), and every ``torch.Generator``, NumPy ``Generator``
    and ``RandomState`` and ``random.Random`` that is an attribute of an owner.

    >>> with seeded(1):
    ...     first = random.random()
    >>> with seeded(1):
    ...     print(random.random() == first)
    True
    """
    generators = {id(found): (words, found) for words, found in reversed([*_named_generators(owners)])}
    states = [(found, _state_of(found)) for _, found in generators.values()]
    for words, found in generators.values():
        _set_state(found, _state_from(found, mix(seed, *words)))
    try:
        yield
    finally:
        for found, state in states:
            _set_state(found, state)


def with_wrapped(sampler: object) -> list[object]:
    """Return the sampler, and the samplers that are its attributes, at any depth."""
    found = [sampler]
    for owner in found:
        for name, value in sorted(_attributes(owner).items()):
            if _is_sampler(name, value) and not any(value is other for other in found):
                found.append(value)
    return found


def _is_sampler(name: str, value: object) -> bool:
    return isinstance(value, Sampler) or (name in ("sampler", "batch_sampler") and hasattr(value, "__iter__"))


def _named_generators(owners: tuple[object, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Yield generators, each with numbers that identify it, whatever others there are."""
    yield (0, 0), random
    yield (0, 1), np.random
    yield (0, 2), torch.default_generator
    for number, owner in enumerate(owners, start=1):
        for name, value in _attributes(owner).items():
            if isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom):
                yield (number, int.from_bytes(name.encode(), "little")), value


def _attributes(owner: object) -> dict[str, Any]:
    return {"generator": getattr(owner, "generator", None), **getattr(owner, "__dict__", {})}


def _state_of(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    if generator is np.random or isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.get_state() if isinstance(generator, torch.Generator) else generator.getstate()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(state, tuple):
        generator.setstate(state)
    else:
        generator.set_state(state)


def _state_from(generator: Any, seed: int) -> Any:
    """The state that a generator of this kind has after it was seeded."""
    if isinstance(generator, torch.Generator):
        return torch.Generator(generator.device).manual_seed(seed).get_state()
    state = _state_of(generator)
    if isinstance(state, tuple):
        return random.Random(seed).getstate()
    return getattr(np.random, state["bit_generator"])(seed).state
