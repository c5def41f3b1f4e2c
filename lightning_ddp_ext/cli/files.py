"""Which file did the user mean, and what is in it, without running any of it?"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, UntypedStorage

from lightning_ddp_ext.checkpoint.load import load, refuse_damage
from lightning_ddp_ext.checkpoint.structure import Structure
from lightning_ddp_ext.checkpoint.zip_crc import Archive, open_archive
from lightning_ddp_ext.cli.tensors import has_storage, named_tensors
from lightning_ddp_ext.errors import CheckpointError, DamagedCheckpointError

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


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


@dataclass(frozen=True)
class Reading:
    """A file that has been unpickled, its tensors being left where they are.

    Attributes:
        archive: the file.
        value: its content.
        devices: the device that each piece of memory was saved from, by its address.
        records: the record that each piece of memory is in, by its address.
    """

    archive: Archive
    value: Any
    devices: dict[int, str] = field(default_factory=dict)
    records: dict[int, str] = field(default_factory=dict)


def refuse_url(path: str) -> None:
    """Refuse what is not on this machine.

    Raises:
        CheckpointError: it is the URL of something.
    """
    if _URL.match(path):
        raise CheckpointError(f"{path} is a URL, and only local paths are read here; copy it to a local disk first")


def open_file(path: str, name: str = "") -> Archive:
    """The records of a local file.

    Args:
        path: where it is.
        name: what the user calls it, where that is something else.

    Raises:
        CheckpointError: there is none, it is cut off, or it is no checkpoint.
    """
    if not name:
        refuse_url(path)
    archive = open_archive(path, name)
    if archive.records is not None and all(record.name != "data.pkl" for record in archive.records):
        raise DamagedCheckpointError(
            f"checkpoint {archive.name} is not a checkpoint: it is a zip archive without data.pkl, not one of "
            "torch.save"
        )
    return archive


def read_file(archive: Archive, *, weights_only: bool = True, verify: bool = True) -> Reading:
    """What is in the file; tensors are mapped, except for those of an old file, which are read.

    Args:
        archive: the file.
        weights_only: whether code that it holds is refused.
        verify: whether to check the skeleton's checksums.

    Raises:
        CheckpointError: it cannot be read, or holds something that is refused.
    """
    seen: list[tuple[int, str]] = []

    def noted(storage: UntypedStorage, location: str) -> UntypedStorage:
        seen.append((storage.data_ptr() if storage.nbytes() else 0, location))
        return storage

    if verify:
        refuse_damage(archive, ())
    with warnings.catch_warnings():  # torch's, of kinds of tensors that are in beta or deprecated
        warnings.simplefilter("ignore")
        value = load(archive, noted, weights_only=weights_only)
    order = Structure(archive).order if archive.records is not None else []
    records = {address: f"data/{key}" for (address, _), key in zip(seen, order, strict=False)}
    return Reading(archive, value, {address: device for address, device in seen if address}, records)


def tensors_in(reading: Reading) -> list[TensorEntry]:
    """Every tensor, in the order of the file's content.

    Raises:
        CheckpointError: the content is too deep to look at.
    """
    try:
        found = list(named_tensors(reading.value))
    except RecursionError:
        raise CheckpointError(
            f"checkpoint {reading.archive.name} is nested too deeply to be listed; load it with torch.load"
        ) from None
    sharing: dict[int, list[str]] = {}
    for key, tensor in found:
        sharing.setdefault(_address(tensor), []).append(key)
    firsts: set[int] = set()
    entries = []
    for key, tensor in found:
        address = _address(tensor)
        names = sharing[address] if address else []
        other = names[:1] if address in firsts else names[1:2]
        firsts.add(address)
        entries.append(_entry(key, tensor, reading.devices, reading.records.get(address), "".join(other) or None))
    return entries


def _entry(
    key: str, tensor: Tensor, locations: Mapping[int, str], record: str | None, shared_with: str | None
) -> TensorEntry:
    address = _address(tensor)
    return TensorEntry(
        key=key,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        size=tensor.numel() * tensor.element_size(),
        memory_size=tensor.untyped_storage().nbytes() if address else 0,
        device=locations.get(address, str(tensor.device)),
        record=record,
        shared_with=shared_with,
    )


def _address(tensor: Tensor) -> int:
    """Of its memory; 0 where it has none."""
    return tensor.untyped_storage().data_ptr() if has_storage(tensor) else 0


def plain(value: Any) -> int | str | None:
    """A value that can be shown as it is; ``None`` for anything else."""
    return value if isinstance(value, (int, str)) else None
