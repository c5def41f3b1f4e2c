"""Give a layer a class made from its own and a synchronising one, and give it its own class back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import Module

from lightning_ddp_ext.batchnorm.layer import CONTEXT, SyncBatchNorm
from lightning_ddp_ext.batchnorm.sync_context import SyncContext
from lightning_ddp_ext.errors import ConversionError

_OWN = "_ddpx_own_class"  # in a made class: the class that it was made from

# One class for all layers of a kind, which compilers and comparisons rely on.
_made: dict[tuple[type, type], type] = {}


def synchronised_class(own: type, core: type[SyncBatchNorm] = SyncBatchNorm) -> type:
    """Return the class that layers of class ``own``, a BatchNorm, get.

    What ``own`` adds stays: in the order of methods ``core`` comes after it, just before torch's common base of all
    BatchNorm layers, so that ``super().forward(...)`` reaches it.

    Args:
        own: the layer's class.
        core: ``SyncBatchNorm``, or a subclass of it whose ``forward`` replaces that of ``own``.

    Raises:
        ConversionError: Python cannot make one, as with a core that is a subclass of ``own``.

    >>> import torch
    >>> class Scaled(torch.nn.BatchNorm2d):
    ...     def forward(self, input):
    ...         return 2 * super().forward(input)
    >>> [made.__name__ for made in synchronised_class(Scaled).__mro__[:4]]
    ['SyncScaled', 'Scaled', 'BatchNorm2d', 'SyncBatchNorm']
    """
    if (own, core) not in _made:
        _made[own, core] = _make_class(own, core)
    return _made[own, core]


def _make_class(own: type, core: type[SyncBatchNorm]) -> type:
    names: dict[str, Any] = {"__module__": own.__module__, "__doc__": own.__doc__, _OWN: own}
    if core is not SyncBatchNorm:
        names["forward"] = core.forward
    try:
        made: Any = type(own)(f"Sync{own.__name__}", (own, core), names)
    except TypeError as error:
        raise ConversionError(
            f"no class can be made of {own.__name__} and {core.__name__}: {error}; "
            "register another class with register_converter, or leave its layers out with exclude="
        ) from error
    made.__reduce_ex__ = _reduce_of(made, own, core)
    return made  # type: ignore[no-any-return]


def synchronise(layer: Module, made: type, context: SyncContext) -> None:
    """Give a layer a class that ``synchronised_class`` made, and its context."""
    object.__setattr__(layer, "__class__", made)
    vars(layer)[CONTEXT] = context  # a class may refuse attributes that it does not know


def restore(layer: Module) -> None:
    """Give a converted layer its own class back; other layers stay as they are.

    Raises:
        ConversionError: the layer has been parametrised since it was converted.
    """
    if _OWN in vars(type(layer)):
        own = vars(type(layer))[_OWN]
        object.__setattr__(layer, "__class__", own)
        vars(layer).pop(CONTEXT, None)
    elif hasattr(layer, _OWN):
        raise ConversionError(
            f"a {type(layer).__name__} was parametrised while it was synchronised, and cannot be restored; "
            "call torch.nn.utils.parametrize.remove_parametrizations first"
        )


def _reduce_of(made: Any, own: type, core: type[SyncBatchNorm]) -> Callable[..., Any]:
    """Return a ``__reduce_ex__`` for copies and pickles, as a class that was made cannot be imported."""

    def reduce(layer: Module, protocol: Any) -> Any:
        function, arguments, *rest = super(made, layer).__reduce_ex__(protocol)
        function, *arguments = (own if part is made else part for part in (function, *arguments))
        return (_make_again, (core, layer._ddpx_context, function, arguments), *rest)

    return reduce


def _make_again(
    core: type[SyncBatchNorm], context: SyncContext, function: Callable[..., Module], arguments: list[object]
) -> Module:
    layer = function(*arguments)
    synchronise(layer, synchronised_class(type(layer), core), context)
    return layer
