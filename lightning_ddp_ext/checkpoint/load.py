"""Read a checkpoint file on one rank: checked, with tensors in this process's own memory, and refusals explained."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_ext.checkpoint.key_prefixes import is_plain_state_dict
from lightning_ddp_ext.checkpoint.map_location import Placement
from lightning_ddp_ext.checkpoint.skeleton import identity_of, join, split
from lightning_ddp_ext.checkpoint.structure import names_by_record
from lightning_ddp_ext.checkpoint.zip_crc import Archive, Record, find_damage
from lightning_ddp_ext.errors import CheckpointError, DamagedCheckpointError, UnsafeCheckpointError

# Bytes: a file up to this size is read rather than mapped, which is faster and takes no more memory than this.
_SMALL_FILE = 16 << 20
_REFUSED = re.compile(r"GLOBAL ([\w.]+)")


def refuse_damage(archive: Archive, records: Iterable[Record], *, threads: int = 1) -> None:
    """Check these records, and those that are no tensors.

    Raises:
        DamagedCheckpointError: some have been altered; names their tensors.
    """
    damaged = find_damage(archive, archive.skeleton) or find_damage(archive, records, threads=threads)
    if damaged:
        raise damage_error(archive, damaged)


def damage_error(archive: Archive, damaged: Iterable[Record]) -> DamagedCheckpointError:
    """The error that names the tensors in these records; a record without a known tensor goes by its own name."""
    by_record = names_by_record(archive, damaged)
    names = tuple(dict.fromkeys(name for record, names in by_record.items() for name in names or [record]))
    listed = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
    return DamagedCheckpointError(
        f"checkpoint {archive.name} is damaged: {listed} differ{'s' if len(names) == 1 else ''} from what was written "
        "(CRC-32); use an earlier checkpoint, or copy the file again, or read it all the same with verify=False",
        names,
    )


def read(archive: Archive, place: Placement, *, weights_only: bool | None = None, map_weights: bool = False) -> Any:
    """Unpickle a checkpoint that has been checked.

    Args:
        archive: the file.
        place: puts each tensor's memory on its device.
        weights_only: as for ``torch.load``.
        map_weights: whether weights of the ``state_dict`` may stay mapped from the file, because they are copied into
            the model and dropped; ``place`` must leave them where they are. Everything else is always in memory of this
            process's own.

    Raises:
        CheckpointError: one of its kinds, as for :func:`load`.
    """
    if map_weights and archive.size > _SMALL_FILE:
        mapped = load(archive, place, weights_only, mmap=True)
        try:
            return _copied_but_for_weights(mapped)
        except Exception:  # there is no state_dict, or an object that can be unpickled, but not pickled again
            del mapped
    return load(archive, place, weights_only, mmap=False)


def _copied_but_for_weights(content: Any) -> Any:
    if is_plain_state_dict(content):
        return _copied_but_for_weights({"state_dict": content})["state_dict"]
    state_dict = content["state_dict"]
    weights = {name: value for name, value in state_dict.items() if _is_only_copied(name, value)}
    others = [{**content, "state_dict": None}, [value for name, value in state_dict.items() if name not in weights]]
    mapped = {identity_of(weight.untyped_storage()) for weight in weights.values() if weight.numel()}
    mapped -= {identity_of(storage) for storage in split(others)[1]}
    pickled, storages = split(content)
    return join(pickled, [storage if identity_of(storage) in mapped else storage.clone() for storage in storages])


def _is_only_copied(name: str, value: Any) -> bool:
    """Whether loading the model copies it, and keeps nothing of it."""
    is_plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided and not value.is_quantized
    return is_plain and not name.endswith("_extra_state")


def load(archive: Archive, place: Placement, weights_only: bool | None, *, mmap: bool) -> Any:
    """``torch.load`` with errors that say what to do; a file from before torch 1.6 is never mapped.

    Raises:
        DamagedCheckpointError: it cannot be unpickled.
        UnsafeCheckpointError: ``weights_only`` forbids what is in it.
        CheckpointError: a class that it needs cannot be imported.
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
    kind = refused[1] if refused else f"something ({error})"
    may_be_allowed = refused and "blocked" not in str(error)
    allow = f"call torch.serialization.add_safe_globals([{kind}]) before, or " if may_be_allowed else ""
    return UnsafeCheckpointError(
        f"checkpoint {name} holds {kind}, which weights_only=True refuses; nothing of it has been run. If you "
        f"trust the file, {allow}pass weights_only=False"
    )
