"""Split a checkpoint into the storages of its tensors and a pickle of everything else; copy it; join both again.

Tensors are pickled as ``torch.save`` pickles them, so every kind that it takes is supported. A
snapshot is a copy of the checkpoint at one moment, in memory that the next one reuses.
"""

from __future__ import annotations

import io
import pickle
import weakref
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.serialization import location_tag, register_package
from torch.storage import TypedStorage

_ALIGNMENT = 64
_LOCATION = "_ddpx_location"  # of a copy: the device of the original

# torch.save records as a tensor's device what the first function of this list returns; that of the CPU has number 10.
register_package(9, lambda storage: getattr(storage, _LOCATION, None), lambda storage, location: None)


def split(content: Any) -> tuple[bytes, list[UntypedStorage]]:
    """Pickle everything but the storages of tensors; return the pickle and the storages, each once and not copied.

    Raises:
        Exception: any error of pickling.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(content)
    return file.getvalue(), pickler.storages


def join(pickled: bytes, storages: list[UntypedStorage]) -> Any:
    """Join a checkpoint from its pickle and storages, which replace the original ones."""
    try:
        return _Unpickler(io.BytesIO(pickled), storages).load()
    finally:
        torch._utils._validate_loaded_sparse_tensors()  # as torch.load does; it also clears their list


def identity_of(storage: UntypedStorage) -> tuple[str, int, int]:
    """Return a key that is equal for storages of the same memory; views of a NumPy array may differ in size only."""
    return str(storage.device), storage.data_ptr(), storage.nbytes()


def bytes_of(storage: UntypedStorage) -> Tensor:
    """Return the storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.storages: list[UntypedStorage] = []  # kept alive, so that no address is reused
        self._numbers: dict[tuple[str, int, int], int] = {}

    def persistent_id(self, obj: Any) -> tuple[int, torch.dtype] | None:
        if not isinstance(obj, (TypedStorage, UntypedStorage)):
            return None
        storage = obj._untyped_storage if isinstance(obj, TypedStorage) else obj
        number = self._numbers.setdefault(identity_of(storage), len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
        return number, obj.dtype if isinstance(obj, TypedStorage) else torch.uint8  # as torch.load returns it


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, storages: list[UntypedStorage]) -> None:
        super().__init__(file)
        self._storages = storages

    def persistent_load(self, pid: Any) -> TypedStorage:
        number, dtype = pid
        return TypedStorage(wrap_storage=self._storages[number], dtype=dtype, _internal=True)


class Buffer:
    """Memory for one snapshot after another; it grows with the largest one."""

    def __init__(self) -> None:
        self._bytes, self._is_pinned = torch.empty(0, dtype=torch.uint8), False
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def size(self) -> int:
        """The number of bytes that it takes."""
        return self._bytes.numel()

    def snapshot(self, checkpoint: Any) -> Callable[[], Any]:
        """Copy ``checkpoint``, whose tensors may be on any device, as it is now.

        Returns:
            A function that returns the copy, new objects on this memory, until the next one is taken. ``torch.save``
            records the devices of the original tensors.

        Raises:
            Exception: any error of pickling.
        """
        pickled, storages = split(checkpoint)
        copies, copied = self._copy(storages)

        def content() -> Any:
            for event in copied:
                event.synchronize()
            return join(pickled, copies)

        return content

    def _copy(self, storages: list[UntypedStorage]) -> tuple[list[UntypedStorage], list[torch.cuda.Event]]:
        """Return copies of ``storages``; those from GPUs are complete after the events."""
        gpus = {storage.device for storage in storages if storage.device.type == "cuda"}
        self._make_room(sum(aligned(storage.nbytes()) for storage in storages), pinned=bool(gpus))
        sides = {gpu: self._side_stream(gpu) for gpu in gpus}
        copies = slices_of(self._bytes.untyped_storage(), [storage.nbytes() for storage in storages])
        for copied, storage in zip(copies, storages, strict=True):
            setattr(copied, _LOCATION, location_tag(storage))
            with torch.cuda.stream(sides.get(storage.device)):  # None for the CPU: a no-op
                bytes_of(copied).copy_(bytes_of(storage), non_blocking=True)
        for gpu, side in sides.items():
            torch.cuda.current_stream(gpu).wait_stream(side)
        return copies, [side.record_event() for side in sides.values()]

    def _make_room(self, size: int, *, pinned: bool) -> None:
        if size > self.size or pinned > self._is_pinned:
            self.release()  # before allocating a new one
            self._bytes = pinned_memory(size) if pinned else torch.empty(size, dtype=torch.uint8)
            self._is_pinned = pinned

    def release(self) -> None:
        """Release the memory."""
        for side in self._streams.values():
            side.synchronize()
        self._bytes, self._is_pinned = torch.empty(0, dtype=torch.uint8), False

    def _side_stream(self, gpu: torch.device) -> torch.cuda.Stream:
        side = self._streams.setdefault(gpu, torch.cuda.Stream(gpu))
        side.wait_stream(torch.cuda.current_stream(gpu))
        return side


def slices_of(memory: UntypedStorage, sizes: list[int]) -> list[UntypedStorage]:
    """Return consecutive slices of these sizes; an empty one is a separate storage without an address."""
    ends = accumulate(map(aligned, sizes))
    begins = (end - aligned(size) for end, size in zip(ends, sizes, strict=True))
    # An empty slice would have the address of the next one, and torch.save would confuse them.
    return [
        memory[begin : begin + size] if size else UntypedStorage(0) for begin, size in zip(begins, sizes, strict=True)
    ]


def pinned_memory(size: int) -> Tensor:
    """Return bytes that GPUs copy to in the background, page-locked as long as the tensor exists.

    torch's own pinned memory is rounded up to a power of two, and its allocator keeps it until the process exits.
    """
    memory, cudart = torch.empty(size, dtype=torch.uint8), torch.cuda.cudart()
    if size:  # zero bytes cannot be pinned
        error = int(cudart.cudaHostRegister(memory.data_ptr(), size, 1))  # 1: for all GPUs
        if error:
            raise RuntimeError(f"page-locking {size} bytes of memory failed (CUDA error {error}); set background=False")
        weakref.finalize(memory, cudart.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory


def aligned(size: int) -> int:
    """Return a number of bytes, rounded up to the alignment."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
