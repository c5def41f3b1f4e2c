"""Record the states of random number generators, and restore them."""

from __future__ import annotations

import ctypes
import pickle
import random
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_KINDS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# The generators from which the modules `torch`, `numpy.random` and `random` draw.
_GLOBAL: tuple[Any, ...] = (torch.default_generator, np.random.get_state.__self__, random.getstate.__self__)  # type: ignore[attr-defined]

_VIEWED, _PICKLED = b"v", b"p"  # how the states of NumPy and Python were read
# In the memory of Mersenne Twisters: 624 words with the index of the next one, behind them in NumPy and before them in
# Python; and in NumPy's whether there is a spare normal number, and the number.
_WORDS, _SPARE, _SPARE_AT, _GAUSS = 4 * 625, 16, 80, struct.Struct("=?d")
_VIEWED_STATES = struct.Struct("=625Ii4xd625I?d")


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
    """Reads random states as bytes, in some 5 µs: Python and NumPy themselves take 20 and 30 more.

    HACK: it views the Mersenne Twisters in the memory of Python's and NumPy's objects. The views of new objects are
    compared with their states first; if they differ, states are pickled instead.
    """

    def __init__(self) -> None:
        numpy, python = np.random.RandomState(0), random.Random(0)
        numpy.randn(), python.gauss(0, 1)  # both keep a spare number
        viewed = b"".join([*_views_of(numpy, python), _spare_of(python)])
        self._is_viewable = _states_in(viewed) == _states_of(numpy, python)
        self._bits: Any = None  # the generator behind NumPy's functions
        self._views: list[memoryview] = []

    def read(self, generators: Sequence[Any] = ()) -> list[Any]:
        """Return the states in pieces, which are joined for :func:`random_state_in`."""
        own = torch.default_generator.get_state().numpy().data
        numpy, python = _GLOBAL[1:]
        if numpy._bit_generator is not self._bits:
            self._bits = numpy._bit_generator
            is_viewed = self._is_viewable and type(self._bits) is np.random.MT19937
            self._views = _views_of(numpy, python) if is_viewed else []
        if not self._views:
            return [_PICKLED, own, pickle.dumps(_states_of(numpy, python, *generators))]
        further = pickle.dumps(_states_of(*generators)) if generators else b""
        return [_VIEWED, own, *self._views, _spare_of(python), further]


def random_state_in(content: bytes) -> list[Any]:
    """Return the recorded states as ``record_random_state`` returns them."""
    begin, end = len(_VIEWED), len(_VIEWED) + torch.default_generator.get_state().nbytes
    own, others = torch.frombuffer(bytearray(content[begin:end]), dtype=torch.uint8), content[end:]
    known = _states_in(others) if content.startswith(_VIEWED) else pickle.loads(others)
    return [(_kind_of(torch.default_generator), own), *known]


def _views_of(numpy: Any, python: Any) -> list[memoryview]:
    addresses = {
        numpy._bit_generator.ctypes.state_address: _WORDS,
        id(numpy) + _SPARE_AT: _SPARE,
        id(python) + object.__basicsize__: _WORDS,
    }
    return [memoryview((ctypes.c_char * size).from_address(each)).cast("B") for each, size in addresses.items()]


def _spare_of(python: Any) -> bytes:
    return _GAUSS.pack(python.gauss_next is not None, python.gauss_next or 0.0)


def _states_in(content: bytes) -> list[Any]:
    """Return the states that were viewed, and those pickled behind them."""
    values = _VIEWED_STATES.unpack_from(content)
    (*key, pos, has_gauss, gauss), (index, *words, has_next, following) = values[:627], values[627:]
    numpy = {"bit_generator": "MT19937", "state": {"key": key, "pos": pos}, "has_gauss": has_gauss, "gauss": gauss}
    python = 3, (*words, index), following if has_next else None
    further = content[_VIEWED_STATES.size :]
    return [("RandomState", numpy), ("Random", python), *(pickle.loads(further) if further else ())]


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
