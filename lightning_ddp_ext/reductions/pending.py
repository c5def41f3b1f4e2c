"""A tensor that is reduced before its first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from typing_extensions import override

from lightning_ddp_ext.nested import values_of


class PendingTensor(Tensor):
    """A view of a tensor that is not reduced yet.

    Any operation on it first calls ``reduce_now``. From then on it is an ordinary
    tensor.
    """

    reduce_now: Callable[[], object]

    @staticmethod
    def of(tensor: Tensor, reduce_now: Callable[[], object]) -> PendingTensor:
        """Return a view of a tensor, for its readers.

        ``reduce_now`` must fill the tensor, and call :meth:`settle`.
        """
        pending = tensor.as_subclass(PendingTensor)
        pending.reduce_now = reduce_now
        return pending

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in values_of((args, kwargs)):
            if isinstance(value, PendingTensor):
                value.reduce_now()
        return func(*args, **(kwargs or {}))

    def settle(self) -> None:
        """Make this an ordinary tensor."""
        vars(self).pop("reduce_now")
        self.__class__ = Tensor  # type: ignore[assignment] # as torch's uninitialised parameters do
