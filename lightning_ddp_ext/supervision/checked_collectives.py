"""For debugging: collectives that a user's code calls begin on all ranks together, or say who is somewhere else.

Without, a rank that skips a collective leaves the others waiting in it, or has them take its next one for it: gloo
then ends the process if the sizes differ, and mixes up the data if they do not.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.rendezvous.process_context import ProcessContext
from lightning_ddp_ext.supervision.call_site import call_site

_SAME_SHAPE = ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "all_gather_single")
_OTHERS = (
    "all_gather",
    "all_gather_object",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)


class CheckedCollectives:
    """Has the functions of ``torch.distributed`` meet first, where they are for all ranks and in the main thread.

    What was imported by name before, and what torch calls in C++, as DDP does for gradients, is not seen.
    """

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._before: dict[str, Callable[..., Any]] = {}

    def install(self) -> None:
        """From now on, until :meth:`restore`."""
        for name in (*_SAME_SHAPE, *_OTHERS):
            function = getattr(dist, name, None)
            if function is not None and name not in self._before:
                self._before[name] = function
                setattr(dist, name, self._checked(name, function))

    def restore(self) -> None:
        """Put torch's functions back."""
        while self._before:
            setattr(dist, *self._before.popitem())

    def _checked(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind_partial(*args, **kwargs).arguments
            if threading.current_thread() is threading.main_thread() and self._is_for_all(given.get("group")):
                self._context.barriers.enter(_described(name, given), call_site())
            return function(*args, **kwargs)

        return checked

    def _is_for_all(self, group: Any) -> bool:
        if not dist.is_initialized():
            return False
        return group is None or dist.get_process_group_ranks(group) == list(range(self._context.world.world_size))


def _described(name: str, given: dict[str, Any]) -> str:
    """The call, with what must be the same on all ranks."""
    tensors = [value for value in given.values() if isinstance(value, Tensor)]
    if name not in _SAME_SHAPE or not tensors:
        return name
    tensor = tensors[-1]  # the input, where there is an output, too
    return f"{name} of {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
