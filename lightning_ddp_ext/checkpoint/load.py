"""Read a checkpoint file on one rank, and place its tensors on devices or in memory."""

from __future__ import annotations

import copy
import pickle
import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from mmap import MAP_SHARED
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.serialization import default_restore_location, set_default_mmap_options

from lightning_ddp_ext.checkpoint.archive import Archive, is_system_error, unreadable
from lightning_ddp_ext.checkpoint.key_prefixes import is_plain_state_dict
from lightning_ddp_ext.checkpoint.snapshot import join, split
from lightning_ddp_ext.errors import (
    CheckpointError,
    ConfigurationError,
    DamagedCheckpointError,
    UnsafeCheckpointError,
)

MapLocation = str | torch.device | Mapping[str, str] | Callable[..., Any] | None
_MapLocation = str | dict[str, str] | Callable[..., Any]
# Takes a tensor's storage, mapped or in CPU memory, and the device that it was saved
# from; returns the placed storage.
Placement = Callable[[UntypedStorage, str], UntypedStorage]

# Files up to this size are read instead of mapped, which is faster.
_SMALL_FILE_BYTES = 16 << 20
# The class in torch's text about an object that weights_only=True refuses.
_REFUSED_CLASS = re.compile(r"GLOBAL ([\w.]+)")


@dataclass(frozen=True)
class LoadOptions:
    """Options for reading a checkpoint, the same on every rank.

    Attributes:
        map_location: as for ``torch.load``, except that ``None`` leaves tensors on the
            CPU.
        weights_only: as for ``torch.load``.
        verify: whether checksums are checked.
    """

    map_location: MapLocation = None
    weights_only: bool | None = None
    verify: bool = True


def placement(map_location: MapLocation) -> Placement:
    """Return the function that places a tensor's storage according to ``map_location``.

    ``None`` leaves all storages on the CPU; the model and its optimisers copy them to
    their own devices. The returned function raises
    :class:`~lightning_ddp_ext.errors.CheckpointError` if the device does not exist.

    Raises:
        ConfigurationError: ``map_location`` is not a device, a mapping of devices, or a
            callable.
    """
    chosen = _normalised(map_location)

    def place(storage: UntypedStorage, location: str) -> UntypedStorage:
        try:
            return _placed(storage, location, chosen)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition(". ")[0]
            raise CheckpointError(
                f"map_location={map_location!r} cannot place a tensor saved from {location}:"
                f" {reason}; pass another one"
            ) from error

    return place


def _placed(storage: UntypedStorage, location: str, chosen: _MapLocation) -> UntypedStorage:
    """Return a storage that was saved from ``location`` on its new device."""
    target = location
    if callable(chosen):
        users_choice: UntypedStorage | None = chosen(storage, location)
        if users_choice is not None:
            return users_choice
    elif isinstance(chosen, dict):
        target = chosen.get(location, location)
    else:
        target = chosen
    placed: UntypedStorage = default_restore_location(storage, target)
    return placed


def _normalised(map_location: MapLocation) -> _MapLocation:
    """Return the name of a device, a dict of such names, or the user's callable."""
    if map_location is None:
        return "cpu"
    if isinstance(map_location, (str, torch.device)):
        return _device(map_location)
    if isinstance(map_location, Mapping):
        return {_device(old): _device(new) for old, new in map_location.items()}
    if callable(map_location):
        return map_location
    raise ConfigurationError(
        "map_location must be a device, a device name, a mapping of device names such as"
        f" {{'cuda:0': 'cuda:1'}}, or a callable (got {map_location!r})"
    )


def _device(name: Any) -> str:
    try:
        return str(torch.device(name))
    except (RuntimeError, TypeError):
        raise ConfigurationError(
            f"map_location contains {name!r}, which is not a device; write a name such as 'cpu' or"
            " 'cuda:0'"
        ) from None


def read(
    archive: Archive,
    options: LoadOptions,
    *,
    map_weights: bool = False,
    is_own_copy: bool = False,
) -> Any:
    """Unpickle a checkpoint.

    If ``options.verify`` is set, the caller must check its checksums.

    Args:
        archive: the file.
        options: how to read it.
        map_weights: whether weights in the ``state_dict`` may stay mapped from the
            file, because the caller copies them into the model and drops them.
            Everything else is copied into this process's own memory.
        is_own_copy: whether the file is this process's own copy in memory; all tensors
            then use that memory, so that none is there twice.

    Raises:
        DamagedCheckpointError: the file cannot be unpickled because its bytes are
            wrong.
        UnsafeCheckpointError: ``weights_only`` forbids a class in the file.
        CheckpointError: a tensor cannot be placed, a class in the file cannot be
            imported or raises, or this process cannot read the file.
    """
    if is_own_copy:
        with set_default_mmap_options(MAP_SHARED):  # a change needs no memory either
            return _load(archive, options, mmap=True)
    is_large = archive.status.st_size > _SMALL_FILE_BYTES
    if map_weights and options.map_location is None and is_large:
        content = _load(archive, options, mmap=True)
        try:
            return _with_own_memory_except_weights(content)
        except Exception:  # the state_dict is missing, or some object cannot be pickled again
            del content
    return _load(archive, options, mmap=False)


def _with_own_memory_except_weights(content: Any) -> Any:
    """Return a mapped checkpoint, or plain state dict, whose weights alone stay mapped."""
    checkpoint = {"state_dict": content} if is_plain_state_dict(content) else content
    state_dict = checkpoint["state_dict"]
    weights = {name: value for name, value in state_dict.items() if _is_only_copied(name, value)}
    without_weights = copy.copy(state_dict)  # of the same type, with the module versions
    without_weights.update(dict.fromkeys(weights))  # keeps the order of names
    pickled, storages = split({**checkpoint, "state_dict": without_weights})
    copied = join(pickled, [storage.clone() for storage in storages])
    copied["state_dict"].update(weights)
    return copied if checkpoint is content else copied["state_dict"]


def _is_only_copied(name: str, value: Any) -> bool:
    """Whether loading the model copies the value and keeps no reference to it."""
    is_plain = (
        type(value) in (Tensor, nn.Parameter)
        and value.layout == torch.strided
        and not value.is_quantized
    )
    return is_plain and not name.endswith("_extra_state")


def _load(archive: Archive, options: LoadOptions, *, mmap: bool) -> Any:
    """Call ``torch.load``, and raise errors with a remedy.

    Files from before torch 1.6 are never mapped.
    """
    place: Placement | str = "cpu"
    if _normalised(options.map_location) != "cpu":
        # Torch refuses functions for tensors of classes with __torch_dispatch__.
        place = placement(options.map_location)
    own_options: dict[str, Any] = {"map_location": place, "mmap": mmap and bool(archive.records)}
    if options.weights_only is not None:
        own_options["weights_only"] = options.weights_only
    try:
        return torch.load(archive.path, **own_options)
    except CheckpointError:
        raise
    except Exception as error:  # damaged files and users' classes can raise any error
        is_in_message = isinstance(error, pickle.UnpicklingError)
        raise _explained(archive, error, options) from (None if is_in_message else error)


def _explained(archive: Archive, error: Exception, options: LoadOptions) -> CheckpointError:
    """Return the checkpoint error for an error that ``torch.load`` raised.

    The file counts as damaged unless its checksums or the kind of error show otherwise.

    Raises:
        DamagedCheckpointError: a record other than a tensor was altered.
    """
    if is_system_error(error):
        return unreadable(archive.name, error)
    archive.check(())
    if isinstance(error, pickle.UnpicklingError):
        match = _REFUSED_CLASS.search(str(error))
        if match:
            return _unsafe(archive.name, error, match[1])
        if archive.records and options.weights_only is not False:
            return _unsafe(archive.name, error, None)
    if isinstance(error, (ImportError, AttributeError)):  # of a class in the file
        return unreadable(archive.name, error)
    if archive.has_checksums and not _is_from_torchs_reader(error):
        return unreadable(archive.name, error)
    reason = f"{type(error).__name__}: {error}".partition("\n")[0]
    return DamagedCheckpointError(
        f"checkpoint {archive.name} cannot be unpickled: {reason}; use an earlier checkpoint"
    )


def _is_from_torchs_reader(error: Exception) -> bool:
    """Whether torch's reader of archives raised the error.

    It detects damage outside of the records, which no checksum covers.
    """
    raising_file = traceback.extract_tb(error.__traceback__)[-1].filename
    return type(error) is RuntimeError and raising_file == torch.serialization.__file__


def _unsafe(name: str, error: Exception, refused: str | None) -> UnsafeCheckpointError:
    """Return the error for a class that ``weights_only`` refuses, if torch names one."""
    content = refused or f"an object ({error})"
    remedy = "pass weights_only=False"
    if refused and "blocked" not in str(error):
        remedy = f"call torch.serialization.add_safe_globals([{refused}]) first, or {remedy}"
    return UnsafeCheckpointError(
        f"checkpoint {name} contains {content}, which weights_only=True refuses; none of its code"
        f" was run. If you trust the file, {remedy}"
    )
