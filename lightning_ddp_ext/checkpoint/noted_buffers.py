"""Read the buffers of a module as bytes in every step, and restore them."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_MOST = 1 << 20  # bytes of all noted buffers: to note big ones, such as masks and queues, would take too long


class NotedBuffers:
    """The buffers that checkpoints of a module hold; big ones, and missing ones, are not noted and must not change.

    Args:
        module: the module with the buffers.

    Attributes:
        are_any: whether there are buffers to note.
    """

    def __init__(self, module: nn.Module) -> None:
        saved: list[Any] = [
            (owner._buffers, name)
            for owner in module.modules()
            for name in owner._buffers
            if name not in owner._non_persistent_buffers_set
        ]
        saved.sort(key=lambda each: math.inf if each[0][each[1]] is None else each[0][each[1]].nbytes)
        sums = accumulate(math.inf if owner[name] is None else owner[name].nbytes for owner, name in saved)
        noted = sum(size <= _MOST for size in sums)
        self._small, self._others = saved[:noted], saved[noted:]
        self.are_any = bool(self._small)
        self._others_at_first = _versions(self._others)
        self._versions: list[Any] = []  # of the small ones when they were last read
        self._pointers: list[int] = []
        self._views: list[Tensor] = []

    def read(self, *, even_if_same: bool) -> bytes:
        """Return the small buffers as bytes; empty if none changed since the last call.

        Args:
            even_if_same: whether they may have changed undetected, as running statistics do in a forward pass.
        """
        buffers = _tensors(self._small)
        versions = _versions(self._small)
        if versions == self._versions and not even_if_same:
            return b""
        self._versions = versions
        pointers = [each.data_ptr() for each in buffers]
        if pointers != self._pointers:  # the first call, or other tensors
            self._views = [each.detach().reshape(-1).view(torch.uint8) for each in buffers]
            has_copies = any(not each.is_contiguous() for each in buffers)
            self._pointers = [] if has_copies else pointers
        return torch.cat(self._views).cpu().numpy().tobytes() if buffers else b""

    def restore(self, content: bytes) -> bool:
        """Restore the noted buffers; return whether these are all that changed."""
        buffers = _tensors(self._small)
        sizes = [each.nbytes for each in buffers]
        if sum(sizes) != len(content):
            return False
        noted = torch.from_numpy(np.frombuffer(content, np.uint8).copy()).split(sizes)
        for buffer, each in zip(buffers, noted, strict=True):
            buffer.copy_(each.clone().view(buffer.dtype).view(buffer.shape))  # a copy is aligned
        return _versions(self._others) == self._others_at_first


def _tensors(owners: list[Any]) -> list[Tensor]:
    return [owner[name] for owner, name in owners if owner[name] is not None]


def _versions(owners: list[Any]) -> list[Any]:
    buffers = [owner[name] for owner, name in owners]
    return [0 if each is None or each.is_inference() else (each.data_ptr(), each._version) for each in buffers]
