"""What is in this checkpoint file, without running any of it?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import torch
from rich.table import Table

from lightning_ddp_ext.checkpoint.load import refuse_damage
from lightning_ddp_ext.checkpoint.location import locate, on_local_disk
from lightning_ddp_ext.checkpoint.structure import StoredTensor, named_tensors, read_structure
from lightning_ddp_ext.checkpoint.zip_crc import Archive, open_archive
from lightning_ddp_ext.cli.output import Report, add_row, header, size_text, table
from lightning_ddp_ext.errors import CheckpointError

# Of a plain state dict all names are top-level keys, and the table has them all.
_MOST_KEYS = 20


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file, as people and programs want to see it listed."""

    key: str
    """Its path, such as ``optimizer_states.0.state.3.exp_avg``."""
    shape: tuple[int, ...]
    dtype: str
    size: int
    """Bytes of its elements."""
    memory_size: int
    """Bytes of the memory that was saved for it, which may be that of other tensors, too."""
    device: str
    """That it was saved from."""
    record: str | None
    """Where in the archive that memory is."""
    shared_with: str | None
    """The first other tensor that has the same memory."""


def inspect(path: str) -> Report:
    """Every tensor of a file, or URL."""
    try:
        with on_local_disk(locate(path)) as local:
            return _listed(open_archive(local, path))
    except CheckpointError as error:
        return Report({"path": path}, str(error))
    except OSError as error:
        return Report({"path": path}, f"checkpoint {path} cannot be read: {error.strerror or error}")


def _listed(archive: Archive) -> Report:
    if archive.records is None:
        raise CheckpointError(
            f"checkpoint {archive.name} is in the format from before torch 1.6, which cannot be listed without loading "
            "it; load it with torch.load, and save it again"
        )
    refuse_damage(archive, ())
    try:
        content = read_structure(archive)
        tensors = _entries(archive, list(named_tensors(content)))
    except Exception as error:  # there is no end to what a malformed pickle can raise
        raise CheckpointError(f"checkpoint {archive.name} cannot be listed: {error}; load it with torch.load") from None
    keys = [str(key) for key in content] if isinstance(content, Mapping) else None
    facts = {
        "path": archive.name,
        "file_bytes": archive.size,
        **_lightning_facts(content),
        "top_level_keys": keys,
        "tensor_bytes": sum(record.size for record in archive.tensor_data),
        "tensors": [asdict(tensor) for tensor in tensors],
    }
    about = {
        "file": archive.name,
        "size": size_text(archive.size),
        "tensors": f"{len(tensors)}, {size_text(facts['tensor_bytes'])} in all",
        "Lightning": _text(facts.get("lightning_version")),
        "epoch": _text(facts.get("epoch")),
        "global step": _text(facts.get("global_step")),
        "top-level keys": _key_list(keys or []),
    }
    return Report(facts, parts=[header(about), _tensor_table(tensors)])


def _lightning_facts(content: Any) -> dict[str, Any]:
    if not isinstance(content, Mapping) or "pytorch-lightning_version" not in content:
        return {}
    names = {"pytorch-lightning_version": "lightning_version", "epoch": "epoch", "global_step": "global_step"}
    values = {short: content.get(name) for name, short in names.items()}
    return {name: value if isinstance(value, (int, str)) else None for name, value in values.items()}


def _entries(archive: Archive, found: Sequence[tuple[str, StoredTensor]]) -> list[TensorEntry]:
    sizes = {record.name: record.size for record in archive.tensor_data}
    names: dict[str, list[str]] = {}
    for name, tensor in found:
        if tensor.record is not None and sizes.get(tensor.record):
            names.setdefault(tensor.record, []).append(name)
    return [_entry(name, tensor, sizes, names.get(tensor.record or "", [])) for name, tensor in found]


def _entry(name: str, tensor: StoredTensor, sizes: Mapping[str, int], sharing: Sequence[str]) -> TensorEntry:
    itemsize = getattr(torch, tensor.dtype, torch.uint8).itemsize
    return TensorEntry(
        key=name,
        shape=tensor.shape,
        dtype=tensor.dtype,
        size=math.prod(tensor.shape) * itemsize,
        memory_size=sizes.get(tensor.record or "", 0),
        device=tensor.device,
        record=tensor.record,
        shared_with=next((other for other in sharing if other != name), None),
    )


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _key_list(keys: Sequence[str]) -> str:
    more = len(keys) - _MOST_KEYS
    return ", ".join(keys[:_MOST_KEYS]) + (f" and {more} more" if more > 0 else "") or "none"


def _tensor_table(tensors: Sequence[TensorEntry]) -> Table | str:
    if not tensors:
        return "it holds no tensors"
    result = table("key", "shape", "dtype", "size", "notes", numbers=["size"])
    for _, group in groupby(tensors, key=lambda tensor: tensor.key):
        parts = list(group)
        for number, tensor in enumerate(parts, start=1):
            part = f"part {number} of {len(parts)}" if len(parts) > 1 else ""
            shape = " × ".join(map(str, tensor.shape)) or "scalar"
            notes = ", ".join(filter(None, [part, *_notes(tensor)]))
            add_row(result, tensor.key, shape, tensor.dtype, size_text(tensor.size), notes)
    return result


def _notes(tensor: TensorEntry) -> list[str]:
    notes = []
    if tensor.device != "cpu":
        notes.append(tensor.device)
    if tensor.shared_with is not None:
        notes.append(f"shares memory with {tensor.shared_with}")
    elif tensor.memory_size > tensor.size:
        notes.append(f"saved with {size_text(tensor.memory_size)} of memory")
    return notes
