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
    choose = _chosen_device(map_location)

    def place(storage: UntypedStorage, location: str) -> UntypedStorage:
        try:
            chosen = choose(storage, location)
            if isinstance(chosen, str):
                chosen = torch.serialization.default_restore_location(storage, chosen)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition(". ")[0]
            raise CheckpointError(
                f"map_location={map_location!r} cannot place a tensor from {location}: {reason}; pass another one"
            ) from error
        return chosen  # type: ignore[no-any-return]

    return place


def _chosen_device(map_location: MapLocation) -> Callable[[UntypedStorage, str], Any]:
    """What says for the memory of one tensor to which device it goes, or gives it there."""
    if isinstance(map_location, (str, torch.device)):
        target = _device(map_location)
        return lambda storage, location: target
    if isinstance(map_location, Mapping):
        devices = {_device(source): _device(target) for source, target in map_location.items()}
        return lambda storage, location: devices.get(location, location)
    if callable(map_location):

        def by_the_user(storage: UntypedStorage, location: str) -> Any:
            placed = map_location(storage, location)
            return location if placed is None else placed

        return by_the_user
    raise OptionError(
        f"map_location must be a device, its name, a mapping of names such as {{'cuda:0': 'cuda:1'}}, or callable "
        f"(got {map_location!r})"
    )


def _device(name: Any) -> str:
    try:
        return str(torch.device(name))
    except (RuntimeError, TypeError):
        raise OptionError(f"map_location names {name!r}, which is no device; write 'cpu', 'cuda:0', ...") from None
