"""What is in this checkpoint file?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.table import Table

from lightning_ddp_ext.checkpoint.zip_crc import Archive
from lightning_ddp_ext.cli.files import TensorEntry, open_file, plain, read_file, tensors_in
from lightning_ddp_ext.cli.output import Report, add_row, count_text, header, size_text, table
from lightning_ddp_ext.cli.tensors import payload_bytes
from lightning_ddp_ext.errors import CheckpointError, UnsafeCheckpointError

# Of a plain state dict all names are top-level keys, and the table has them all.
_MOST_KEYS = 20


def inspect(path: str, *, weights_only: bool = True) -> Report:
    """Every tensor of a file; its records only, where it cannot be unpickled.

    Args:
        path: of a local file.
        weights_only: whether code that it holds is refused.
    """
    try:
        archive = open_file(path)
    except CheckpointError as error:
        return Report({"path": path}, str(error))
    try:
        return _listed(archive, weights_only)
    except UnsafeCheckpointError as error:
        return _records_only(archive, f"{error}; here: --no-weights-only, which runs what the file holds")
    except CheckpointError as error:
        return _records_only(archive, str(error))


def _listed(archive: Archive, weights_only: bool) -> Report:
    reading = read_file(archive, weights_only=weights_only)
    tensors = tensors_in(reading)
    value = reading.value
    facts = {
        **_file_facts(archive),
        **_lightning_facts(value),
        "top_level_keys": [str(key) for key in value] if isinstance(value, Mapping) else None,
        "tensor_bytes": payload_bytes(value),
        "unlisted_records": _unlisted(archive, tensors),
        "tensors": [asdict(tensor) for tensor in tensors],
    }
    return Report(facts, parts=[_header(facts, value, len(tensors)), _tensor_table(tensors)])


def _file_facts(archive: Archive) -> dict[str, Any]:
    return {
        "path": archive.name,
        "file_bytes": archive.size,
        "format": "before torch 1.6" if archive.records is None else "zip",
    }


def _lightning_facts(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or "pytorch-lightning_version" not in value:
        return {}
    return {
        "lightning_version": plain(value["pytorch-lightning_version"]),
        "epoch": plain(value.get("epoch")),
        "global_step": plain(value.get("global_step")),
    }


def _unlisted(archive: Archive, tensors: Sequence[TensorEntry]) -> list[str]:
    """Memory of tensors that cannot be named, such as those of a class that keeps them to itself."""
    listed = {tensor.record for tensor in tensors}
    return [record.name for record in archive.tensor_data if record.size and record.name not in listed]


def _header(facts: Mapping[str, Any], value: Any, tensors: int) -> Table:
    keys = facts["top_level_keys"]
    return header(
        {
            "file": facts["path"],
            "size": size_text(facts["file_bytes"])
            + (", in the format from before torch 1.6: without checksums, read whole" * (facts["format"] != "zip")),
            "tensors": f"{tensors}, {size_text(facts['tensor_bytes'])} in all",
            "Lightning": _text(facts.get("lightning_version")),
            "epoch": _text(facts.get("epoch")),
            "global step": _text(facts.get("global_step")),
            "top-level keys": f"none: it holds one {type(value).__name__}" if keys is None else _key_list(keys),
            "not listed": ", ".join(facts["unlisted_records"]),
        }
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


def _records_only(archive: Archive, error: str) -> Report:
    records = archive.records or ()
    facts = {
        **_file_facts(archive),
        "records": [{"name": record.name, "size": record.size} for record in records],
    }
    listing = table("record", "size", numbers=["size"])
    for record in records:
        add_row(listing, record.name, size_text(record.size))
    about = {
        "file": archive.name,
        "size": size_text(archive.size),
        "tensors": f"not known; their memory is in {count_text(len(archive.tensor_data), 'record')}" * bool(records),
    }
    return Report(facts, error, [header(about), *([listing] if records else [])])
