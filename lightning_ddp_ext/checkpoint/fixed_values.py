"""Detect unrecorded changes of saved values, such as those of persistent metrics."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ddp_ext.checksum import checksum, version_of


class FixedValues:
    """The values in a module's ``state_dict`` that must not change.

    These are all values except recorded tensors.

    Args:
        module: the module.
        recorded: returns the tensors whose changes are recorded elsewhere.
    """

    def __init__(self, module: nn.Module, recorded: Callable[[], Iterable[Tensor]]) -> None:
        self._module = module
        self._recorded = recorded
        self._at_first = self._contents()

    def find_changed(self) -> str | None:
        """Return the name of a value that has changed since the start, if any."""
        first = self._at_first
        now = self._contents()
        return next((name for name in {**first, **now} if first.get(name) != now.get(name)), None)

    def _contents(self) -> dict[str, Any]:
        # A state_dict has other tensor objects, which share the memory of the originals.
        recorded = [each for each in self._recorded() if _is_dense(each)]
        # By address: the bytes of the largest tensor there, since views share an address.
        largest_at: dict[int, int] = {}
        for each in recorded:
            largest_at[each.data_ptr()] = max(each.nbytes, largest_at.get(each.data_ptr(), 0))
        empty = [each for each in recorded if not each.numel()]  # they have no address

        def is_recorded(value: Any) -> bool:
            if not _is_dense(value):
                return False
            if value.numel():
                return bool(value.nbytes <= largest_at.get(value.data_ptr(), 0))
            return any(each.device == value.device and each.is_set_to(value) for each in empty)

        state = self._module.state_dict()
        return {name: _content_of(value) for name, value in state.items() if not is_recorded(value)}


def _is_dense(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _content_of(value: Any) -> Any:
    """Return what represents a value in a later comparison."""
    if isinstance(value, Tensor):
        return value.shape, int(checksum(value)) if _is_dense(value) else version_of(value)
    if isinstance(value, (list, tuple)):  # such as a metric's values of each batch
        return [_content_of(each) for each in value]
    if isinstance(value, Mapping):
        return {name: _content_of(each) for name, each in value.items()}
    return pickle.dumps(value)
