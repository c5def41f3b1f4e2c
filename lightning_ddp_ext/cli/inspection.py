"""What is in this checkpoint file, without running any of it?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.table import Table

from lightning_ddp_ext.checkpoint.load import refuse_damage
from lightning_ddp_ext.checkpoint.structure import StoredTensor, named_tensors, read_structure
from lightning_ddp_ext.checkpoint.zip_crc import Archive
from lightning_ddp_ext.cli.output import Report, add_row, header, report_on_file, size_text, table
from lightning_ddp_ext.errors import CheckpointError

# Of a plain state dict all names are top-level keys, and the table has them all.
_MOST_KEYS = 20


def inspect(path: str) -> Report:
    """Every tensor of a file, or URL."""
    return report_on_file(path, _listed, {"path": path})


def _listed(archive: Archive) -> Report:
    if not archive.records:
        raise CheckpointError(
            f"checkpoint {archive.name} is in the format from before torch 1.6, which cannot be listed without loading "
            "it; load it with torch.load, and save it again"
        )
    refuse_damage(archive, ())
    try:
        content = read_structure(archive)
        tensors = [_entry(name, tensor) for name, tensor in named_tensors(content)]
    except Exception as error:  # there is no end to what a malformed pickle can raise
        raise CheckpointError(f"checkpoint {archive.name} cannot be listed: {error}; load it with torch.load") from None
    keys = [str(key) for key in content] if isinstance(content, Mapping) else None
    facts = {
        "path": archive.name,
        "file_bytes": archive.size,
        **_lightning_facts(content),
        "top_level_keys": keys,
        "tensor_bytes": sum(record.size for record in archive.tensor_data),
        "tensors": tensors,
    }
    about = {
        "file": archive.name,
        "size": size_text(archive.size),
        "tensors": f"{len(tensors)}, {size_text(facts['tensor_bytes'])} in all",
        "Lightning": facts.get("lightning_version"),
        "epoch": facts.get("epoch"),
        "global step": facts.get("global_step"),
        "top-level keys": _key_list(keys or []),
    }
    return Report(facts, parts=[header(about), _tensor_table(tensors)])


def _lightning_facts(content: Any) -> dict[str, Any]:
    if not isinstance(content, Mapping) or "pytorch-lightning_version" not in content:
        return {}
    names = {"lightning_version": "pytorch-lightning_version", "epoch": "epoch", "global_step": "global_step"}
    values = {short: content.get(name) for short, name in names.items()}
    return {short: value if isinstance(value, (int, str)) else None for short, value in values.items()}


def _entry(name: str, tensor: StoredTensor) -> dict[str, Any]:
    size = math.prod(tensor.shape) * getattr(torch, tensor.dtype, torch.uint8).itemsize
    return {"key": name, "shape": tensor.shape, "dtype": tensor.dtype, "size": size}


def _key_list(keys: Sequence[str]) -> str:
    more = len(keys) - _MOST_KEYS
    return ", ".join(keys[:_MOST_KEYS]) + (f" and {more} more" if more > 0 else "") or "none"


def _tensor_table(tensors: Sequence[dict[str, Any]]) -> Table | str:
    if not tensors:
        return "it holds no tensors"
    result = table("key", "shape", "dtype", "size", numbers=["size"])
    for tensor in tensors:
        shape = " × ".join(map(str, tensor["shape"])) or "scalar"
        add_row(result, tensor["key"], shape, tensor["dtype"], size_text(tensor["size"]))
    return result
