"""How layers become synchronised ones that compute their forward pass themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_ddp_ext.batchnorm.layer import SyncBatchNorm
from lightning_ddp_ext.errors import ConversionError

ToSync = type[SyncBatchNorm] | Callable[[Any, "dist.ProcessGroup | None"], Module]

_registered: dict[type, ToSync] = {}


def register_converter(cls: type[_BatchNorm], to_sync: ToSync) -> None:
    """Say how layers of a class become synchronised that ``convert_sync_batchnorm`` would leave alone or get wrong.

    It counts for subclasses, too, that have the same ``forward``. A second call for a class replaces the first.

    Args:
        cls: a subclass of BatchNorm, most likely one that calls ``torch.nn.functional.batch_norm`` itself.
        to_sync: a subclass of :class:`SyncBatchNorm`, of which layers get ``forward`` and nothing else that they have
            themselves (its ``__init__`` is not called); or a function ``(layer, process_group) -> module``, whose
            result gets the layer's own tensors, so it has the same keys in its state dict, and stands in the layer's
            place until ``restore_batchnorm``.

    Raises:
        ConversionError: ``cls`` is no BatchNorm, or ``to_sync`` is neither.

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
    if not callable(to_sync) or (isinstance(to_sync, type) and not issubclass(to_sync, SyncBatchNorm)):
        raise ConversionError(
            f"to_sync must be a subclass of SyncBatchNorm or a function (got {to_sync!r}); "
            "derive a class from lightning_ddp_ext.SyncBatchNorm"
        )
    _registered[cls] = to_sync


def converter_for(kind: type) -> ToSync | None:
    """What has been registered for a class, or for one that it has its ``forward`` from, or what the class brings."""
    for base in kind.__mro__:
        if base in _registered and kind.forward is base.forward:  # type: ignore[attr-defined]
            return _registered[base]
        if f"{base.__module__}.{base.__qualname__}" in _TIMM and kind.forward is base.forward:  # type: ignore[attr-defined]
            return _SyncNormAct
    own = getattr(kind, "convert_sync_batchnorm", None)
    return own if callable(own) else None


class _SyncNormAct(SyncBatchNorm):
    """For timm's BatchNorm layers that carry dropout and activation."""

    drop: Module
    act: Module

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.act(self.drop(super().forward(input)))
        return output


_TIMM = ("timm.layers.norm_act.BatchNormAct2d", "timm.models.layers.norm_act.BatchNormAct2d")


def reaches_core(kind: type) -> bool:
    """Whether ``forward`` of a BatchNorm class comes to that of torch's base, as far as its code tells.

    Where a class calls ``F.batch_norm`` itself, or its base by name, nothing put in between is ever called.
    """
    for base in kind.__mro__:
        if base is _BatchNorm:
            return True
        if any(_names_in(function) & _BY_ITSELF for function in vars(base).values()):
            return False
        if "forward" in vars(base) and not {"super", "forward"} <= _names_in(vars(base)["forward"]):
            return False
    return False


_BY_ITSELF = {"batch_norm", "native_batch_norm"}


def _names_in(function: object) -> set[str]:
    """The names that a function of Python's uses; of anything else nothing is known."""
    function = inspect.unwrap(function) if callable(function) else function
    return _names_in_code(function.__code__) if isinstance(function, FunctionType) else set()


def _names_in_code(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names_in_code, inner))
