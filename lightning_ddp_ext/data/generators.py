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

from lightning_ddp_ext.errors import ConfigurationError


def mix(*words: int) -> int:
    """Mix whole numbers of any size into one 64-bit seed; their order, number and grouping all count.

    Raises:
        ConfigurationError: a word is negative.

    >>> mix(0, 1) == mix(1, 0), mix(0) == mix(0, 0)
    (False, False)
    """
    if any(word < 0 for word in words):
        raise ConfigurationError(f"seeds and epochs must not be negative (got {words}); count from 0")
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
    and ``RandomState`` and ``random.Random`` that is an attribute of an owner, in whose place stands another one.

    >>> with seeded(1):
    ...     first = random.random()
    >>> with seeded(1):
    ...     print(random.random() == first)
    True
    """
    others: dict[int, object] = {}
    replaced: list[tuple[object, str, object]] = []
    for owner in owners:
        for name, value in getattr(owner, "__dict__", {}).items():
            if id(value) not in others:  # several owners may share one
                others[id(value)] = _seeded_like(value, mix(seed, 3, len(replaced)))
            if others[id(value)] is not None:
                replaced.append((owner, name, value))
    with keep_random():
        random.seed(mix(seed, 0))
        np.random.seed(mix(seed, 1) % 2**32)
        torch.default_generator.manual_seed(mix(seed, 2))
        try:
            for owner, name, value in replaced:
                setattr(owner, name, others[id(value)])
            yield
        finally:
            for owner, name, value in replaced:
                setattr(owner, name, value)


def _seeded_like(value: object, seed: int) -> object | None:
    """Another generator of the same kind; ``None`` for what is no generator, and for torch's global one."""
    if isinstance(value, torch.Generator) and value is not torch.default_generator:
        return torch.Generator(value.device).manual_seed(seed)
    if isinstance(value, np.random.Generator):
        return np.random.Generator(type(value.bit_generator)(seed))
    if isinstance(value, np.random.RandomState):
        return np.random.RandomState(seed % 2**32)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return random.Random(seed)
    return None


def with_wrapped(sampler: object) -> list[object]:
    """Return the sampler, and the samplers that are its attributes, at any depth."""
    found = [sampler]
    for owner in found:
        for name, value in sorted(getattr(owner, "__dict__", {}).items()):
            if _is_sampler(name, value) and not any(value is other for other in found):
                found.append(value)
    return found


def _is_sampler(name: str, value: object) -> bool:
    return isinstance(value, Sampler) or (name in ("sampler", "batch_sampler") and hasattr(value, "__iter__"))
