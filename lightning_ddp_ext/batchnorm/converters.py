"""Which class makes a layer synchronise: ``SyncBatchNorm``, or one registered for layers that normalise themselves."""

from __future__ import annotations

import inspect
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_ddp_ext.batchnorm.layer import SyncBatchNorm
from lightning_ddp_ext.errors import ConversionError

_registered: dict[type, type[SyncBatchNorm]] = {}


def register_converter(cls: type[_BatchNorm], to_sync: type[SyncBatchNorm]) -> None:
    """Register how layers are synchronised that ``convert_sync_batchnorm`` would leave alone or get wrong.

    It counts for subclasses, too, that have the same ``forward``. A second call for a class replaces the first.

    Args:
        cls: a subclass of BatchNorm, most likely one that calls ``torch.nn.functional.batch_norm`` itself.
        to_sync: a subclass of :class:`SyncBatchNorm`. Converted layers stay the objects that they are and use its
            ``forward`` instead of their own; its ``__init__`` is not called.

    Raises:
        ConversionError: ``cls`` is no BatchNorm, or ``to_sync`` no subclass of ``SyncBatchNorm``.

    >>> import torch
    >>> class NormAct(torch.nn.BatchNorm2d):
    ...     def forward(self, input):
    ...         mean, var = self.running_mean, self.running_var
    ...         return torch.nn.functional.batch_norm(input, mean, var, self.weight, self.bias, self.training).relu()
    >>> class SyncNormAct(SyncBatchNorm):
    ...     def forward(self, input):
    ...         return super().forward(input).relu()
    >>> register_converter(NormAct, SyncNormAct)
    """
    if not (isinstance(cls, type) and issubclass(cls, _BatchNorm)):
        raise ConversionError(f"cls must be a subclass of BatchNorm (got {cls!r}); other layers are never converted")
    if not (isinstance(to_sync, type) and issubclass(to_sync, SyncBatchNorm)):
        raise ConversionError(
            f"to_sync must be a subclass of SyncBatchNorm (got {to_sync!r}); "
            "derive a class from lightning_ddp_ext.SyncBatchNorm, with a forward that calls super().forward(input)"
        )
    _registered[cls] = to_sync


def converter_for(kind: Any) -> type[SyncBatchNorm] | None:
    """Return the class that makes layers of a BatchNorm class synchronise; ``None``: nothing is known to do so."""
    for base in kind.__mro__:
        has_its_forward = getattr(base, "forward", None) is kind.forward
        if has_its_forward and base in _registered:
            return _registered[base]
        if has_its_forward and f"{base.__module__}.{base.__qualname__}" in _TIMM:
            return _SyncNormAct
    return SyncBatchNorm if _reaches_base(kind) else None


class _SyncNormAct(SyncBatchNorm):
    """For timm's BatchNorm layers with dropout and activation."""

    drop: Module
    act: Module

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.act(self.drop(super().forward(input)))
        return output


_TIMM = ("timm.layers.norm_act.BatchNormAct2d", "timm.models.layers.norm_act.BatchNormAct2d")
_FUNCTIONS = {"batch_norm", "native_batch_norm"}


def _reaches_base(kind: type) -> bool:
    """Whether a class's ``forward`` calls that of torch's BatchNorm by ``super()``, as far as its code tells.

    Where a class calls ``F.batch_norm`` itself, or its base by name, nothing put in between is ever called.
    """
    for base in kind.__mro__[: kind.__mro__.index(_BatchNorm)]:
        if any(_names_in(function) & _FUNCTIONS for function in vars(base).values()):
            return False
        if "forward" in vars(base) and not {"super", "forward"} <= _names_in(vars(base)["forward"]):
            return False
    return True


def _names_in(function: object) -> set[str]:
    """The names that a Python function uses; none for anything else."""
    function = inspect.unwrap(function) if callable(function) else function
    return _names_in_code(function.__code__) if isinstance(function, FunctionType) else set()


def _names_in_code(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names_in_code, inner))
