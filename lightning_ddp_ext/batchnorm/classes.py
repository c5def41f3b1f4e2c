"""Change a layer's class to one made from its own and ``SyncBatchNorm``, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from lightning_ddp_ext.batchnorm.layer import CONTEXT, BatchNorm, SyncBatchNorm
from lightning_ddp_ext.batchnorm.sync_context import SyncContext

_OWN = "_ddpx_own_class"  # attribute of a made class: the layer's own class


def overrides_forward(own: Any) -> bool:
    """Whether a BatchNorm class, or a mixin of it, overrides torch's ``forward``."""
    return own.forward is not BatchNorm.forward


@functools.cache  # compilers and comparisons rely on one class for all layers of a class
def _synchronised_class(own: Any) -> type:
    """Make a class from a layer's own class and ``SyncBatchNorm``.

    In the method resolution order, ``SyncBatchNorm`` comes after ``own`` and just
    before torch's base class of all BatchNorm layers, so additions of ``own`` stay.
    """
    names = {
        "__module__": own.__module__,
        "__doc__": own.__doc__,
        "__reduce_ex__": _reduce,
        _OWN: own,
    }
    made: type = type(own)(f"Sync{own.__name__}", (own, SyncBatchNorm), names)
    return made


def synchronise(layer: Module, context: SyncContext) -> None:
    """Give a layer its context, and a class that synchronises."""
    own: Any = type(layer)
    object.__setattr__(layer, "__class__", _synchronised_class(own))
    vars(layer)[CONTEXT] = context  # not by setattr, which a class may restrict


def restore(layer: Module) -> None:
    """Restore the class of a converted layer; leave other layers unchanged."""
    own = vars(type(layer)).get(_OWN)
    if own is not None:
        object.__setattr__(layer, "__class__", own)
        vars(layer).pop(CONTEXT, None)


def _reduce(layer: Any, protocol: Any) -> Any:
    """Reduce a layer to its own class for copies and pickles.

    The made class cannot be imported.
    """
    made = type(layer)
    function, arguments, *rest = super(made, layer).__reduce_ex__(protocol)
    function, *arguments = (
        vars(made)[_OWN] if part is made else part for part in (function, *arguments)
    )
    return (_make_again, (vars(layer)[CONTEXT], function, arguments), *rest)


def _make_again(
    context: SyncContext, function: Callable[..., Any], arguments: list[object]
) -> Module:
    layer: Module = function(*arguments)
    synchronise(layer, context)
    return layer
