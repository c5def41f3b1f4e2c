"""Read the random states of Python, NumPy and torch out of memory: what ``record_random_state`` does, 20 times faster.

Such a state is bytes, so that it can be written in every step of training to a file that survives this process.
"""

from __future__ import annotations

import array
import ctypes
import pickle
import random
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lightning_ddp_ext.data.random_state import states_of
from lightning_ddp_ext.data.seeding import mix

_WORDS = 624
_PYTHON = struct.Struct(f"=i{_WORDS}I?d")
_NUMPY = struct.Struct(f"={_WORDS}Ii?d")
_UNUSUAL = 1.25e-300  # a number that no memory holds by chance


class RawRandomState:
    """Reads the random states of this process as bytes."""

    def __init__(self) -> None:
        self._python = _memory_of_python()
        self._bit_generator: Any = None
        self._numpy: memoryview | None = None
        self._numpy_gauss = _memory_of_gauss()

    def read(self, generators: Sequence[Any] = ()) -> bytes:
        """Return the states of the global generators, and of further ones."""
        further = [pickle.dumps(states_of(*generators))] if generators else []
        own: Any = torch.default_generator.get_state().numpy()
        return b"".join([*self._of_python(), *self._of_numpy(), own, *further])

    def _of_python(self) -> list[Any]:
        gauss = getattr(random._inst, "gauss_next", None)
        rest = struct.pack("=?d", gauss is not None, gauss or 0.0)
        if self._python is not None:
            return [self._python, rest]
        words = random.getstate()[1]
        return [struct.pack(f"=i{_WORDS}I", words[-1], *words[:-1]), rest]

    def _of_numpy(self) -> list[Any]:
        if self._numpy_gauss is not None:
            current = np.random.mtrand._rand._bit_generator
            if current is not self._bit_generator:
                self._bit_generator, self._numpy = current, _memory_of_numpy(current)
            if self._numpy is not None:
                has_gauss, gauss = self._numpy_gauss
                return [self._numpy, struct.pack("=?d", bool(has_gauss[0]), gauss[0])]
        state: Any = np.random.get_state()
        _, key, position, has_gauss, gauss = state
        return [_NUMPY.pack(*key, position, bool(has_gauss), gauss)]


def decode(raw: bytes) -> list[Any]:
    """Return what ``record_random_state`` would have returned."""
    position, *words, has_gauss, gauss = _PYTHON.unpack_from(raw)
    *key, numpy_position, numpy_has_gauss, numpy_gauss = _NUMPY.unpack_from(raw, _PYTHON.size)
    own, legacy, python = torch.Generator(), np.random.RandomState(0), random.Random()
    python.setstate((3, (*words, position), gauss if has_gauss else None))
    legacy.set_state(("MT19937", np.array(key, np.uint32), numpy_position, int(numpy_has_gauss), numpy_gauss))
    begin = _PYTHON.size + _NUMPY.size
    end = begin + len(own.get_state())
    own.set_state(torch.frombuffer(bytearray(raw[begin:end]), dtype=torch.uint8))
    return [*states_of(own, legacy, python), *(pickle.loads(raw[end:]) if raw[end:] else ())]


def seeded_state(*words: int) -> list[Any]:
    """Return a state that follows from some numbers, for a rank whose own one is lost."""
    seed = mix(*words)
    own = torch.Generator().manual_seed(seed % 2**63)
    return states_of(own, np.random.RandomState(seed % 2**32), random.Random(seed))


# HACK: `get_state` of NumPy takes 40 µs and of Python 15, which is too much for each step, so that the states are found
# in the memory of their objects by what is in them. Where they are not found, the functions are used.


def _memory_of(owner: object) -> memoryview:
    size = type(owner).__basicsize__
    return memoryview((ctypes.c_char * size).from_address(id(owner))).cast("B")


def _memory_of_python() -> memoryview | None:
    *words, position = random.getstate()[1]
    memory = _memory_of(random._inst)
    begin = memory.tobytes().find(struct.pack(f"=i{_WORDS}I", position, *words))
    return memory[begin : begin + 4 * (_WORDS + 1)] if begin >= 0 else None


def _memory_of_numpy(bit_generator: Any) -> memoryview | None:
    state: Any = np.random.get_state()
    kind, key, position, *_ = state
    if kind != "MT19937":
        return None
    address = bit_generator.ctypes.state_address
    memory = memoryview((ctypes.c_char * 4 * (_WORDS + 1)).from_address(address)).cast("B")
    return memory if memory == array.array("I", [*key, position]).tobytes() else None


def _memory_of_gauss() -> tuple[Any, Any] | None:
    """Return where NumPy's global generator keeps whether it has a spare normal number, and that number."""
    probe, globally = np.random.RandomState(0), np.random.mtrand._rand
    if type(globally) is not type(probe):
        return None
    state: Any = probe.get_state()
    probe.set_state((*state[:3], 1, _UNUSUAL))
    begin = _memory_of(probe).tobytes().find(struct.pack("=d", _UNUSUAL))
    flag = slice(begin - 8, begin - 4)  # an int, and four bytes that align the number
    if begin < 8 or _memory_of(probe)[flag].cast("i")[0] != 1:
        return None
    probe.set_state((*state[:3], 0, _UNUSUAL))
    if _memory_of(probe)[flag].cast("i")[0] != 0:
        return None
    memory = _memory_of(globally)
    return memory[flag].cast("i"), memory[begin : begin + 8].cast("d")
