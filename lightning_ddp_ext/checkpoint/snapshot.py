"""A checkpoint as it is at one moment, in memory that is used again for the next one.

Everything but the memory of tensors is pickled, as saving would do; that memory is copied, once where several tensors
share it, into one buffer, whose first use costs several times the copy.
"""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from lightning_ddp_ext.checkpoint.tensors import has_storage

_ALIGNMENT = 64


class Buffer:
    """Memory for one snapshot after another; it grows when one is larger than all before."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return self._bytes.numel()

    def begin(self, size: int) -> None:
        """Make room for ``size`` bytes; what was in the buffer is void."""
        self._used = 0
        if size > self._bytes.numel():
            self._bytes = torch.empty(0, dtype=torch.uint8)  # let go of the old one before there is a new one
            self._bytes = torch.empty(size, dtype=torch.uint8)

    def take(self, source: UntypedStorage) -> UntypedStorage:
        """A copy of ``source`` in the buffer; from another device it may still be on its way."""
        size = source.nbytes()
        piece = self._bytes[self._used : self._used + size]
        piece.copy_(torch.empty(0, dtype=torch.uint8, device=source.device).set_(source))
        self._used += aligned(size)
        return piece.untyped_storage()[piece.storage_offset() : piece.storage_offset() + size]  # type: ignore[no-any-return]


def aligned(size: int) -> int:
    """So many bytes, rounded up."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class Snapshot:
    """What :func:`take` has taken; valid until the buffer is used for the next one."""

    pickled: bytes
    tensors: list[Tensor] = field(repr=False)

    def content(self) -> Any:
        """The checkpoint, as it was; made of new objects on the buffer's memory."""
        return _Unpickler(io.BytesIO(self.pickled), self.tensors).load()


def take(checkpoint: Any, buffer: Buffer) -> Snapshot:
    """Copy ``checkpoint`` as it is now.

    Args:
        checkpoint: what ``torch.save`` would take; tensors may be on any device.
        buffer: where to; what was there before is void.

    Raises:
        Exception: whatever pickling raises for what cannot be pickled.
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(checkpoint)
    storages: dict[tuple[int, int], UntypedStorage] = {}
    for tensor in pickler.tensors:
        if _is_plain(tensor):
            storage = tensor.untyped_storage()
            storages[_key_of(storage)] = storage
    buffer.begin(sum(aligned(storage.nbytes()) for storage in storages.values()))
    copies = {key: buffer.take(storage) for key, storage in storages.items()}
    return Snapshot(pickled.getvalue(), [_copied(tensor, copies) for tensor in pickler.tensors])


def _key_of(storage: UntypedStorage) -> tuple[int, int]:
    return storage.data_ptr(), storage.nbytes()  # two of different size may begin at the same place of a NumPy array


def _copied(tensor: Tensor, copies: dict[tuple[int, int], UntypedStorage]) -> Tensor:
    if type(tensor) not in (Tensor, nn.Parameter):
        return copy.deepcopy(tensor)
    if _is_plain(tensor):
        twin = torch.empty(0, dtype=tensor.dtype)
        twin.set_(copies[_key_of(tensor.untyped_storage())], tensor.storage_offset(), tensor.size(), tensor.stride())
    else:
        twin = tensor.detach().clone()  # deepcopy knows no compressed sparse ones
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(twin, requires_grad=tensor.requires_grad)
    twin.requires_grad_(tensor.requires_grad)
    vars(twin).update(copy.deepcopy(vars(tensor)))
    return twin


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is its memory and a view of it, and nothing more; others are rare, and copied as they are."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
        and has_storage(tensor)
        and tensor.untyped_storage().nbytes() > 0
    )


class _Pickler(pickle.Pickler):
    """Leaves tensors out, and collects them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> int | None:
        if not isinstance(obj, Tensor):
            return None
        number = self._numbers.setdefault(id(obj), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(obj)  # keeps it alive, and so its id its own
        return number


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, pid: int) -> Tensor:
        return self._tensors[pid]
