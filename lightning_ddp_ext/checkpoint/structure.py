"""Which tensors a checkpoint file holds, learnt without importing or running anything of it.

The pickled structure is read with inert stand-ins in place of every class and function that it names.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_ddp_ext.checkpoint.zip_crc import Archive, Record

# Where a pickled module keeps what it is made of; nobody knows its tensors by these names.
_MODULES_OWN = ("_parameters", "_buffers", "_modules")
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
        record: where its memory is: ``data/0``; ``None`` for one without memory, of the device ``meta``.
        dtype: such as ``float32``.
        shape: numbers of elements.
        device: that it was saved from.
    """

    record: str | None
    dtype: str
    shape: tuple[int, ...]
    device: str


class StandIn:
    """Stands for an object of a class that is not imported, or for what a function would return."""

    origin = ""
    args: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> StandIn:  # noqa: D102 # pickle may call it alone
        made = super().__new__(cls)
        made.args, made.state, made.items = (*args, *kwargs.values()), None, []
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def append(self, item: Any) -> None:
        """Called for an object that is pickled like a list."""
        self.items.append(item)

    add = append


def read_structure(archive: Archive) -> Any:
    """A file's content, with :class:`StandIn` for objects and :class:`StoredTensor` for the memory of tensors.

    Args:
        archive: a file with records, whose ``data.pkl`` has been checked.

    Raises:
        Exception: whatever reading a malformed pickle raises.
    """
    pickled = next(record for record in archive.skeleton if record.name == "data.pkl")
    return _Unpickler(io.BytesIO(archive.content_of(pickled)), encoding="utf-8").load()


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
        return type("StandIn", (StandIn,), {"origin": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> StoredTensor:
        _, kind, key, device, size = pid
        name = kind.origin.removeprefix("torch.").removeprefix("storage.").removesuffix("Storage")
        return StoredTensor(f"data/{key}", _DTYPES.get(name, name.lower()), (size,), device)


def _walk(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, StoredTensor]]:
    if isinstance(value, (StoredTensor, StandIn)):
        yield from ((name, part) for part in _parts(value, set()))
    if isinstance(value, (dict, list, tuple, set, frozenset, StandIn)) and id(value) not in seen:
        seen.add(id(value))
        for key, child in _children(value):
            yield from _walk(child, _joined(name, key), seen)


def _parts(value: Any, seen: set[int]) -> Iterator[StoredTensor]:
    """The tensors that an object is built from: one for a dense tensor, several for a sparse one."""
    if isinstance(value, StandIn):
        tensor = _as_tensor(value)
        value = value.args if tensor is None else tensor
    if isinstance(value, StoredTensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple, set, frozenset)) and id(value) not in seen:
        seen.add(id(value))
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _parts(each, seen)


def _as_tensor(call: StandIn) -> StoredTensor | None:
    """The dense tensor that a call of one of ``torch._utils._rebuild_...`` would make; ``None`` for any other call."""
    named = [arg.origin for arg in call.args if isinstance(arg, type) and issubclass(arg, StandIn)]
    dtype = named[0].removeprefix("torch.") if named else None
    if call.origin == "torch._utils._rebuild_meta_tensor_no_storage":
        return StoredTensor(None, str(dtype), tuple(call.args[1]), "meta")
    if len(call.args) < 3 or not isinstance(call.args[0], StoredTensor) or not isinstance(call.args[2], tuple):
        return None
    storage, _, shape = call.args[:3]
    return StoredTensor(storage.record, dtype or storage.dtype, shape, storage.device)


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif not isinstance(value, StandIn):
        yield from enumerate(value)
    else:
        yield from (item if isinstance(item, tuple) and len(item) == 2 else ("", item) for item in value.items)
        states = value.state if isinstance(value.state, tuple) else (value.state,)  # slots come with the attributes
        for state in states:
            yield from state.items() if isinstance(state, dict) else [("", state)]


def _joined(name: str, key: Any) -> str:
    if key == "" or key in _MODULES_OWN:
        return name
    return f"{name}.{key}" if name else str(key)
