"""Which tensors a checkpoint file holds, learnt without importing or running anything of it.

The pickled structure is read with inert stand-ins in place of every class and function that it names.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeGuard

from lightning_ddp_ext.checkpoint.zip_crc import Archive, Record

_DTYPES = {
    "BFloat16": "bfloat16",
    "Bool": "bool",
    "Byte": "uint8",
    "Char": "int8",
    "ComplexDouble": "complex128",
    "ComplexFloat": "complex64",
    "Double": "float64",
    "Float": "float32",
    "Half": "float16",
    "Int": "int32",
    "Long": "int64",
    "Short": "int16",
    "Untyped": "uint8",
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file, or memory that is no tensor's, which is like one of bytes.

    Attributes:
        record: where its memory is: ``data/0``.
        dtype: such as ``float32``.
        shape: numbers of elements.
    """

    record: str
    dtype: str
    shape: tuple[int, ...]


class StandIn:
    """Stands for an object of a class that is not imported, or for what a function would return.

    Attributes:
        origin: the name of the class or function.
        children: what it is made of, each with its key or attribute, or "".
    """

    origin = ""
    children: list[tuple[Any, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> StandIn:  # noqa: D102 # pickle may call it alone
        made = super().__new__(cls)
        made.children = [("", argument) for argument in _flat((*args, *kwargs.values()))]
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        for part in _flat((state,)):  # slots come beside the attributes
            self.children += part.items() if isinstance(part, dict) else [("", part)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self.children.append((key, value))

    def append(self, item: Any) -> None:
        """Called for an object that is pickled like a list."""
        self.children.append(("", item))

    add = append


def read_structure(archive: Archive) -> Any:
    """A file's content, with :class:`StoredTensor` for tensors and :class:`StandIn` for other objects.

    Args:
        archive: a file with records, whose ``data.pkl`` has been checked.

    Raises:
        Exception: whatever reading a malformed pickle raises.
    """
    return _Unpickler(io.BytesIO(archive.content_of("data.pkl")), encoding="utf-8").load()


def named_tensors(structure: Any) -> Iterator[tuple[str, StoredTensor]]:
    """Every tensor with its path, such as ``optimizer_states.0.state.3.exp_avg``; a sparse one in several parts."""
    return _walk(structure, "", set())


def names_by_record(archive: Archive, records: Iterable[Record]) -> dict[str, list[str]]:
    """For each of these records the names of the tensors in it; none where the file's structure is among them."""
    names: dict[str, list[str]] = {record.name: [] for record in records}
    if not all(name.startswith("data/") for name in names):
        return names
    try:
        found = list(named_tensors(read_structure(archive)))
    except Exception:  # there is no end to what a malformed pickle can raise
        return names
    for name, tensor in found:
        if tensor.record in names and name and name not in names[tensor.record]:
            names[tensor.record].append(name)
    return names


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch._utils" and name in _REBUILD:
            return _REBUILD[name]
        return type("StandIn", (StandIn,), {"origin": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> StoredTensor:
        _, kind, key, _, size = pid
        name = kind.origin.removeprefix("torch.").removeprefix("storage.").removesuffix("Storage")
        return StoredTensor(f"data/{key}", _DTYPES.get(name, name.lower()), (size,))


def _rebuild(storage: StoredTensor, offset: int, shape: tuple[int, ...], stride: Any, *others: Any) -> StoredTensor:
    dtypes = [other.origin.removeprefix("torch.") for other in others if _is_stand_in(other)]
    return StoredTensor(storage.record, dtypes[0] if dtypes else storage.dtype, tuple(shape))


def _is_stand_in(value: Any) -> TypeGuard[type[StandIn]]:
    return isinstance(value, type) and issubclass(value, StandIn)


# What the pickles of tensors call, and what these calls give here.
_REBUILD = {
    "_rebuild_tensor": _rebuild,
    "_rebuild_tensor_v2": _rebuild,
    "_rebuild_tensor_v3": _rebuild,
    "_rebuild_qtensor": _rebuild,
    "_rebuild_parameter": lambda tensor, *_: tensor,
}


def _walk(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, StoredTensor]]:
    if isinstance(value, StoredTensor):
        yield name, value
    elif isinstance(value, (dict, list, tuple, set, frozenset, StandIn)) and id(value) not in seen:
        seen.add(id(value))
        for key, child in _children(value):
            yield from _walk(child, _joined(name, key), seen)


def _children(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, StandIn):
        return value.children
    return value.items() if isinstance(value, dict) else enumerate(value)


def _flat(arguments: tuple[Any, ...]) -> Iterator[Any]:
    for argument in arguments:
        yield from _flat(argument) if isinstance(argument, tuple) else [argument]


def _joined(name: str, key: Any) -> str:
    return ".".join(filter(None, [name, str(key)]))
