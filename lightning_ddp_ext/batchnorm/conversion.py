"""Which layers of a model become synchronised ones, what became of each, and the way back."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
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
from lightning_ddp_ext.batchnorm.layer import PEERS, SyncBatchNorm
from lightning_ddp_ext.batchnorm.replacing import put_back, replace
from lightning_ddp_ext.batchnorm.selection import Places, Predicate, Selection, check_predicate, not_chosen

ModuleT = TypeVar("ModuleT", bound=Module)


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
    already are not touched. A layer whose class has a class method ``convert_sync_batchnorm(layer, process_group)``, as
    torch's own, is converted by it.

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

    Under torchrun, for example::

        torch.distributed.init_process_group()
        model = DistributedDataParallel(convert_sync_batchnorm(Net()))
        ...  # train
        net = restore_batchnorm(model.module)

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
    places = Places(module, is_layer=lambda layer: isinstance(layer, _BatchNorm) or _is_scripted(layer))
    check_predicate(predicate)
    left_out = not_chosen(places, include, exclude, predicate)
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

    Layers that were written as synchronised ones stay. Copies that were made of converted layers are converted ones,
    too: restore them as well. Not collective.

    Returns:
        ``module`` itself; the layer that was there if a converter had made a new module of it.
    """
    places = Places(module, is_layer=lambda layer: True)
    for layer in places.layers:
        before = put_back(layer)
        if before is not None:
            module = places.put(before, layer)
        elif is_synchronised(layer):
            desynchronise(layer)
            vars(layer).pop(PEERS, None)
    return module


def _verdict(name: str, layer: Any, not_chosen: str) -> Verdict:
    kind = plain_class(layer)
    if isinstance(layer, (SyncBatchNorm, torch.nn.SyncBatchNorm)):
        return Verdict(name, kind.__name__, "synchronises already")
    if not_chosen:
        return Verdict(name, kind.__name__, not_chosen)
    why_not = _why_impossible(layer, kind)
    return Verdict(name, kind.__name__, why_not, is_left_out=bool(why_not))


def _why_impossible(layer: Module, kind: type) -> str:
    if _is_scripted(layer):
        return "it has been scripted before it could be converted"
    if "forward" in vars(layer):
        return "its forward has been replaced on the object"
    if converter_for(kind) is None and not reaches_core(kind):
        return "its forward may normalise by itself"
    return ""


def _is_scripted(layer: Module) -> bool:
    return isinstance(layer, torch.jit.ScriptModule) and "BatchNorm" in getattr(layer, "original_name", "")


def _convert_layer(layer: Any, peers: Peers) -> Module:
    to_sync: Any = converter_for(plain_class(layer)) or SyncBatchNorm
    if not isinstance(to_sync, type):
        return replace(layer, to_sync, peers)
    synchronise(layer, to_sync)
    vars(layer)[PEERS] = peers  # a class may refuse attributes that it does not know
    return layer  # type: ignore[no-any-return]
