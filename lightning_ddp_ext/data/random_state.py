"""Where this process's random number generators are, so that others can go on from there."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RandomState:
    """The state of the global generators of Python, NumPy, torch and one CUDA device.

    It is made of tensors and numbers alone, so that a checkpoint which holds it can be read with ``weights_only=True``.

    >>> state = RandomState.take()
    >>> drawn = torch.rand(3), np.random.rand(), random.random()
    >>> RandomState.from_dict(state.to_dict()).restore()
    >>> bool((torch.rand(3) == drawn[0]).all()), np.random.rand() == drawn[1], random.random() == drawn[2]
    (True, True, True)
    """

    python_words: Tensor
    python_gauss: float | None
    numpy_words: Tensor
    numpy_rest: tuple[int, int, float]
    torch_bytes: Tensor
    cuda_bytes: Tensor | None = None

    @classmethod
    def take(cls, device: torch.device | None = None) -> RandomState:
        """The state as it is now, with that of ``device`` if it is a CUDA one."""
        _, words, gauss = random.getstate()
        numpy_state: Any = np.random.get_state()
        _, key, position, has_gauss, numpy_gauss = numpy_state
        is_cuda = device is not None and device.type == "cuda"
        return cls(
            python_words=torch.tensor(words),
            python_gauss=gauss,
            numpy_words=torch.from_numpy(key.astype(np.int64)),
            numpy_rest=(int(position), int(has_gauss), float(numpy_gauss)),
            torch_bytes=torch.get_rng_state(),
            cuda_bytes=torch.cuda.get_rng_state(device) if is_cuda else None,  # type: ignore[arg-type]
        )

    def restore(self, device: torch.device | None = None) -> None:
        """Put the generators where they were; the CUDA one on ``device``, if it is one and its state is known."""
        random.setstate((3, tuple(self.python_words.tolist()), self.python_gauss))
        np.random.set_state(("MT19937", self.numpy_words.cpu().numpy().astype(np.uint32), *self.numpy_rest))
        torch.set_rng_state(self.torch_bytes.cpu())
        if self.cuda_bytes is not None and device is not None and device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda_bytes.cpu(), device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RandomState) and all(
            torch.equal(mine, theirs) if isinstance(mine, Tensor) and isinstance(theirs, Tensor) else mine == theirs
            for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint can hold."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> RandomState:
        """What :meth:`to_dict` has given."""
        return cls(**{**state, "numpy_rest": tuple(state["numpy_rest"])})


@contextmanager
def kept() -> Iterator[None]:
    """Afterwards the global generators are where they were before, but for CUDA's."""
    state = RandomState.take()
    try:
        yield
    finally:
        state.restore()


def generator_states(generators: Sequence[torch.Generator]) -> list[Tensor]:
    """Where these generators are."""
    return [generator.get_state() for generator in generators]


def set_generators(generators: Sequence[torch.Generator], states: Sequence[Tensor]) -> None:
    """Put generators where others were; those that are not the same number stay as they are."""
    if len(generators) == len(states):
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state.cpu())
