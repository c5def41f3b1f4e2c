"""Record the states of random number generators, and restore them."""

from __future__ import annotations

import ctypes
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# The generators from which the modules `torch`, `numpy.random` and `random` draw.
_GLOBAL: tuple[Any, ...] = (torch.default_generator, np.random.get_state.__self__, random.getstate.__self__)  # type: ignore[attr-defined]


def generators_of(*owners: object) -> list[Any]:
    """Return the generators of torch, NumPy and Python that are attributes of these objects, each once."""
    values = [each for owner in owners for each in getattr(owner, "__dict__", {}).values()]
    found = {id(each): each for each in values if isinstance(each, _KINDS)}
    return [each for each in found.values() if not isinstance(each, random.SystemRandom)]  # which has no state


def record_random_state(generators: Sequence[Any] = ()) -> list[Any]:
    """Return the states of the global generators of torch, NumPy and Python, and of further generators.

    The states are made of tensors, numbers and strings alone, so that a checkpoint which holds them can be read with
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
    """Restore what :func:`record_random_state` returned; a generator of a different kind than then is left alone."""
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


class RandomStateBytes:
    """Reads random states as bytes, fast enough for each step: Python's and NumPy's only where they have changed.

    HACK: to read these takes 20 to 60 µs, so that their objects' memory tells whether they have changed. Where a draw
    does not change it, they are read each time.
    """

    def __init__(self) -> None:
        legacy, python = np.random.RandomState(0), random.Random(0)
        self._shows_draws = _shows(legacy, legacy.randn) and _shows(python, lambda: python.gauss(0, 1))
        self._known: dict[int, tuple[Any, bytes]] = {}  # by the generator's id: its memory and its state

    def read(self, generators: Sequence[Any] = ()) -> bytes:
        """Return the states as bytes, for :func:`random_state_in`."""
        own: Any = torch.default_generator.get_state().numpy()
        further = [pickle.dumps(_states_of(*generators))] if generators else []
        return pickle.dumps([own.tobytes(), *map(self._read, _GLOBAL[1:]), *further])

    def _read(self, generator: Any) -> bytes:
        memory = _memory_of(generator) if self._shows_draws else None
        known, state = self._known.get(id(generator), (None, b""))
        if memory is None or memory != known:
            state = pickle.dumps(_states_of(generator))
            self._known[id(generator)] = memory, state
        return state


def random_state_in(content: bytes) -> list[Any]:
    """Return the recorded states as ``record_random_state`` returns them."""
    own, *others = pickle.loads(content)
    state = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    return [(_kind_of(torch.default_generator), state), *(each for other in others for each in pickle.loads(other))]


def _memory_of(generator: Any) -> Any:
    """Return the memory of a generator of Python or NumPy, without references; ``None`` for one of another kind."""
    header = object.__basicsize__
    memory = ctypes.string_at(id(generator) + header, type(generator).__basicsize__ - header)
    if isinstance(generator, random.Random):
        return memory, generator.gauss_next  # type: ignore[attr-defined]
    bits = generator._bit_generator
    words = 4 * (624 + 1)
    return (memory, ctypes.string_at(bits.ctypes.state_address, words)) if type(bits) is np.random.MT19937 else None


def _shows(generator: Any, draw: Callable[[], object]) -> bool:
    """Whether each draw changes the memory, including a draw of the spare normal number."""
    return len({(draw(), _memory_of(generator))[1] for _ in range(3)}) == 3


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
    """Return a state of NumPy's with lists in place of arrays, which NumPy also accepts."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value
