"""Read a checkpoint file on one rank: checked, with tensors in this process's own memory, and refusals explained."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import UntypedStorage

from lightning_ddp_ext.checkpoint.map_location import Placement
from lightning_ddp_ext.checkpoint.structure import Structure
from lightning_ddp_ext.checkpoint.zip_crc import Archive, Record, find_damage
from lightning_ddp_ext.errors import CheckpointError, DamagedCheckpointError, UnsafeCheckpointError

# Bytes: a file up to this size is read rather than mapped, which is faster and takes no more memory than this.
_SMALL_FILE = 16 << 20
_REFUSED = re.compile(r"GLOBAL ([\w.]+)")


def refuse_damage(
    archive: Archive,
    records: Iterable[Record],
    *,
    threads: int = 1,
    on_progress: Callable[[int], None] | None = None,
) -> None:
    """Check these records, and those that are no tensors.

    Raises:
        DamagedCheckpointError: some have been altered; names their tensors.
    """
    damaged = find_damage(archive, archive.skeleton)
    damaged = damaged or find_damage(archive, records, threads=threads, on_progress=on_progress)
    if damaged:
        raise damage_error(archive, damaged)


def damage_error(archive: Archive, damaged: Iterable[Record]) -> DamagedCheckpointError:
    """The error that names the tensors in these records; a record without a known tensor goes by its own name."""
    by_record = names_by_record(archive, list(damaged))
    names = tuple(dict.fromkeys(name for record, names in by_record.items() for name in names or [record]))
    listed = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return DamagedCheckpointError(
        f"checkpoint {archive.name} is damaged: {listed} differ{'s' if len(names) == 1 else ''} from what was written "
        "(CRC-32); use an earlier checkpoint, or copy the file again, or read it all the same with verify=False",
        names,
    )


def names_by_record(archive: Archive, damaged: list[Record]) -> dict[str, list[str]]:
    """For each damaged record the tensors in it; none where the file's structure is damaged, too."""
    nameless: dict[str, list[str]] = {record.name: [] for record in damaged}
    if not all(record.is_tensor_data for record in damaged):
        return nameless
    try:
        return Structure(archive).names_of(damaged)
    except Exception:  # there is no end to what a malformed pickle can raise
        return nameless


def read(archive: Archive, place: Placement, *, weights_only: bool | None = None, map_weights: bool = False) -> Any:
    """Unpickle a checkpoint that has been checked.

    Args:
        archive: the file.
        place: puts each tensor's memory on its device.
        weights_only: as for ``torch.load``.
        map_weights: whether weights of the ``state_dict`` may stay mapped from the file, because they are copied into
            the model and dropped. Everything else is always copied into memory of this process's own.

    Raises:
        DamagedCheckpointError: it cannot be unpickled.
        UnsafeCheckpointError: ``weights_only`` forbids what is in it.
        CheckpointError: a class that it needs cannot be imported.
    """
    if archive.records is None or archive.size <= _SMALL_FILE:
        return load(archive, place, weights_only, mmap=False)
    order, weights = _order_and_weights(archive) if map_weights else ([], set())
    keys = iter(order)

    def own_memory(storage: UntypedStorage, location: str) -> UntypedStorage:
        address, key = storage.data_ptr(), next(keys, None)
        placed = place(storage, location)
        is_mapped = placed.device.type == "cpu" and placed.data_ptr() == address
        stays = key in weights and storage.nbytes() > 0  # an empty slice would keep the file mapped
        return placed.clone() if is_mapped and not stays else placed

    return load(archive, own_memory, weights_only)


def _order_and_weights(archive: Archive) -> tuple[list[str], set[str]]:
    try:
        structure = Structure(archive)
        return structure.order, structure.weights()
    except Exception:  # torch.load finds out what is wrong with it
        return [], set()


def load(archive: Archive, place: Placement, weights_only: bool | None, *, mmap: bool = True) -> Any:
    """``torch.load`` with errors that say what to do.

    Args:
        archive: the file.
        place: puts each tensor's memory on its device.
        weights_only: as for ``torch.load``.
        mmap: whether to map the file, which one from before torch 1.6 never is.

    Raises:
        CheckpointError: one of its kinds, as for :func:`read`.
    """
    options: dict[str, Any] = {} if weights_only is None else {"weights_only": weights_only}
    options["map_location"] = place  # torch's annotation knows no untyped storages, which is what it passes
    may_be_refused = weights_only is not False and archive.records is not None
    with errors_explained(archive.name, may_be_refused=may_be_refused):
        return torch.load(archive.path, mmap=mmap and archive.records is not None, **options)


@contextmanager
def errors_explained(name: str, *, may_be_refused: bool = False) -> Iterator[None]:
    """Raise the errors of unpickling the file ``name`` in words that say what to do."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise _explained(name, error, may_be_refused) from None
    except CheckpointError:
        raise
    except (ImportError, AttributeError) as error:
        raise CheckpointError(
            f"checkpoint {name} needs a class that cannot be imported here: {error}; make its module importable"
        ) from error
    except Exception as error:  # there is no end to what garbage can do
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DamagedCheckpointError(
            f"checkpoint {name} cannot be read: {reason}; use an earlier checkpoint"
        ) from error


def _explained(name: str, error: pickle.UnpicklingError, may_be_refused: bool) -> CheckpointError:
    refused = _REFUSED.search(str(error))
    if refused is None and not may_be_refused:
        return DamagedCheckpointError(f"checkpoint {name} cannot be unpickled: {error}")
    if refused is None:
        return UnsafeCheckpointError(
            f"checkpoint {name} holds something that weights_only=True does not allow: {error}\n"
            "if you trust the file, pass weights_only=False"
        )
    kind = refused[1]
    allow = "" if "blocked" in str(error) else f"call torch.serialization.add_safe_globals([{kind}]) before, or "
    return UnsafeCheckpointError(
        f"checkpoint {name} holds {kind}, which weights_only=True refuses; nothing of it has been run. If you "
        f"trust the file, {allow}pass weights_only=False"
    )
