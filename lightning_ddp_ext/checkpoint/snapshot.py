"""Split a checkpoint into storages and a pickle, copy them, and join them again.

Tensors are pickled as in ``torch.save``, so all kinds of tensors are supported. A
snapshot is a copy of the checkpoint at one moment; the next snapshot reuses its memory.
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

_ALIGNMENT = 64  # bytes, as of torch's own allocations on the CPU
_LOCATION = "_ddpx_location"  # attribute of a copy: the device of the original

# torch.save records the device that the first matching function in its list returns;
# the CPU's has priority 10.
register_package(
    9, lambda storage: getattr(storage, _LOCATION, None), lambda storage, location: None
)


def split(content: Any) -> tuple[bytes, list[UntypedStorage]]:
    """Return a pickle of all but the storages of tensors, and these storages.

    Each storage occurs once and is not copied.

    Raises:
        Exception: any error of pickling.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(content)
    return file.getvalue(), pickler.storages


def join(pickled: bytes, storages: list[UntypedStorage]) -> Any:
    """Return the checkpoint made of a pickle and of the storages for its tensors."""
    try:
        return _Unpickler(io.BytesIO(pickled), storages).load()
    finally:
        # as torch.load does; it also clears their list
        torch._utils._validate_loaded_sparse_tensors()


def _identity(storage: UntypedStorage) -> tuple[str, int, int]:
    """Return a key for a storage's memory: its device, address and size.

    Views of a NumPy array may differ only in size.
    """
    return str(storage.device), storage.data_ptr(), storage.nbytes()


def bytes_of(storage: UntypedStorage) -> Tensor:
    """Return the storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        # keeps them alive, so that addresses are not reused
        self.storages: list[UntypedStorage] = []
        self._numbers: dict[tuple[str, int, int], int] = {}

    def persistent_id(self, obj: Any) -> tuple[int, torch.dtype] | None:
        if not isinstance(obj, (TypedStorage, UntypedStorage)):
            return None
        storage = obj._untyped_storage if isinstance(obj, TypedStorage) else obj
        number = self._numbers.setdefault(_identity(storage), len(self.storages))
        is_new = number == len(self.storages)
        if is_new:
            self.storages.append(storage)
        dtype = obj.dtype if isinstance(obj, TypedStorage) else torch.uint8  # as in torch.load
        return number, dtype


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, storages: list[UntypedStorage]) -> None:
        super().__init__(file)
        self._storages = storages

    def persistent_load(self, pid: Any) -> TypedStorage:
        number, dtype = pid
        return TypedStorage(wrap_storage=self._storages[number], dtype=dtype, _internal=True)


class Buffer:
    """Memory that successive snapshots reuse; it grows to the size of the largest."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False
        self._side_streams: dict[torch.device, torch.cuda.Stream] = {}

    @property
    def size(self) -> int:
        """The size in bytes."""
        return self._bytes.numel()

    def snapshot(self, checkpoint: Any) -> Callable[[], Any]:
        """Copy the current state of ``checkpoint``, whose tensors may be on any device.

        Returns:
            A function that returns the copy: new objects in this memory, valid until
            the next snapshot. If the copy is saved with ``torch.save``, the devices of
            the original tensors are recorded.

        Raises:
            Exception: any error of pickling.
        """
        pickled, storages = split(checkpoint)
        copies, gpu_copies = self._copy(storages)

        def wait_and_join() -> Any:
            for event in gpu_copies:
                event.synchronize()
            return join(pickled, copies)

        return wait_and_join

    def _copy(
        self, storages: list[UntypedStorage]
    ) -> tuple[list[UntypedStorage], list[torch.cuda.Event]]:
        """Return copies, and events after which copies from GPUs are complete."""
        sizes = [storage.nbytes() for storage in storages]
        gpus = {storage.device for storage in storages if storage.device.type == "cuda"}
        self._make_room(sum(map(aligned, sizes)), pinned=bool(gpus))
        side_streams = {gpu: self._side_stream(gpu) for gpu in gpus}
        copies = slices_of(self._bytes.untyped_storage(), sizes)
        for copied, storage in zip(copies, storages, strict=True):
            setattr(copied, _LOCATION, location_tag(storage))
            # On the CPU the stream is None, which does nothing.
            with torch.cuda.stream(side_streams.get(storage.device)):
                bytes_of(copied).copy_(bytes_of(storage), non_blocking=True)
        for gpu, stream in side_streams.items():
            torch.cuda.current_stream(gpu).wait_stream(stream)
        return copies, [stream.record_event() for stream in side_streams.values()]

    def _make_room(self, size: int, *, pinned: bool) -> None:
        has_to_be_pinned = pinned and not self._is_pinned
        if size > self.size or has_to_be_pinned:
            self.release()  # frees the old memory before new memory is allocated
            self._bytes = pinned_memory(size) if pinned else torch.empty(size, dtype=torch.uint8)
            self._is_pinned = pinned

    def release(self) -> None:
        """Release the memory."""
        for stream in self._side_streams.values():
            stream.synchronize()
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._is_pinned = False

    def _side_stream(self, gpu: torch.device) -> torch.cuda.Stream:
        stream = self._side_streams.setdefault(gpu, torch.cuda.Stream(gpu))
        stream.wait_stream(torch.cuda.current_stream(gpu))
        return stream


def slices_of(memory: UntypedStorage, sizes: list[int]) -> list[UntypedStorage]:
    """Return consecutive slices of these sizes.

    An empty slice is a separate storage without an address.
    """
    begins = accumulate(map(aligned, sizes), initial=0)  # and the end of the last one
    # torch.save would confuse an empty slice with the next one at the same address.
    return [
        memory[begin : begin + size] if size else UntypedStorage(0)
        for begin, size in zip(begins, sizes, strict=False)
    ]


def pinned_memory(size: int) -> Tensor:
    """Return bytes that are page-locked while the tensor exists.

    GPUs can copy to such memory in the background. torch rounds its own pinned memory
    up to a power of two and keeps it until the process exits.
    """
    memory = torch.empty(size, dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    if size:  # zero bytes cannot be pinned
        error = int(cudart.cudaHostRegister(memory.data_ptr(), size, 1))  # 1: for all GPUs
        if error:
            raise RuntimeError(
                f"page-locking {size} bytes of memory failed (CUDA error {error}); set"
                " background=False"
            )
        weakref.finalize(memory, cudart.cudaHostUnregister, memory.data_ptr()).atexit = False
    return memory


def aligned(size: int) -> int:
    """Return a number of bytes rounded up to the alignment."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
