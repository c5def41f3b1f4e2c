"""The buffers of a module as bytes, to be noted in every step, and put back."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from torch import Tensor, nn

_BIG = 1 << 20  # a buffer of more bytes, such as a mask, is noted only once it has changed


class NotedBuffers:
    """The buffers that checkpoints of a module hold.

    Args:
        module: whose buffers these are.
    """

    def __init__(self, module: nn.Module) -> None:
        self._owners = [
            (owner._buffers, name)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None and name not in owner._non_persistent_buffers_set
        ]
        self._first = self._last = self._versions()
        self._big = [index for index in range(len(self._owners)) if self._buffer(index).nbytes > _BIG]
        self._memory: list[Any] = []  # of the buffers, read anew by each write
        self._memory_of: list[object] = []  # their addresses, and the big ones that have changed

    def _buffer(self, index: int) -> Tensor:
        owner, name = self._owners[index]
        buffer = owner[name]
        assert buffer is not None
        return buffer

    def _versions(self) -> list[int]:
        buffers = [owner[name] for owner, name in self._owners]
        return [0 if buffer is None or buffer.is_inference() else buffer._version for buffer in buffers]

    def read(self, *, even_if_same: bool) -> bytes:
        """Return the buffers; nothing if nothing has changed.

        Args:
            even_if_same: whether they may have changed unseen, as running statistics do in a forward pass.
        """
        versions = self._versions()
        is_same, self._last = versions == self._last, versions
        if not versions or (is_same and not even_if_same):
            return b""
        changed = [index for index in self._big if versions[index] != self._first[index]]
        memory_of = [*(owner[name].data_ptr() for owner, name in self._owners), changed]  # type: ignore[union-attr]
        if memory_of == self._memory_of:
            return b"".join(self._memory)
        chosen = [index for index in range(len(self._owners)) if index not in self._big or index in changed]
        table = array("q", [len(chosen), *chosen]).tobytes()
        buffers = [self._buffer(index) for index in chosen]
        if not buffers:
            return b""
        if all(buffer.is_contiguous() and not buffer.is_cuda for buffer in buffers):
            self._memory, self._memory_of = [table, *(_bytes_of(each).numpy().data for each in buffers)], memory_of
            return b"".join(self._memory)
        return table + torch.cat([_bytes_of(each) for each in buffers]).cpu().numpy().tobytes()

    def restore(self, content: bytes) -> bool:
        """Put back what was noted; return whether nothing is missing of what has changed since."""
        (number,) = array("q", content[:8]) if content else (0,)
        chosen, begin = array("q", content[8 : 8 + 8 * number]), 8 + 8 * number
        for index in chosen:
            buffer = self._buffer(index)
            noted = torch.frombuffer(bytearray(content[begin : begin + buffer.nbytes]), dtype=buffer.dtype)
            buffer.copy_(noted.reshape(buffer.shape))
            begin += buffer.nbytes
        others = set(range(len(self._owners))).difference(chosen)
        versions = self._versions()
        return all(versions[index] == self._first[index] for index in others)


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
