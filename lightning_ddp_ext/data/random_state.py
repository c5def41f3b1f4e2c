"""Record and restore the states of random number generators."""

from __future__ import annotations

import ctypes
import io
import pickle
import random
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# The global generators of `torch`, `numpy.random` and `random`.
_GLOBAL: tuple[Any, ...] = (torch.default_generator, np.random.get_state.__self__, random.getstate.__self__)  # type: ignore[attr-defined]


def generators_of(*owners: object) -> list[Any]:
    """Return the generators of torch, NumPy and Python that are attributes of these objects, each once."""
    values = [each for owner in owners for each in getattr(owner, "__dict__", {}).values()]
    found = {id(each): each for each in values if isinstance(each, _KINDS)}
    return [each for each in found.values() if not isinstance(each, random.SystemRandom)]  # it has no state


def record_random_state(generators: Sequence[Any] = ()) -> list[Any]:
    """Return the states of the global generators of torch, NumPy and Python, and of further generators.

    The states only contain tensors, numbers and strings, so a checkpoint with them can be read with
    ``weights_only=True``.

    Args:
        generators: generators of any of these kinds, such as those of samplers or of a CUDA device.

    >>> state = record_random_state()
    >>> drawn = torch.rand(()), np.random.rand(), random.random()
    >>> restore_random_state(state)
    >>> (torch.rand(()), np.random.rand(), random.random()) == drawn
    True
    """
    return _states_of(*_GLOBAL, *generators)


def restore_random_state(recorded: Sequence[Any], generators: Sequence[Any] = ()) -> None:
    """Restore what :func:`record_random_state` returned; skip a generator whose kind has changed since then."""
    for generator, (kind, state) in zip((*_GLOBAL, *generators), recorded, strict=False):
        if kind == _kind_of(generator):
            _set_state(generator, state)


@contextmanager
def preserve_random_state(generators: Sequence[Any] = ()) -> Iterator[None]:
    """Restore the current states after the block."""
    state = record_random_state(generators)
    try:
        yield
    finally:
        restore_random_state(state, generators)


def random_state_bytes(generators: Sequence[Any] = ()) -> list[Any]:
    """Return the states of :func:`record_random_state` in pieces; :func:`random_state_in` takes them joined.

    HACK: this copies the memory of NumPy's and Python's objects, because ``record_random_state`` takes 60 µs.
    """
    memory = [ctypes.string_at(id(each), each.__sizeof__()) for each in _viewed()]
    further = pickle.dumps((_GLOBAL[2].gauss_next, _states_of(*generators)))
    return [torch.default_generator.get_state().numpy().data, *memory, further]


def random_state_in(content: bytes) -> list[Any]:
    """Convert joined :func:`random_state_bytes`, of a known memory layout, to the form of ``record_random_state``."""
    own, file = torch.default_generator.get_state(), io.BytesIO(content)
    file.readinto(own.numpy().data)
    numpy, bits, python = (file.read(each.__sizeof__()).ljust(4096) for each in _viewed())  # other kinds may be shorter
    following, further = pickle.load(file)
    # The spare normal number, and 624 words with the index of the next one; in Python the index comes first.
    has_gauss, gauss = struct.unpack_from("=i4xd", numpy, 80)
    *key, pos = struct.unpack_from("=624Ii", bits, 104)
    index, *words = struct.unpack_from("=625I", python, object.__basicsize__)
    twister = {"bit_generator": "MT19937", "state": {"key": key, "pos": pos}, "has_gauss": has_gauss, "gauss": gauss}
    states = (own, twister, (3, (*words, index), following))
    return [*zip(map(_kind_of, _GLOBAL), states, strict=True), *further]


def _viewed() -> tuple[Any, ...]:
    return _GLOBAL[1], _GLOBAL[1]._bit_generator, _GLOBAL[2]


def _states_of(*generators: Any) -> list[Any]:
    return [(_kind_of(each), _state_of(each)) for each in generators]


def _kind_of(generator: Any) -> str:
    owner = getattr(generator, "bit_generator", generator)
    return f"{type(owner).__name__} {getattr(generator, 'device', '')}".partition(":")[0].strip()


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    is_legacy = isinstance(generator, np.random.RandomState)
    return _plain(generator.get_state(legacy=False) if is_legacy else generator.bit_generator.state)


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state.cpu())
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _plain(value: Any) -> Any:
    """Return a NumPy state with lists in place of arrays, which NumPy also accepts."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value
