"""Make the BatchNorm layers of a model synchronise, report what became of each, and undo it."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from lightning_ddp_ext.batchnorm.classes import core_for, restore, synchronise, synchronised_class
from lightning_ddp_ext.batchnorm.groups import Ranks, group_of
from lightning_ddp_ext.batchnorm.layer import SyncBatchNorm
from lightning_ddp_ext.batchnorm.selection import Predicate, Selection, batchnorm_layers, is_scripted, not_chosen
from lightning_ddp_ext.batchnorm.sync_context import SyncContext

ModuleT = TypeVar("ModuleT", bound=Module)


@dataclass(frozen=True)
class Conversion:
    """What became of a model's BatchNorm layers.

    Args:
        converted: the names of those that synchronise now.
        left_alone: by name, why others do not, or did already.
        impossible: by name and class, why those that were asked for cannot be converted.
        world_size: how many ranks join their batches.
    """

    converted: Sequence[str]
    left_alone: Mapping[str, str]
    impossible: Mapping[str, str]
    world_size: int

    def summary(self) -> str:
        """Say in one line how many layers were converted, and why the others were not.

        >>> model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4))
        >>> convert(model, exclude="0").summary()
        'SyncBatchNorm: 1 of 2 layers, statistics over 1 rank; not: 1 in exclude'
        """
        reasons = Counter([*self.impossible.values(), *self.left_alone.values()])
        total = len(self.converted) + reasons.total()
        if total == 0:
            return "SyncBatchNorm: the model has no BatchNorm layers"
        ranks = f"{self.world_size} rank{'' if self.world_size == 1 else 's'}"
        line = f"SyncBatchNorm: {len(self.converted)} of {total} layers, statistics over {ranks}"
        others = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
        return f"{line}; not: {others}" if others else line

    def warning(self) -> str | None:
        """Name the layers that cannot be converted; ``None`` without any."""
        if not self.impossible:
            return None
        named = "; ".join(f"{layer}: {reason}" for layer, reason in self.impossible.items())
        return (
            f"BatchNorm layers that stay as they are, with statistics of each rank's own: {named}. "
            "Say how with lightning_ddp_ext.register_converter, or leave them out with exclude="
        )


def convert_sync_batchnorm(
    module: ModuleT,
    include: Selection = None,
    exclude: Selection = None,
    predicate: Predicate | None = None,
    process_group: Ranks = None,
) -> ModuleT:
    """Make the BatchNorm layers of a model synchronise; ``restore_batchnorm`` undoes it exactly.

    Each layer stays the object that it is, with its parameters, buffers, hooks, mode, device and dtype, and gets a
    class made from its own class and :class:`SyncBatchNorm`, so what a subclass adds stays, too. Call it on every
    rank, before or after DDP wraps the model. InstanceNorm, GroupNorm and layers that synchronise already are not
    touched.

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
        ``module`` itself.

    Warns:
        UserWarning: layers that cannot be converted have been left alone: they call ``F.batch_norm`` themselves, are
            scripted, parametrised or lazy, or have had their ``forward`` replaced.

    Raises:
        ConfigurationError: a selector fits no layer, or ``process_group`` makes no sense.

    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    >>> isinstance(convert_sync_batchnorm(model)[1], SyncBatchNorm)
    True
    >>> type(restore_batchnorm(model)[1]) is torch.nn.BatchNorm2d
    True
    """
    group = group_of(process_group)
    conversion = convert(module, include=include, exclude=exclude, predicate=predicate, process_group=group)
    warning = conversion.warning()
    if warning is not None:
        warnings.warn(warning, stacklevel=2)
    return module


def convert(
    module: Module,
    *,
    include: Selection = None,
    exclude: Selection = None,
    predicate: Predicate | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Conversion:
    """As ``convert_sync_batchnorm``, for a group that exists; returns what became of each layer, and does not warn."""
    reasons = not_chosen(module, include, exclude, predicate)
    converted: dict[str, tuple[Any, type]] = {}
    left_alone: dict[str, str] = {}
    impossible: dict[str, str] = {}
    for layer, name in batchnorm_layers(module).items():
        if isinstance(layer, (SyncBatchNorm, torch.nn.SyncBatchNorm)):
            left_alone[name] = "synchronises already"
        elif layer in reasons:
            left_alone[name] = reasons[layer]
        elif reason := _why_impossible(layer):
            impossible[f"{name or 'the module'} ({type(layer).__name__})"] = reason
        else:
            core = core_for(type(layer))
            assert core is not None
            converted[name or type(layer).__name__] = layer, synchronised_class(type(layer), core)
    widest = max((layer.num_features for layer, _ in converted.values()), default=0)
    context = SyncContext(process_group, tuple(converted), num_features=widest)
    for index, (layer, made) in enumerate(converted.values()):
        synchronise(layer, made, replace(context, index=index))
    return Conversion(tuple(converted), left_alone, impossible, context.world_size)


def restore_batchnorm(module: ModuleT) -> ModuleT:
    """Undo ``convert_sync_batchnorm``: each layer is again what it was before, with the weights that it has now.

    Layers that were written as synchronised ones stay. Copies that were made of converted layers are converted ones,
    too: restore them as well. Not collective.

    Returns:
        ``module`` itself.

    Raises:
        ConfigurationError: a layer has been parametrised since it was converted.
    """
    for layer in module.modules():
        restore(layer)
    return module


def _why_impossible(layer: Module) -> str:
    if is_scripted(layer):
        return "it has been scripted before it could be converted"
    if parametrize.is_parametrized(layer):
        return "it is parametrised (remove the parametrisation first)"
    if isinstance(layer, LazyModuleMixin):
        return "it is lazy (run a first batch before the conversion)"
    if "forward" in vars(layer):
        return "its forward has been replaced on the object"
    return "" if core_for(type(layer)) else "its forward may normalise by itself"
