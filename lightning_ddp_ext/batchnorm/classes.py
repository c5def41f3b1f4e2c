"""Change a layer's class to one made from its own and ``SyncBatchNorm``, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.nn import Module

from lightning_ddp_ext.batchnorm.layer import CONTEXT, SyncBatchNorm
from lightning_ddp_ext.batchnorm.sync_context import SyncContext

_FORMER_CLASS = "_ddpx_former_class"  # attribute of a made class: the class of the layer before


@functools.cache  # compilers and comparisons rely on one class for all layers of a class
def _synchronised_class(former: Any) -> type:
    """Make a class from a layer's class and ``SyncBatchNorm``.

    In the method resolution order, ``SyncBatchNorm`` comes after ``former`` and just
    before torch's base class of all BatchNorm layers, so additions of ``former`` stay.
    """
    attributes = {
        "__module__": former.__module__,
        "__doc__": former.__doc__,
        "__reduce_ex__": _reduce,
        _FORMER_CLASS: former,
    }
    made: type = type(former)(f"Sync{former.__name__}", (former, SyncBatchNorm), attributes)
    return made


def synchronise(layer: Module, context: SyncContext) -> None:
    """Give a layer its context, and a class that synchronises."""
    former: Any = type(layer)
    # Not by setattr, which a class may restrict.
    object.__setattr__(layer, "__class__", _synchronised_class(former))
    vars(layer)[CONTEXT] = context


def restore(layer: Module) -> None:
    """Restore the class of a converted layer; leave other layers unchanged."""
    former = vars(type(layer)).get(_FORMER_CLASS)
    if former is not None:
        object.__setattr__(layer, "__class__", former)
        vars(layer).pop(CONTEXT, None)


def _reduce(layer: Any, protocol: Any) -> Any:
    """Reduce a layer to its former class for copies and pickles.

    The made class cannot be imported.
    """
    made = type(layer)
    former = vars(made)[_FORMER_CLASS]
    function, arguments, *state = super(made, layer).__reduce_ex__(protocol)
    # The class is the function, or an argument of one such as copyreg.__newobj__.
    call = [former if part is made else part for part in (function, *arguments)]
    return (_make_again, (vars(layer)[CONTEXT], *call), *state)


def _make_again(context: SyncContext, create: Callable[..., Any], *arguments: object) -> Module:
    """Create a layer of the former class, and convert it."""
    layer: Module = create(*arguments)
    synchronise(layer, context)
    return layer
