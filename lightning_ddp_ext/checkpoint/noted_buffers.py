"""Read the buffers of a module as bytes in every step, and restore them."""

from __future__ import annotations

import math
from itertools import accumulate
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_MOST = 1 << 20  # bytes of all noted buffers: noting big ones, such as masks and queues, would take too long


class NotedBuffers:
    """The buffers that checkpoints of a module hold; big ones, and missing ones, are not noted and must not change."""

    def __init__(self, module: nn.Module) -> None:
        saved = [
            (getattr(buffer, "nbytes", math.inf), owner._buffers, name)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if name not in owner._non_persistent_buffers_set
        ]
        saved.sort(key=itemgetter(0))
        noted = sum(total <= _MOST for total in accumulate(size for size, *_ in saved))
        self._noted, self._others = saved[:noted], saved[noted:]
        self._others_at_first = _versions(self._others)
        self._versions: list[Any] = []  # versions of the noted buffers at the last read

    def read(self, *, even_if_same: bool) -> bytes:
        """Return the noted buffers as bytes; empty if none has changed since the last call.

        A forward pass may change running statistics undetected, so use ``even_if_same`` after one.
        """
        versions = _versions(self._noted)
        if versions == self._versions and not even_if_same:
            return b""
        self._versions = versions
        views = [each.detach().reshape(-1).view(torch.uint8).cpu() for each in _tensors(self._noted)]
        return torch.cat(views).numpy().tobytes() if views else b""

    def restore(self, content: bytes) -> bool:
        """Restore the noted buffers; return ``False`` if the bytes do not fit or another buffer has changed."""
        buffers = _tensors(self._noted)
        sizes = [each.nbytes for each in buffers]
        if sum(sizes) != len(content):
            return False
        noted = torch.from_numpy(np.frombuffer(content, np.uint8).copy()).split(sizes)
        for buffer, each in zip(buffers, noted, strict=True):
            buffer.copy_(each.clone().view(buffer.dtype).view(buffer.shape))  # a copy is aligned
        return _versions(self._others) == self._others_at_first


def _tensors(saved: list[Any]) -> list[Tensor]:
    return [owner[name] for _, owner, name in saved if owner[name] is not None]


def _versions(saved: list[Any]) -> list[Any]:
    buffers = [owner[name] for _, owner, name in saved]
    return [0 if each is None or each.is_inference() else (each.data_ptr(), each._version) for each in buffers]
