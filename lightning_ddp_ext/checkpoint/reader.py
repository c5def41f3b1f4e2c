"""Read a checkpoint file on one rank: mapped into memory where that can be, checked, and with refusals explained."""

from __future__ import annotations

import pickle
import re
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import UntypedStorage

from lightning_ddp_ext.checkpoint.archive import Archive, Record, find_damage
from lightning_ddp_ext.checkpoint.device_map import Placement, is_accelerator
from lightning_ddp_ext.checkpoint.mapping import make_own
from lightning_ddp_ext.checkpoint.tensors import has_storage, named_tensors
from lightning_ddp_ext.errors import CheckpointError, DamagedCheckpointError, UnsafeCheckpointError

_REFUSED = re.compile(r"GLOBAL ([\w.]+)")
# Tensors up to this size are copied out of the file at once, up to so much in all: scores, counters, scalars. What is
# left mapped is then few and large, and whether any of it is still in use afterwards is soon found out.
_SMALL = 1 << 14
_SMALL_IN_ALL = 4 << 20


@dataclass(frozen=True)
class Memory:
    """The memory of one or several tensors: where it was in the file, and where it is now."""

    record: Record
    location: str
    """The device that it was saved from."""
    mapped_at: int | None
    """Its address, if it is the file itself that is there; somebody may have moved it elsewhere since."""
    alive: Callable[[], UntypedStorage | None]
    """Held weakly: what nobody uses any more needs no care."""

    @property
    def mapped(self) -> UntypedStorage | None:
        """It, if it is in use and the file is where it is."""
        storage = self.alive() if self.mapped_at is not None else None
        return storage if storage is not None and storage.data_ptr() == self.mapped_at else None


@dataclass
class Content:
    """A checkpoint as it was read: its value, and its tensors' memory in the order of their appearance.

    ``memory`` has ``None`` for an empty tensor, and is empty where the file does not tell.
    """

    value: Any
    archive: Archive
    memory: list[Memory | None] = field(default_factory=list)

    def names_of(self, records: Iterable[Record]) -> tuple[str, ...]:
        """The tensors whose memory is in these records; a record that is no tensor's goes by its own name."""
        wanted = {record.name for record in records}
        record_at = {
            storage.data_ptr(): memory.record.name
            for memory in self.memory
            if memory is not None and memory.record.name in wanted and (storage := memory.alive()) is not None
        }
        found = [
            (name, record_at[pointer])
            for name, tensor in named_tensors(self.value)
            if has_storage(tensor) and (pointer := tensor.untyped_storage().data_ptr()) in record_at
        ]
        nameless = wanted - {record for _, record in found}
        return (*dict.fromkeys(name for name, _ in found), *sorted(nameless))

    def move_accelerator_tensors(self, entries: Any, device: torch.device) -> None:
        """Put tensors below ``entries`` that were saved from an accelerator, and are on the CPU now, on ``device``."""
        pointers = {
            storage.data_ptr()
            for memory in self.memory
            if memory is not None and is_accelerator(memory.location) and (storage := memory.alive()) is not None
        }
        for _, tensor in named_tensors(entries):
            if has_storage(tensor) and tensor.untyped_storage().data_ptr() in pointers:
                tensor.data = tensor.to(device)


def read(archive: Archive, place: Placement, *, weights_only: bool | None = None, verify: bool = True) -> Content:
    """Unpickle a checkpoint; its tensors stay in the file and are mapped, or, if it is an old one, they are read.

    The skeleton is checked before it is unpickled. Tensors are not: see
    :func:`~lightning_ddp_ext.checkpoint.archive.find_damage`.

    Args:
        archive: the file.
        place: what becomes of each tensor's memory.
        weights_only: as ``torch.load`` has it.
        verify: whether to check the skeleton.

    Raises:
        DamagedCheckpointError: it cannot be unpickled, or its skeleton has been altered.
        UnsafeCheckpointError: ``weights_only`` forbids what is in it.
        CheckpointError: a class that it needs cannot be imported.
    """
    if archive.records is None:
        return Content(load(archive, place, weights_only), archive)
    if verify and (damaged := find_damage(archive, archive.skeleton)):
        raise damage_error(archive, [record.name for record in damaged])
    seen = _Seen(place)
    value = load(archive, seen, weights_only)
    return Content(value, archive, _with_records(archive, seen.pieces))


def read_alone(
    archive: Archive,
    place: Placement,
    *,
    weights_only: bool | None = None,
    verify: bool = True,
    threads: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> Any:
    """A checkpoint in this process's own memory, all of it checked; arguments and errors as for :func:`read`."""
    content = read(archive, place, weights_only=weights_only, verify=verify)
    if verify:
        refuse_damage(content, archive.tensor_data, threads=threads, on_progress=on_progress)
    detach(content)
    return content.value


def refuse_damage(
    content: Content,
    records: Iterable[Record],
    *,
    threads: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Check these records.

    Raises:
        DamagedCheckpointError: some have been altered; names their tensors.
    """
    damaged = find_damage(content.archive, records, threads=threads, on_progress=on_progress)
    if damaged:
        raise damage_error(content.archive, content.names_of(damaged))


def damage_error(archive: Archive, names: Iterable[str]) -> DamagedCheckpointError:
    """The error that names what is damaged."""
    names = tuple(names)
    listed = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return DamagedCheckpointError(
        f"checkpoint {archive.name} is damaged: {listed} differ{'s' if len(names) == 1 else ''} from what was written "
        "(CRC-32); use an earlier checkpoint, or copy the file again, or read it all the same with verify=False",
        names,
    )


def load(archive: Archive, place: Placement, weights_only: bool | None, path: str | None = None) -> Any:
    """``torch.load`` with errors that say what to do; mapped, unless the file is an old one.

    Args:
        archive: the file.
        place: what becomes of each tensor's memory.
        weights_only: ``None`` leaves the choice to torch.
        path: where else the file can be opened.
    """
    options: dict[str, Any] = {} if weights_only is None else {"weights_only": weights_only}
    try:
        # The annotation knows no untyped storages, which is what torch passes.
        options["map_location"] = place
        return torch.load(path or archive.path, mmap=archive.records is not None, **options)
    except pickle.UnpicklingError as error:
        raise _explained(archive, error, weights_only) from None
    except CheckpointError:
        raise
    except (ImportError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {archive.name} needs a class that cannot be imported here: {error}; make its module importable"
        ) from error
    except Exception as error:  # there is no end to what garbage can do
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DamagedCheckpointError(
            f"checkpoint {archive.name} cannot be read: {reason}; use an earlier checkpoint"
        ) from error


def _explained(archive: Archive, error: pickle.UnpicklingError, weights_only: bool | None) -> CheckpointError:
    refused = _REFUSED.search(str(error))
    if refused is None:
        if weights_only is False or archive.records is None:
            return DamagedCheckpointError(f"checkpoint {archive.name} cannot be unpickled: {error}")
        return UnsafeCheckpointError(
            f"checkpoint {archive.name} holds something that weights_only=True does not allow: {error}\n"
            "if you trust the file, pass weights_only=False"
        )
    name = refused[1]
    allow = "" if "blocked" in str(error) else f"call torch.serialization.add_safe_globals([{name}]) before, or "
    return UnsafeCheckpointError(
        f"checkpoint {archive.name} holds {name}, which weights_only=True refuses; nothing of it has been run. If you "
        f"trust the file, {allow}pass weights_only=False"
    )


class _Seen:
    """Notes each piece of memory that ``torch.load`` makes, and what becomes of it."""

    def __init__(self, place: Placement) -> None:
        self._place = place
        self._small_left = _SMALL_IN_ALL
        self.pieces: list[_Piece] = []

    def __call__(self, storage: UntypedStorage, location: str) -> UntypedStorage:
        pointer, size = storage.data_ptr(), storage.nbytes()
        placed = self._place(storage, location)
        is_mapped = placed.device.type == "cpu" and placed.data_ptr() == pointer
        if is_mapped and size <= min(_SMALL, self._small_left):  # an empty one, too, would keep the file mapped
            self._small_left -= size
            placed, is_mapped = placed.clone(), False
        self.pieces.append(_Piece(pointer, size, location, pointer if is_mapped else None, weakref.ref(placed)))
        return placed


@dataclass(frozen=True)
class _Piece:
    pointer: int
    size: int
    location: str
    mapped_at: int | None
    alive: Callable[[], UntypedStorage | None]


def _with_records(archive: Archive, pieces: list[_Piece]) -> list[Memory | None]:
    """The record of each piece of memory, which torch does not tell: found by their distances from one another."""
    at = {record.offset: record for record in archive.tensor_data if record.size}
    filled = [piece for piece in pieces if piece.size]
    for candidate in at.values() if filled else ():
        base = filled[0].pointer - candidate.offset
        if all(piece.pointer - base in at and at[piece.pointer - base].size >= piece.size for piece in filled):
            return [
                Memory(at[piece.pointer - base], piece.location, piece.mapped_at, piece.alive) if piece.size else None
                for piece in pieces
            ]
    if filled:
        raise DamagedCheckpointError(
            f"checkpoint {archive.name} is damaged: its tensors are not where its directory says; use an earlier one"
        )
    return [None] * len(pieces)


def detach(content: Content) -> None:
    """Give memory of its own to everything that lives on and is still backed by the file, whoever has it.

    Addresses stay what they were. To be called when the rest of the checkpoint has been let go of.
    """
    survivors = [
        (storage, memory.record)
        for memory in content.memory
        if memory is not None and (storage := memory.mapped) is not None
    ]
    if survivors:
        storage, record = survivors[0]
        needed = [(storage.data_ptr(), storage.nbytes()) for storage, _ in survivors]
        make_own(storage.data_ptr() - record.offset, content.archive.size, needed)
