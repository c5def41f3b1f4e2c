"""Take a checkpoint apart into the memory of its tensors and everything else, pickled; put it together again.

Tensors are pickled as ``torch.save`` pickles them, so every kind that it takes can be taken apart and put together.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.storage import TypedStorage


def split(content: Any) -> tuple[bytes, list[UntypedStorage]]:
    """Pickle everything but the memory of tensors; that memory comes beside it, each piece once and not copied.

    Raises:
        Exception: whatever pickling raises for what cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(content)
    return file.getvalue(), pickler.storages


def join(pickled: bytes, storages: list[UntypedStorage]) -> Any:
    """Put a checkpoint together, with these pieces of memory in place of those that it was taken from."""
    try:
        return _Unpickler(io.BytesIO(pickled), storages).load()
    finally:
        torch._utils._validate_loaded_sparse_tensors()  # as torch.load does: it also forgets them


def identity_of(storage: UntypedStorage) -> tuple[str, int, int]:
    """Equal for storages that are the same memory; parts of a NumPy array begin at one place, and differ in size."""
    return str(storage.device), storage.data_ptr(), storage.nbytes()


def bytes_of(storage: UntypedStorage) -> Tensor:
    """The memory as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.storages: list[UntypedStorage] = []  # kept alive, so that their addresses stay their own
        self._numbers: dict[tuple[str, int, int], int] = {}

    def persistent_id(self, obj: Any) -> tuple[int, torch.dtype] | None:
        if not isinstance(obj, (TypedStorage, UntypedStorage)):
            return None
        storage = obj._untyped_storage if isinstance(obj, TypedStorage) else obj
        number = self._numbers.setdefault(identity_of(storage), len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
        return number, obj.dtype if isinstance(obj, TypedStorage) else torch.uint8  # as torch.load gives it back


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, storages: list[UntypedStorage]) -> None:
        super().__init__(file)
        self._storages = storages

    def persistent_load(self, pid: Any) -> TypedStorage:
        number, dtype = pid
        return TypedStorage(wrap_storage=self._storages[number], dtype=dtype, _internal=True)
