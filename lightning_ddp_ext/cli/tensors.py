"""The tensors of a checkpoint, and where in it they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

# Where a module keeps what it gives by its public methods.
_MODULES_OWN = ("_parameters", "_buffers", "_modules")


def named_tensors(content: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor below ``content`` with its path, such as ``optimizer_states.0.state.3.exp_avg``.

    Looks into mappings, sequences, sets, dataclasses, modules and other objects' attributes, each object once; a
    sparse tensor is named once for each of the dense ones that it is made of.
    """
    yield from _walk(content, name, set())


def _walk(content: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(content, Tensor):
        yield from ((name, part) for part in parts_of(content))
    elif not isinstance(content, (str, bytes, int, float, complex, type(None), type)) and id(content) not in seen:
        seen.add(id(content))
        for key, child in _children(content):
            yield from _walk(child, f"{name}.{key}" if name else str(key), seen)


def _children(content: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(content, Mapping):
        yield from content.items()
    elif isinstance(content, (list, tuple, set, frozenset)):
        yield from enumerate(content)
    elif isinstance(content, nn.Module):
        yield from content.named_parameters(recurse=False)
        yield from content.named_buffers(recurse=False)
        yield from content.named_children()
        yield from ((name, value) for name, value in vars(content).items() if name not in _MODULES_OWN)
    else:
        yield from getattr(content, "__dict__", {}).items()
        for slot in (slot for kind in type(content).__mro__ for slot in _slots_of(kind)):
            if hasattr(content, slot):
                yield slot, getattr(content, slot)


def _slots_of(kind: type) -> list[str]:
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that have memory of their own: a dense one itself, the indices and values of a sparse one."""
    if tensor.layout == torch.strided:
        yield tensor
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())


def has_storage(tensor: Tensor) -> bool:
    """Whether the tensor has memory that can be named; a wrapper around others has none."""
    try:
        return tensor.untyped_storage().data_ptr() != 0 or tensor.numel() == 0
    except (RuntimeError, NotImplementedError):
        return False


def payload_bytes(content: Any) -> int:
    """Bytes of all tensors of a checkpoint; memory that several share counts once."""
    sizes: dict[int, int] = {}
    for _, tensor in named_tensors(content):
        if has_storage(tensor):
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
