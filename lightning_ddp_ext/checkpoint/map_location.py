"""``map_location``: on which device the tensors of a file are to be, in all the forms that ``torch.load`` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import UntypedStorage

from lightning_ddp_ext.errors import CheckpointError, OptionError

MapLocation = str | torch.device | Mapping[str, str] | Callable[..., Any] | None
# Takes the memory of a tensor, in the file or on the CPU, and the device that it was saved from; gives it in its place.
Placement = Callable[[UntypedStorage, str], UntypedStorage]


def placement(map_location: MapLocation) -> Placement:
    """What ``map_location`` does with the memory of one tensor.

    ``None`` leaves all on the CPU, from where a model and its optimisers take it to their own device. A placement
    raises :class:`~lightning_ddp_ext.errors.CheckpointError` where there is no such device.

    Raises:
        OptionError: it is neither a device, nor a mapping of devices, nor callable.
    """
    if map_location is None:
        return lambda storage, location: storage
    if isinstance(map_location, (str, torch.device)):
        target = _device(map_location)
        return lambda storage, location: _restored(storage, location, target)
    if isinstance(map_location, Mapping):
        devices = {_device(source): _device(target) for source, target in map_location.items()}
        return lambda storage, location: _restored(storage, location, devices.get(location, location))
    if not callable(map_location):
        raise OptionError(
            f"map_location must be a device, its name, a mapping of names such as {{'cuda:0': 'cuda:1'}}, or callable "
            f"(got {map_location!r})"
        )

    def by_the_user(storage: UntypedStorage, location: str) -> UntypedStorage:
        try:
            result = map_location(storage, location)
        except Exception as error:
            raise CheckpointError(f"map_location failed for a tensor from {location}: {error!r}") from error
        return _restored(storage, location, location) if result is None else result

    return by_the_user


def _device(name: Any) -> str:
    try:
        return str(torch.device(name))
    except (RuntimeError, TypeError):
        raise OptionError(f"map_location names {name!r}, which is no device; write 'cpu', 'cuda:0', ...") from None


def _restored(storage: UntypedStorage, location: str, target: str) -> UntypedStorage:
    try:
        return torch.serialization.default_restore_location(storage, target)  # type: ignore[no-any-return]
    except RuntimeError as error:
        reason = str(error).partition(". ")[0]
        raise CheckpointError(
            f"a tensor from {location} cannot be put on {target}: {reason}; pass another map_location"
        ) from error
