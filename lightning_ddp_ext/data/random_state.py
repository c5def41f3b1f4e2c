"""Record the states of random number generators, and restore them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def record_random_state(
    *, device: torch.device | None = None, generators: Sequence[torch.Generator] = ()
) -> dict[str, Any]:
    """Return the states of the global generators of Python, NumPy and torch, and of further generators.

    The states are made of tensors and numbers alone, so that a checkpoint which holds them can be read with
    ``weights_only=True``.

    Args:
        device: this rank's device; the generator of a CUDA device is recorded as well.
        generators: further generators, such as those of samplers.

    >>> state = record_random_state()
    >>> drawn = torch.rand(()), np.random.rand(), random.random()
    >>> restore_random_state(state)
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


def restore_random_state(
    state: Mapping[str, Any], *, device: torch.device | None = None, generators: Sequence[torch.Generator] = ()
) -> None:
    """Restore what :func:`record_random_state` returned, where it had the same arguments.

    A state of a CUDA generator is left out where ``device`` is another one.
    """
    random.setstate((3, tuple(state["python_words"].tolist()), state["python_gauss"]))
    np.random.set_state(("MT19937", state["numpy_words"].cpu().numpy().astype(np.uint32), *state["numpy_rest"]))
    torch.set_rng_state(state["torch_bytes"].cpu())
    if state["cuda_bytes"] is not None and device is not None and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda_bytes"].cpu(), device)
    for generator, own in zip(generators, state["generators"], strict=False):
        generator.set_state(own.cpu())


@contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore after the block the random states of Python, NumPy and torch on CPU before it."""
    state = record_random_state()
    try:
        yield
    finally:
        restore_random_state(state)
