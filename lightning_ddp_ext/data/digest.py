"""What is in a batch, in a few bytes: ranks compare these to find out whether they read the same data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_DEEPEST = 12


def digest(batch: Any) -> str | None:
    """A fingerprint of all tensors, arrays, numbers and texts in ``batch``, in whatever structure they are.

    Two batches have the same one if, and practically only if, all of these are equal, in the same order, with types and
    shapes. Never raises: what it cannot read it leaves out.

    Args:
        batch: tensors of any shape and device, arrays, numbers, texts, ``None``; sequences, mappings and objects with
            attributes of these, at most 12 deep.

    Returns:
        32 hexadecimal digits; ``None`` where nothing in the batch can be told apart.

    >>> digest({"x": torch.zeros(2), "y": 1}) == digest({"x": torch.zeros(2), "y": 1})
    True
    >>> digest([torch.zeros(2)]) == digest([torch.zeros(3)])
    False
    >>> digest([None, object()]) is None
    True
    """
    contents = hashlib.blake2b(digest_size=16)
    has_content = False
    for label, content in _leaves(batch, 0, {}):
        has_content |= len(content) > 0
        contents.update(f"{label}:{len(content)};".encode())
        contents.update(content)
    return contents.hexdigest() if has_content else None


def same_on(digests: Sequence[str | None]) -> list[list[int]]:
    """Which ranks have the same: groups of two or more, ascending; ``None`` equals nothing.

    >>> same_on(["a", "b", None, "a", None])
    [[0, 3]]
    """
    ranks_with: dict[str, list[int]] = {}
    for rank, each in enumerate(digests):
        if each is not None:
            ranks_with.setdefault(each, []).append(rank)
    return [ranks for ranks in ranks_with.values() if len(ranks) > 1]


def _leaves(value: Any, depth: int, seen: dict[int, Any]) -> Iterator[tuple[str, bytes | memoryview]]:
    try:
        leaf = _leaf(value)
        parts = _parts(value) if leaf is None and depth < _DEEPEST and id(value) not in seen else ()
    except Exception:  # whatever objects of the user's own do when they are looked at
        leaf, parts = None, ()
    if leaf is not None:
        yield leaf
        return
    seen[id(value)] = value
    yield type(value).__qualname__, b""
    for part in parts:
        yield from _leaves(part, depth + 1, seen)


def _leaf(value: Any) -> tuple[str, bytes | memoryview] | None:
    if isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        return type(value).__name__, repr(value).encode(errors="surrogatepass")
    if isinstance(value, Tensor):
        data = value.detach().to_dense().cpu().contiguous().reshape(-1).view(torch.uint8)
        return f"{value.dtype}{tuple(value.shape)}", data.numpy().data
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype}{value.shape}", np.ascontiguousarray(value).tobytes()
    return None


def _parts(value: Any) -> Sequence[Any]:
    if isinstance(value, (list, tuple)):
        return value
    if isinstance(value, np.ndarray):
        return value.ravel().tolist()
    if isinstance(value, type):
        return ()
    named = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    return [part for item in named.items() for part in item]
