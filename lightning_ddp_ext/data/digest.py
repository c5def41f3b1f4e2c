"""Compute digests of batches, by which ranks find out whether they read the same data."""

from __future__ import annotations

import hashlib
import io
import pickle
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override


def digest(batch: Any) -> str | None:
    """Return a digest of a batch; batches that differ in any part have different ones.

    Returns:
        32 hexadecimal digits; ``None`` where the batch holds no tensor, only empty ones, or something that cannot be
        pickled. Never raises.

    >>> digest({"x": torch.zeros(2), "y": 1}) == digest({"x": torch.zeros(2), "y": 1})
    True
    >>> digest([torch.zeros(2)]) == digest([torch.zeros(3)])
    False
    """
    contents = io.BytesIO()
    pickler = _BatchPickler(contents)
    try:
        pickler.dump(batch)
    except Exception:  # a missed warning rather than a failed run, whatever objects of the user's own do
        return None
    return hashlib.blake2b(contents.getbuffer(), digest_size=16).hexdigest() if pickler.has_content else None


class _BatchPickler(pickle.Pickler):
    """Pickles tensors as their type, shape and bytes: torch's own pickles of equal tensors differ."""

    has_content = False

    @override
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        self.has_content |= obj.numel() > 0
        content = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return tuple, ((str(obj.dtype), tuple(obj.shape), content),)
