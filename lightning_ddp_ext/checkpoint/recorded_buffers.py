"""Record a module's small buffers, and detect changes of values that are not recorded.

Parameters are recorded elsewhere; persistent metrics, for example, are not.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_ddp_ext.checksum import checksum

_MAX_TOTAL_BYTES = 1 << 20  # recording masks and queues in every step would take too long

# Returns a number that changes whenever a tensor is changed in place.
version_of: Callable[[Tensor], int] = attrgetter("_version")


class RecordedBuffers:
    """The buffers in a module's checkpoints, except big, sparse and missing ones."""

    def __init__(self, module: nn.Module) -> None:
        self._owners_and_names = _smallest(saved_buffers(module))
        self._identities: list[Any] = []  # at the last read

    def tensors(self) -> list[Tensor]:
        """Return the buffers, except those that have been set to ``None``."""
        buffers = [owner._buffers[name] for owner, name in self._owners_and_names]
        return [each for each in buffers if each is not None]

    def read(self, *, even_if_same: bool) -> bytes:
        """Return the buffers as bytes; empty if none has changed since the last call.

        A forward pass may change running statistics undetected, so use ``even_if_same``
        after one.
        """
        buffers = self.tensors()
        identities = [_identity(each) for each in buffers]
        is_same = identities == self._identities
        self._identities = identities
        if not buffers or (is_same and not even_if_same):
            return b""
        device = buffers[0].device  # of all, since each copy to the CPU waits for the device
        with torch.no_grad():
            parts = [torch.cat([each.reshape(-1) for each in same]) for same in _groups(buffers)]
            content = torch.cat([part.view(torch.uint8).to(device) for part in parts])
        return content.cpu().numpy().tobytes()

    def restore(self, content: bytes) -> bool:
        """Restore the buffers; return ``False`` if the bytes do not fit."""
        buffers = [each for same in _groups(self.tensors()) for each in same]
        sizes = [each.nbytes for each in buffers]
        if sum(sizes) != len(content):
            return False
        recorded = torch.from_numpy(np.frombuffer(content, np.uint8).copy())
        for buffer, part in zip(buffers, recorded.split(sizes), strict=True):
            # split returns unaligned views, which view(dtype) refuses; clone first
            buffer.copy_(part.clone().view(buffer.dtype).view(buffer.shape))
        return True


class FixedValues:
    """The values in a module's ``state_dict`` that must not change.

    These are all values except parameters and recorded buffers.

    Args:
        module: the module.
        buffers: the recorded buffers.
    """

    def __init__(self, module: nn.Module, buffers: RecordedBuffers) -> None:
        self._module = module
        self._recorded = buffers
        self._first = self._contents()

    def find_changed(self) -> str | None:
        """Return the name of a value that has changed since the start, if any."""
        first = self._first
        now = self._contents()
        return next((name for name in {**first, **now} if first.get(name) != now.get(name)), None)

    def _contents(self) -> dict[str, Any]:
        """Return what represents each value in a comparison, by name.

        A ``state_dict`` has other tensor objects, which share the memory of parameters
        and buffers, so these are recognised by their memory.
        """
        tensors = (*self._module.parameters(), *self._recorded.tensors())
        recorded = [each for each in tensors if _is_dense(each)]
        bytes_at: dict[int, int] = {}  # by address; views may share one with a larger tensor
        for each in recorded:
            bytes_at[each.data_ptr()] = max(each.nbytes, bytes_at.get(each.data_ptr(), 0))
        empty = [each for each in recorded if not each.numel()]  # they have no address

        def is_recorded(value: Any) -> bool:
            if not _is_dense(value):
                return False
            if value.numel():
                return bool(value.nbytes <= bytes_at.get(value.data_ptr(), 0))
            return any(each.device == value.device and each.is_set_to(value) for each in empty)

        state = self._module.state_dict()
        return {name: _content_of(value) for name, value in state.items() if not is_recorded(value)}


def saved_buffers(module: nn.Module) -> Iterator[tuple[int, nn.Module, str]]:
    """Yield the size, owner and name of each dense buffer that checkpoints contain."""
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            is_saved = name not in owner._non_persistent_buffers_set
            if is_saved and buffer is not None and buffer.layout == torch.strided:
                yield buffer.nbytes, owner, name


def _smallest(saved: Iterator[tuple[int, nn.Module, str]]) -> list[tuple[nn.Module, str]]:
    """Return owner and name of the smallest buffers, up to a limit of their total size."""
    by_size = sorted(saved, key=lambda buffer: buffer[0])
    totals = accumulate(size for size, _, _ in by_size)
    return [
        (owner, name)
        for (_, owner, name), total in zip(by_size, totals, strict=True)
        if total <= _MAX_TOTAL_BYTES
    ]


def _groups(buffers: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the buffers of each device and dtype, which one call can join."""
    groups: dict[Any, list[Tensor]] = defaultdict(list)
    for buffer in buffers:
        groups[buffer.device, buffer.dtype].append(buffer)
    return list(groups.values())


def _identity(buffer: Tensor) -> Any:
    """Return a value that changes whenever code writes to the buffer or replaces it.

    Inference tensors have no version, and always count as unchanged.
    """
    return None if buffer.is_inference() else (buffer.data_ptr(), version_of(buffer))


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _content_of(value: Any) -> Any:
    """Return what represents a value in a later comparison."""
    if isinstance(value, Tensor):
        return value.shape, int(checksum(value)) if _is_dense(value) else version_of(value)
    if isinstance(value, (list, tuple)):  # such as a metric's values of each batch
        return [_content_of(each) for each in value]
    if isinstance(value, Mapping):
        return {name: _content_of(each) for name, each in value.items()}
    return pickle.dumps(value)
