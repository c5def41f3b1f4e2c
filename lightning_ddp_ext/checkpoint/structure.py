"""What refers to which tensor memory in a checkpoint file, learnt without importing or running anything of it.

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

# What torch pickles a plain tensor as: such a tensor has no memory but that of its one storage.
_PLAIN = ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")
# Where a pickled module keeps what it is made of; nobody knows its tensors by these names.
_MODULES_OWN = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class StorageKey:
    """Stands for the memory in record ``data/<key>``."""

    key: str


class StandIn:
    """Stands for an object of a class that is not imported, or for what a function would return."""

    origin = ""
    args: Any
    state: Any
    items: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> StandIn:  # noqa: D102 # pickle may call it alone
        made = super().__new__(cls)
        made.args, made.state, made.items = (args, kwargs), None, []
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


class Structure:
    """What refers to what in a checkpoint file.

    Args:
        archive: a file with records, whose ``data.pkl`` has been checked.

    Attributes:
        value: its content, with :class:`StandIn` for objects and :class:`StorageKey` for tensor memory.
        order: the keys of tensor memory in the order in which ``torch.load`` asks for them.

    Raises:
        Exception: whatever reading a malformed pickle raises.
    """

    def __init__(self, archive: Archive) -> None:
        unpickler = _Unpickler(io.BytesIO(_pickle_of(archive)))
        self.value: Any = unpickler.load()
        self.order = unpickler.order

    def names_of(self, records: Iterable[Record]) -> dict[str, list[str]]:
        """The names of the tensors in each of these records, such as ``optimizer_states.0.state.3.exp_avg``."""
        names: dict[str, list[str]] = {record.name: [] for record in records}
        for name, key in _named_keys(self.value, "", set()):
            found = names.get(f"data/{key}")
            if found is not None and name and name not in found:
                found.append(name)
        return names

    def weights(self) -> set[str]:
        """The keys of memory that nothing but plain tensors of the ``state_dict`` refer to."""
        content = self.value if isinstance(self.value, dict) else {}
        entries = content.get("state_dict", content)
        weights = {name: value for name, value in entries.items() if _is_weight(name, value)}
        others = [value for name, value in entries.items() if name not in weights]
        if entries is not content:
            others += [value for key, value in content.items() if key != "state_dict"]
        return set(_keys_in(list(weights.values()))) - set(_keys_in(others))


def _pickle_of(archive: Archive) -> bytes:
    found = next(record for record in archive.skeleton if record.name == "data.pkl")
    return archive.content_of(found)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, encoding="utf-8")
        self.order: list[str] = []
        self._seen: set[str] = set()
        self._classes: dict[tuple[str, str], type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        known = self._classes.get((module, name))
        if known is None:
            known = self._classes[module, name] = type("StandIn", (StandIn,), {"origin": f"{module}.{name}"})
        return known

    def persistent_load(self, pid: Any) -> StorageKey:
        _, _, key, _, size = pid
        if size == 0 or key not in self._seen:  # torch asks again for memory that is empty
            self.order.append(key)
            self._seen.add(key)
        return StorageKey(key)


def _is_weight(name: Any, value: Any) -> bool:
    """Whether loading the model copies it, and keeps nothing of it."""
    is_plain = isinstance(value, StandIn) and value.origin.removeprefix("torch._utils.") in _PLAIN
    return is_plain and isinstance(name, str) and not name.endswith("_extra_state")


def _keys_in(value: Any) -> Iterator[str]:
    """Every key below ``value``."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, StorageKey):
            yield each.key
        elif isinstance(each, (Mapping, list, tuple, set, frozenset, StandIn)) and id(each) not in seen:
            seen.add(id(each))
            if isinstance(each, StandIn):
                waiting += [each.args, each.state, each.items]
            else:
                waiting += each.values() if isinstance(each, Mapping) else each


def _named_keys(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, str]]:
    if isinstance(value, StorageKey):
        yield name, value.key
    elif isinstance(value, StandIn):
        yield from ((name, key) for key in _keys_in(value.args))
    if isinstance(value, (dict, list, tuple, StandIn)) and id(value) not in seen:
        seen.add(id(value))
        for key, child in _children(value):
            yield from _named_keys(child, _joined(name, key), seen)


def _children(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
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
