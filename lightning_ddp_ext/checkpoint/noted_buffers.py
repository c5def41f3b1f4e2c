"""Read the buffers of a module as bytes in every step, and restore them."""

from __future__ import annotations

import pickle
from typing import Any

import torch
from torch import nn

_BIG = 1 << 20  # a buffer of more bytes, such as a mask, is noted only once it has changed


class NotedBuffers:
    """The buffers that checkpoints of a module hold.

    Args:
        module: the module with the buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        self._owners = [
            (owner._buffers, name)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None and name not in owner._non_persistent_buffers_set
        ]
        self._first = self._last = self._versions()

    @property
    def _buffers(self) -> list[Any]:
        return [owner[name] for owner, name in self._owners]

    def _versions(self) -> list[int]:
        return [0 if each is None or each.is_inference() else each._version for each in self._buffers]

    def read(self, *, even_if_same: bool) -> bytes:
        """Return the buffers as bytes; empty if no buffer changed.

        Args:
            even_if_same: whether they may have changed undetected, as running statistics do in a forward pass.
        """
        versions = self._versions()
        is_same, self._last = versions == self._last, versions
        if is_same and not even_if_same:
            return b""
        buffers = self._buffers
        has_changed = [now != first for now, first in zip(versions, self._first, strict=True)]
        chosen = [index for index, each in enumerate(buffers) if has_changed[index] or each.nbytes <= _BIG]
        if not chosen:
            return b""
        memory = torch.cat([buffers[index].detach().reshape(-1).view(torch.uint8) for index in chosen])
        return pickle.dumps((chosen, memory.cpu().numpy().tobytes()))

    def restore(self, content: bytes) -> bool:
        """Restore the noted buffers; return whether these are all that changed since."""
        chosen, memory = pickle.loads(content) if content else ([], b"")
        begin = 0
        for index in chosen:
            buffer = self._buffers[index]
            noted = torch.frombuffer(bytearray(memory[begin : begin + buffer.nbytes]), dtype=buffer.dtype)
            buffer.copy_(noted.reshape(buffer.shape))
            begin += buffer.nbytes
        versions = self._versions()
        return all(versions[index] == self._first[index] for index in set(range(len(versions))).difference(chosen))
