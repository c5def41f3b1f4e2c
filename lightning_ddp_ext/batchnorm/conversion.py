"""Which layers of a model become synchronised ones, what became of each, and the way back."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_ddp_ext.batchnorm.classes import desynchronise, is_synchronised, plain_class, synchronise
from lightning_ddp_ext.batchnorm.converters import converter_for, reaches_core
from lightning_ddp_ext.batchnorm.exchange import Exchange, Peers
from lightning_ddp_ext.batchnorm.groups import Ranks, group_of
from lightning_ddp_ext.batchnorm.layer import SyncBatchNorm
from lightning_ddp_ext.batchnorm.replacing import is_replacement, put_back, replace
from lightning_ddp_ext.errors import ConversionError

ModuleT = TypeVar("ModuleT", bound=Module)
Selector = str | type
Selection = Selector | Iterable[Selector] | None
Predicate = Callable[[str, Module], bool]


@dataclass(frozen=True)
class Verdict:
    """What became of a BatchNorm layer: ``why_not`` is empty for one that has been converted.

    ``is_left_out`` is true for one that should have been, but cannot.
    """

    name: str
    kind: str
    why_not: str = ""
    is_left_out: bool = False


@dataclass(frozen=True)
class Conversion:
    """A model with synchronised layers.

    Args:
        module: the model; another object only if it was a layer itself, and a converter made a new one.
        verdicts: on each BatchNorm layer, in the model's order.
        exchange: what the converted layers have in common.
    """

    module: Module
    verdicts: tuple[Verdict, ...]
    exchange: Exchange

    @property
    def converted(self) -> list[Verdict]:
        """Those on the layers that have been converted."""
        return [verdict for verdict in self.verdicts if not verdict.why_not]


def convert_sync_batchnorm(
    module: ModuleT,
    include: Selection = None,
    exclude: Selection = None,
    predicate: Predicate | None = None,
    process_group: Ranks = None,
) -> ModuleT:
    """Make the BatchNorm layers of a model synchronise; ``restore_batchnorm`` undoes it exactly.

    Each layer stays the object that it is, with its parameters, buffers, hooks, parametrisations, mode, device and
    dtype, and gets a class made from its own class and :class:`SyncBatchNorm`, so what a subclass adds stays, too.
    Call it on every rank, before or after DDP wraps the model. InstanceNorm, GroupNorm and layers that synchronise
    already are not touched.

    Args:
        module: the model, or a layer.
        include: convert only layers that one of these fits: a pattern for the layer's name, ``"backbone.*"``, a class
            of layers, or several of them. A pattern or class that fits a module counts for all layers in it.
        exclude: convert no layer that one of these fits.
        predicate: convert only layers for which ``predicate(name, layer)`` is true.
        process_group: the ranks whose batches are joined: ``None`` for all, ``"node"`` for those on one machine, a
            number for groups of so many consecutive ranks, or a group. For ``"node"`` and numbers the process group
            must have been opened, and the call is collective.

    Returns:
        ``module`` itself; a new module if it is a layer for which a converter makes one.

    Warns:
        UserWarning: a layer calls ``F.batch_norm`` itself and would not be synchronised, so it has been left alone.

    Raises:
        ConversionError: a selector fits no layer, ``process_group`` makes no sense, or a converter's result does.

    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    >>> isinstance(convert_sync_batchnorm(model)[1], SyncBatchNorm)
    True
    >>> type(restore_batchnorm(model)[1]) is torch.nn.BatchNorm2d
    True
    """
    conversion = convert(module, include, exclude, predicate, group_of(process_group))
    warning = warning_of(conversion.verdicts)
    if warning is not None:
        warnings.warn(warning, stacklevel=2)
    return conversion.module  # type: ignore[return-value]


def warning_of(verdicts: Iterable[Verdict]) -> str | None:
    """A sentence on the layers that should have been converted, and cannot."""
    left_out = [verdict for verdict in verdicts if verdict.is_left_out]
    if not left_out:
        return None
    layers = "; ".join(f"{verdict.name or 'the module'} ({verdict.kind}): {verdict.why_not}" for verdict in left_out)
    return (
        f"BatchNorm layers that stay as they are, with statistics of each rank's own: {layers}. Say how with "
        "lightning_ddp_ext.register_converter, or leave them out with exclude="
    )


def convert(
    module: Module,
    include: Selection = None,
    exclude: Selection = None,
    predicate: Predicate | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Conversion:
    """As ``convert_sync_batchnorm``, for a group that is there; says what became of each layer, and does not warn."""
    places = _Places(module)
    left_out = _not_chosen(places, include, exclude, predicate)
    verdicts = {layer: _verdict(places.names[layer][0], layer, left_out.get(layer, "")) for layer in places.layers}
    converted = [layer for layer, verdict in verdicts.items() if not verdict.why_not]
    names = [places.names[layer][0] or type(layer).__name__ for layer in converted]
    longest = max((1 + 2 * layer.num_features for layer in converted), default=0)
    exchange = Exchange(process_group, names, longest)
    try:
        for number, layer in enumerate(converted):
            become = _convert_layer(layer, Peers(exchange, number))
            if become is not layer:
                module = places.put(become, layer)
    except BaseException:  # a converter's
        restore_batchnorm(module)
        raise
    return Conversion(module, tuple(verdicts.values()), exchange)


def restore_batchnorm(module: ModuleT) -> ModuleT:
    """Undo ``convert_sync_batchnorm``: each layer is again what stood there before, with the weights that it has now.

    Layers that were written as synchronised ones stay. Not collective.

    Returns:
        ``module`` itself; the layer that was there if a converter had made a new module of it.
    """
    places = _Places(module, is_layer=lambda layer: True)
    for layer in places.layers:
        before = put_back(layer)
        if before is not None:
            module = places.put(before, layer)
        elif is_synchronised(layer):
            desynchronise(layer)
            vars(layer).pop("_ddpx_peers", None)
    return module


class _Places:
    """Where the layers of a model stand: a layer that is shared stands in several places."""

    def __init__(self, module: Module, is_layer: Callable[[Module], bool] | None = None) -> None:
        is_layer = is_layer or (lambda layer: isinstance(layer, _BatchNorm) or _is_scripted(layer))
        self._modules = dict(module.named_modules(remove_duplicate=False))
        self.names: dict[Any, list[str]] = {}
        for name, layer in self._modules.items():
            if is_layer(layer):
                self.names.setdefault(layer, []).append(name)

    @property
    def layers(self) -> list[Any]:
        return list(self.names)

    def around(self, layer: Module) -> Iterator[tuple[str, Module]]:
        """The layer and the modules that it is in, by name."""
        for name in self.names[layer]:
            yield name, layer
            while name:
                name = name.rpartition(".")[0]
                yield name, self._modules[name]

    def put(self, new: Module, old: Module) -> Any:
        """Put a module where another one stands; returns the whole."""
        for name in self.names[old]:
            above, _, last = name.rpartition(".")
            if name:
                setattr(self._modules[above], last, new)
            else:
                self._modules[""] = new
        return self._modules[""]


def _not_chosen(places: _Places, include: Selection, exclude: Selection, predicate: Predicate | None) -> dict[Any, str]:
    """The layers that are not to be converted, and why."""
    included, excluded = _selectors(include, "include"), _selectors(exclude, "exclude")
    for field, selectors in (("include", included), ("exclude", excluded)):
        for selector in selectors:
            _refuse_one_that_fits_nothing(field, selector, places)
    why_not = {}
    for layer in places.layers:
        around = list(places.around(layer))
        if any(is_replacement(module) for _, module in around):
            why_not[layer] = "synchronises already"
        elif include is not None and not any(_fits(selector, around) for selector in included):
            why_not[layer] = "not in include"
        elif any(_fits(selector, around) for selector in excluded):
            why_not[layer] = "in exclude"
        elif predicate is not None and not predicate(places.names[layer][0], layer):
            why_not[layer] = "predicate says no"
    return why_not


def _selectors(selection: Selection, field: str) -> list[Selector]:
    if selection is None:
        return []
    is_one = isinstance(selection, (str, type)) or not isinstance(selection, Iterable)
    chosen: list[Any] = [selection] if is_one else [*selection]  # type: ignore[misc]
    for selector in chosen:
        if not isinstance(selector, (str, type)):
            raise ConversionError(
                f"{field} takes patterns of layer names and classes of layers (got {selector!r}); "
                "for anything else there is predicate="
            )
    return chosen


def _refuse_one_that_fits_nothing(field: str, selector: Selector, places: _Places) -> None:
    if places.layers and not any(_fits(selector, list(places.around(layer))) for layer in places.layers):
        names = ", ".join(places.names[layer][0] or "the module" for layer in places.layers[:5])
        more = ", …" if len(places.layers) > 5 else ""
        wanted = repr(selector) if isinstance(selector, str) else selector.__name__
        raise ConversionError(f"{field}={wanted} fits no BatchNorm layer; there are {names}{more}")


def _fits(selector: Selector, around: list[tuple[str, Module]]) -> bool:
    if isinstance(selector, str):
        return any(fnmatch.fnmatchcase(name, selector) for name, _ in around if name)
    return any(isinstance(module, selector) for _, module in around)


def _verdict(name: str, layer: Any, not_chosen: str) -> Verdict:
    kind = plain_class(layer)
    if isinstance(layer, (SyncBatchNorm, torch.nn.SyncBatchNorm)):
        return Verdict(name, kind.__name__, "synchronises already")
    if not_chosen:
        return Verdict(name, kind.__name__, not_chosen)
    why_not = "" if _is_convertible(layer, kind) else _reason(layer)
    return Verdict(name, kind.__name__, why_not, is_left_out=bool(why_not))


def _is_convertible(layer: Module, kind: type) -> bool:
    if _is_scripted(layer) or "forward" in vars(layer):
        return False
    return converter_for(kind) is not None or reaches_core(kind)


def _reason(layer: Module) -> str:
    if _is_scripted(layer):
        return "it has been scripted"
    if "forward" in vars(layer):
        return "its forward has been replaced on the object"
    return "its forward does not call super().forward()"


def _is_scripted(layer: Module) -> bool:
    return isinstance(layer, torch.jit.ScriptModule) and "BatchNorm" in getattr(layer, "original_name", "")


def _convert_layer(layer: Any, peers: Peers) -> Module:
    to_sync: Any = converter_for(plain_class(layer)) or SyncBatchNorm
    if not isinstance(to_sync, type):
        return replace(layer, to_sync, peers)
    synchronise(layer, to_sync)
    vars(layer)["_ddpx_peers"] = peers  # a class may refuse attributes that it does not know
    return layer  # type: ignore[no-any-return]
