"""Compute digests of batches, by which ranks find out whether they read the same data."""

from __future__ import annotations

import copyreg
import hashlib
import io
import pickle
from typing import Any

import torch
from torch import Tensor


def digest(batch: Any) -> str | None:
    """Return a digest of a batch; batches that differ in any part have different ones.

    Returns:
        32 hexadecimal digits; ``None`` where the batch cannot be pickled. Never raises.

    >>> digest({"x": torch.zeros(2), "y": 1}) == digest({"x": torch.zeros(2), "y": 1})
    True
    >>> digest([torch.zeros(2)]) == digest([torch.zeros(3)])
    False
    """
    contents = io.BytesIO()
    pickler = pickle.Pickler(contents)
    pickler.dispatch_table = {**copyreg.dispatch_table, Tensor: _reduce_tensor}
    try:
        pickler.dump(batch)
    except Exception:  # a missed warning rather than a failed run, whatever objects of the user's own do
        return None
    return hashlib.blake2b(contents.getbuffer(), digest_size=16).hexdigest()


def _reduce_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """Reduce a tensor to its type, shape and bytes: torch's own pickles of equal tensors differ."""
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return tuple, ((str(tensor.dtype), tuple(tensor.shape), content),)
