"""Change a layer's class to one made from its own and ``SyncBatchNorm``, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Module

from lightning_ddp_ext.batchnorm.layer import CONTEXT, BatchNorm, SyncBatchNorm
from lightning_ddp_ext.batchnorm.sync_context import SyncContext
from lightning_ddp_ext.errors import ConfigurationError

_OWN = "_ddpx_own_class"  # attribute of a made class: the layer's own class
# attribute of a layer: whether its own forward has called SyncBatchNorm.forward
_REACHED = "_ddpx_reached"


class _CalledByOwnForward(SyncBatchNorm):
    """``SyncBatchNorm`` for classes that override ``forward``; it records its calls."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a batch as ``SyncBatchNorm`` does."""
        vars(self)[_REACHED] = True
        return super().forward(input)


def overrides_forward(own: Any) -> bool:
    """Whether a BatchNorm class, or a mixin of it, overrides torch's ``forward``."""
    return own.forward is not BatchNorm.forward


@functools.cache  # compilers and comparisons rely on one class for all layers of a class
def _synchronised_class(own: Any) -> type:
    """Make a class from a layer's own class and ``SyncBatchNorm``.

    In the method resolution order, ``SyncBatchNorm`` comes after ``own`` and just
    before torch's base class of all BatchNorm layers: additions of ``own`` stay, and
    its ``super().forward(...)`` calls ``SyncBatchNorm``.
    """
    names = {
        "__module__": own.__module__,
        "__doc__": own.__doc__,
        "__reduce_ex__": _reduce,
        _OWN: own,
    }
    base = SyncBatchNorm
    if overrides_forward(own):
        base = _CalledByOwnForward
        names["forward"] = _run_own_forward
    made: type = type(own)(f"Sync{own.__name__}", (own, base), names)
    return made


def _run_own_forward(self: Any, *inputs: Any, **options: Any) -> Any:
    """Run the ``forward`` of the layer's own class.

    Raises:
        ConfigurationError: in training, it did not call ``super().forward(input)``, so
            nothing was synchronised.
    """
    own = getattr(self, _OWN)
    output = own.forward(self, *inputs, **options)
    is_reached = vars(self).pop(_REACHED, False)
    if self.training and not is_reached:
        raise ConfigurationError(
            f"{getattr(self, CONTEXT).name} ({own.__name__}) is not synchronised: its forward did"
            " not call super().forward(input) in training; change its forward, or exclude the"
            " layer (exclude=)"
        )
    return output


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
        for attribute in (CONTEXT, _REACHED):
            vars(layer).pop(attribute, None)


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
