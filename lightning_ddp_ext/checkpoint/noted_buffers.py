"""Read the buffers of a module as bytes in every step, and restore them."""

from __future__ import annotations

from itertools import accumulate
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_ddp_ext.checksum import version_of

_MOST = 1 << 20  # bytes of all noted buffers; noting masks and queues would take too long


class NotedBuffers:
    """The buffers in a module's checkpoints, except big, sparse and missing ones."""

    def __init__(self, module: nn.Module) -> None:
        saved = [
            (buffer.nbytes, owner._buffers, name)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if name not in owner._non_persistent_buffers_set
            if buffer is not None and buffer.layout == torch.strided
        ]
        saved.sort(key=itemgetter(0))
        count = sum(total <= _MOST for total in accumulate(size for size, *_ in saved))
        self._places: list[Any] = [(owner, name) for _, owner, name in saved[:count]]
        self._versions: list[Any] = []  # at the last read

    def tensors(self) -> list[Tensor]:
        """Return the buffers, except those that have been set to ``None``."""
        buffers = (owner[name] for owner, name in self._places)
        return [each for each in buffers if each is not None]

    def read(self, *, even_if_same: bool) -> bytes:
        """Return the buffers as bytes; empty if none has changed since the last call.

        A forward pass may change running statistics undetected, so use ``even_if_same``
        after one.
        """
        buffers = self.tensors()
        versions = [each.is_inference() or (each.data_ptr(), version_of(each)) for each in buffers]
        if versions == self._versions and not even_if_same:
            return b""
        self._versions = versions
        if not buffers:
            return b""
        # Joined on one device, since each copy to the CPU waits for the device.
        views = [
            each.detach().reshape(-1).view(torch.uint8).to(buffers[0].device) for each in buffers
        ]
        return torch.cat(views).cpu().numpy().tobytes()

    def restore(self, content: bytes) -> bool:
        """Restore the buffers; return ``False`` if the bytes do not fit."""
        buffers = self.tensors()
        sizes = [each.nbytes for each in buffers]
        if sum(sizes) != len(content):
            return False
        noted = torch.from_numpy(np.frombuffer(content, np.uint8).copy()).split(sizes)
        for buffer, each in zip(buffers, noted, strict=True):
            buffer.copy_(each.clone().view(buffer.dtype).view(buffer.shape))  # a copy is aligned
        return True
