"""The classes that make BatchNorm layers synchronise, and that keep what their own classes add."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_ddp_ext.batchnorm.layer import CONTEXT, SyncBatchNorm
from lightning_ddp_ext.batchnorm.sync_context import SyncContext
from lightning_ddp_ext.errors import ConfigurationError

_OWN = "_ddpx_own_class"  # in a made class: the class that it was made from
_FUNCTIONS = {"batch_norm", "native_batch_norm"}


class _SyncNormAct(SyncBatchNorm):
    """For timm's BatchNorm layers with dropout and activation."""

    drop: Module
    act: Module

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.act(self.drop(super().forward(input)))
        return output


# By class, or by its name where importing it would be wrong.
_registered: dict[type | str, type[SyncBatchNorm]] = {
    "timm.layers.norm_act.BatchNormAct2d": _SyncNormAct,
    "timm.models.layers.norm_act.BatchNormAct2d": _SyncNormAct,
}
# One class for all layers of a kind, which compilers and comparisons rely on.
_made: dict[tuple[type, type], type] = {}


def register_converter(cls: type[_BatchNorm], to_sync: type[SyncBatchNorm]) -> None:
    """Register how layers are synchronised that ``convert_sync_batchnorm`` would leave alone or get wrong.

    It counts for subclasses, too, that have the same ``forward``. A second call for a class replaces the first.

    Args:
        cls: a subclass of BatchNorm, most likely one that calls ``torch.nn.functional.batch_norm`` itself.
        to_sync: a subclass of :class:`SyncBatchNorm`. Converted layers stay the objects that they are and use its
            ``forward`` instead of their own; its ``__init__`` is not called.

    Raises:
        ConfigurationError: ``cls`` is no BatchNorm, or ``to_sync`` no subclass of ``SyncBatchNorm``.

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
        raise ConfigurationError(f"cls must be a subclass of BatchNorm (got {cls!r}); other layers are never converted")
    if not (isinstance(to_sync, type) and issubclass(to_sync, SyncBatchNorm)):
        raise ConfigurationError(
            f"to_sync must be a subclass of SyncBatchNorm (got {to_sync!r}); "
            "derive a class from lightning_ddp_ext.SyncBatchNorm, with a forward that calls super().forward(input)"
        )
    _registered[cls] = to_sync


def core_for(own: Any) -> type[SyncBatchNorm] | None:
    """Return the class that makes layers of a BatchNorm class synchronise; ``None``: nothing is known to do so."""
    for base in own.__mro__:
        core = _registered.get(base) or _registered.get(f"{base.__module__}.{base.__qualname__}")
        if core is not None and base.forward is own.forward:
            return core
    return SyncBatchNorm if _reaches_base(own) else None


def _reaches_base(own: type) -> bool:
    """Whether a class's ``forward`` calls that of torch's BatchNorm by ``super()``, as far as its code tells.

    Where a class calls ``F.batch_norm`` itself, or its base by name, nothing put in between is ever called.
    """
    for base in own.__mro__[: own.__mro__.index(_BatchNorm)]:
        if any(_names_in(function) & _FUNCTIONS for function in vars(base).values()):
            return False
        if "forward" in vars(base) and not {"super", "forward"} <= _names_in(vars(base)["forward"]):
            return False
    return True


def _names_in(function: object) -> set[str]:
    """The names that a Python function uses, in functions inside of it, too; none for anything else."""
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else function
    if not isinstance(code, CodeType):
        return set()
    return set(code.co_names).union(*(_names_in(constant) for constant in code.co_consts if not callable(constant)))


def synchronised_class(own: Any, core: type[SyncBatchNorm]) -> type:
    """Make a class of a layer's own class and a synchronising one, or return the one that was made before.

    In the order of methods ``core`` comes after ``own``, just before torch's common base of all BatchNorm layers: what
    ``own`` adds stays, and its ``super().forward(...)`` reaches ``core``. A registered ``core`` replaces ``forward``.

    Raises:
        ConfigurationError: Python cannot make one, as with a core that is a subclass of ``own``.
    """
    if (own, core) in _made:
        return _made[own, core]
    names = {"__module__": own.__module__, "__doc__": own.__doc__, "__reduce_ex__": _reduce, _OWN: own}
    if core is not SyncBatchNorm or not _reaches_base(own):
        names["forward"] = core.forward
    try:
        _made[own, core] = type(own)(f"Sync{own.__name__}", (own, core), names)
    except TypeError as error:
        raise ConfigurationError(
            f"no class can be made of {own.__name__} and {core.__name__}: {error}; "
            "register another class with register_converter, or leave its layers out with exclude="
        ) from error
    return _made[own, core]


def synchronise(layer: Module, made: type, context: SyncContext) -> None:
    """Give a layer a class that ``synchronised_class`` made, and its context."""
    object.__setattr__(layer, "__class__", made)
    vars(layer)[CONTEXT] = context  # a class may refuse attributes that it does not know


def restore(layer: Module) -> None:
    """Give a converted layer its own class back; other layers stay as they are.

    Raises:
        ConfigurationError: the layer has been parametrised since it was converted.
    """
    if _OWN in vars(type(layer)):
        object.__setattr__(layer, "__class__", vars(type(layer))[_OWN])
        vars(layer).pop(CONTEXT, None)
    elif hasattr(layer, _OWN):
        raise ConfigurationError(
            f"a {type(layer).__name__} was parametrised while it was synchronised, and cannot be restored; "
            "call torch.nn.utils.parametrize.remove_parametrizations first"
        )


def _reduce(layer: Any, protocol: Any) -> Any:
    """Copy and pickle a layer by its own class, as a class that was made cannot be imported."""
    made = type(layer)
    own, core = made.__bases__
    function, arguments, *rest = super(made, layer).__reduce_ex__(protocol)
    function, *arguments = (own if part is made else part for part in (function, *arguments))
    return (_make_again, (core, layer._ddpx_context, function, arguments), *rest)


def _make_again(
    core: type[SyncBatchNorm], context: SyncContext, function: Callable[..., Any], arguments: list[object]
) -> Module:
    layer: Module = function(*arguments)
    synchronise(layer, synchronised_class(type(layer), core), context)
    return layer
