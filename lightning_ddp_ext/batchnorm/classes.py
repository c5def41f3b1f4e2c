"""The classes that layers get to be synchronised ones: made from their own, and given back exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from lightning_ddp_ext.batchnorm.exchange import Peers
from lightning_ddp_ext.batchnorm.layer import PEERS, SyncBatchNorm
from lightning_ddp_ext.errors import ConversionError

_OWN = "_ddpx_own"  # the class that a synchronising one was made from
_FRONT = "_ddpx_front"  # the class of a parametrised layer that another one was made from

# By own class and core: one class for all layers of a kind, which compilers and comparisons rely on.
_made: dict[tuple[type, type], type] = {}


def synchronised(own: type, core: type[SyncBatchNorm] = SyncBatchNorm) -> type:
    """The class that layers of class ``own``, a BatchNorm, become.

    What ``own`` adds stays: in the order of methods ``core`` comes after it, just before torch's common base of all
    BatchNorm layers, so that ``super().forward(...)`` reaches it.

    Args:
        own: the layer's class.
        core: ``SyncBatchNorm``, or a subclass of it whose ``forward`` takes the place of that of ``own``.

    Raises:
        ConversionError: Python cannot make one, as with a core that is a subclass of ``own``.

    >>> import torch
    >>> class Scaled(torch.nn.BatchNorm2d):
    ...     def forward(self, input):
    ...         return 2 * super().forward(input)
    >>> [made.__name__ for made in synchronised(Scaled).__mro__[:4]]
    ['SyncScaled', 'Scaled', 'BatchNorm2d', 'SyncBatchNorm']
    """
    if (own, core) not in _made:
        _made[own, core] = _make(own, core)
    return _made[own, core]


def _make(own: type, core: type[SyncBatchNorm]) -> type:
    names: dict[str, Any] = {"__module__": own.__module__, "__doc__": own.__doc__, _OWN: own}
    if core is not SyncBatchNorm:
        names["forward"] = core.forward
    becomes = getattr(own, "cls_to_become", None) if issubclass(own, LazyModuleMixin) else None
    if becomes is not None:
        names["cls_to_become"] = synchronised(becomes, core)
    try:
        made: Any = type(own)(f"Sync{own.__name__}", (own, core), names)
    except TypeError as error:
        raise ConversionError(
            f"no class can be made of {own.__name__} and {core.__name__}: {error}; "
            "register a function with register_converter, or leave its layers out with exclude="
        ) from error
    made.__reduce_ex__ = _reduced_as(own, core, made)
    return made  # type: ignore[no-any-return]


def is_synchronised(layer: Module) -> bool:
    """Whether the layer has such a class, for the time being."""
    return any(_OWN in vars(kind) for kind in type(layer).__mro__)


def synchronise(layer: Module, core: type[SyncBatchNorm] = SyncBatchNorm) -> None:
    """Give a BatchNorm layer a synchronising class."""
    _change_class(layer, lambda own: synchronised(own, core))


def desynchronise(layer: Module) -> None:
    """Give a layer its own class back."""
    _change_class(layer, lambda made: vars(made).get(_OWN, made))


def plain_class(layer: Module) -> type:
    """The layer's class, without the one that ``torch.nn.utils.parametrize`` puts in front of it."""
    kind = type(layer)
    return kind.__bases__[0] if parametrize.is_parametrized(layer) else kind


def _change_class(layer: Module, change: Callable[[type], type]) -> None:
    kind, plain = type(layer), plain_class(layer)
    changed = change(plain)
    if kind is not plain:
        changed = _in_front_of(changed, kind)
    object.__setattr__(layer, "__class__", changed)


def _in_front_of(plain: type, parametrized: type) -> type:
    """The class of a parametrised layer once more, in front of another one.

    When its last parametrisation is removed, a layer gets the class that is behind; its properties go with the front.
    """
    before: type | None = vars(parametrized).get(_FRONT)
    if before is not None and before.__bases__ == (plain,) and _properties(before) == _properties(parametrized):
        return before
    left_out = ("__dict__", "__weakref__", "__slotnames__", _FRONT)
    names = {name: value for name, value in vars(parametrized).items() if name not in left_out}
    return type(parametrized)(parametrized.__name__, (plain,), names | {_FRONT: parametrized})


def _properties(kind: type) -> set[str]:
    return {name for name, value in vars(kind).items() if isinstance(value, property)}


def _reduced_as(own: type, core: type[SyncBatchNorm], made: Any) -> Callable[..., Any]:
    """Return a ``__reduce_ex__`` for copies and pickles, as nobody can import the class that has been made."""

    def reduce(layer: Module, protocol: Any) -> Any:
        function, arguments, *rest = super(made, layer).__reduce_ex__(protocol)
        function, *arguments = (own if part is made else part for part in (function, *arguments))
        return (_made_anew, (core, layer._ddpx_peers, function, arguments), *rest)

    return reduce


def _made_anew(
    core: type[SyncBatchNorm], peers: Peers, function: Callable[..., Module], arguments: list[object]
) -> Module:
    layer = function(*arguments)
    object.__setattr__(layer, "__class__", synchronised(type(layer), core))
    vars(layer)[PEERS] = peers  # which a class may leave out of its state
    return layer
