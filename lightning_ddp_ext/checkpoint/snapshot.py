"""Copy a checkpoint as it is at one moment into memory that is used again for the next one.

Its skeleton is pickled, as saving would do, and the memory of tensors is copied, once where several tensors share it.
From a GPU it goes into pinned memory, on a stream of its own: training goes on while the copy is under way, and only
what would overwrite the tensors waits for it, on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import UntypedStorage

from lightning_ddp_ext.checkpoint.skeleton import bytes_of, join, split

_ALIGNMENT = 64


class Buffer:
    """Memory for one snapshot after another; it grows when one is larger than all before."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return self._bytes.numel()

    def take(self, checkpoint: Any) -> Callable[[], Any]:
        """Copy ``checkpoint``, whose tensors may be on any device, as it is now.

        Returns:
            What gives the copy, made of new objects on this memory, until the next one is taken.

        Raises:
            Exception: whatever pickling raises for what cannot be pickled.
        """
        pickled, storages = split(checkpoint)
        copies, copied = self._copy(storages)

        def content() -> Any:
            for event in copied:
                event.synchronize()
            return join(pickled, copies)

        return content

    def _copy(self, storages: list[UntypedStorage]) -> tuple[list[UntypedStorage], list[torch.cuda.Event]]:
        """Copies of ``storages``; those from GPUs are there when the events have happened."""
        gpus = {storage.device for storage in storages if storage.device.type == "cuda"}
        self._make_room(sum(aligned(storage.nbytes()) for storage in storages), pinned=bool(gpus))
        sides = {gpu: self._side_stream(gpu) for gpu in gpus}
        copies, used = [], 0
        for storage in storages:
            size = storage.nbytes()
            piece = self._bytes[used : used + size]
            with torch.cuda.stream(sides.get(storage.device)):  # none for the CPU: then it does nothing
                piece.copy_(bytes_of(storage), non_blocking=True)
            # An empty part of the buffer would have the address of the next one, and torch.save takes them for one.
            copies.append(piece.untyped_storage()[used : used + size] if size else UntypedStorage(0))
            used += aligned(size)
        for gpu, side in sides.items():
            torch.cuda.current_stream(gpu).wait_stream(side)
        return copies, [side.record_event() for side in sides.values()]

    def _make_room(self, size: int, *, pinned: bool) -> None:
        if size > self.size or pinned > self._bytes.is_pinned():
            self._bytes = torch.empty(0, dtype=torch.uint8)  # drop the old one before there is a new one
            self._bytes = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)

    def _side_stream(self, gpu: torch.device) -> torch.cuda.Stream:
        side = self._streams.setdefault(gpu, torch.cuda.Stream(gpu))
        side.wait_stream(torch.cuda.current_stream(gpu))
        return side


def aligned(size: int) -> int:
    """So many bytes, rounded up."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
