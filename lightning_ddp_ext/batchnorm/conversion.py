"""Make a model's BatchNorm layers synchronise, report on each, and restore them."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from lightning_ddp_ext.batchnorm.classes import restore, synchronise
from lightning_ddp_ext.batchnorm.groups import JoinedRanks, group_of
from lightning_ddp_ext.batchnorm.layer import BatchNorm, SyncBatchNorm
from lightning_ddp_ext.batchnorm.selection import LayerChoice, Selection, batchnorm_layers
from lightning_ddp_ext.batchnorm.sync_context import SyncContext

ModuleT = TypeVar("ModuleT", bound=Module)


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion, for each BatchNorm layer of a model.

    Attributes:
        converted: the names of the layers that now synchronise.
        left_alone: the reasons why other layers were not chosen, or "synchronises
            already", by layer name.
        unsupported: the reasons why the remaining layers cannot be converted, by layer
            name and class.
        world_size: the number of ranks that join their batches.
    """

    converted: Sequence[str]
    left_alone: Mapping[str, str]
    unsupported: Mapping[str, str]
    world_size: int

    def summary(self) -> str:
        """Return the number of converted layers, and why others were not converted."""
        count = len(self.converted)
        reasons = Counter([*self.unsupported.values(), *self.left_alone.values()])
        ranks = "1 rank" if self.world_size == 1 else f"{self.world_size} ranks"
        line = (
            f"SyncBatchNorm: {count} of {count + reasons.total()} layers, statistics over {ranks}"
        )
        if not reasons:
            return line
        listed = ", ".join(f"{number} {reason}" for reason, number in reasons.items())
        return f"{line}; not converted: {listed}"

    def warning(self) -> str | None:
        """Return a warning that names the unsupported layers, if any."""
        if not self.unsupported:
            return None
        layers = "; ".join(f"{layer} {reason}" for layer, reason in self.unsupported.items())
        return (
            "some BatchNorm layers are not converted and use only each rank's own statistics:"
            f" {layers}. A class that overrides forward can inherit from"
            " lightning_ddp_ext.SyncBatchNorm instead; to leave a layer out without this warning,"
            " use exclude="
        )


def convert_sync_batchnorm(
    module: ModuleT,
    include: Selection = None,
    exclude: Selection = None,
    process_group: JoinedRanks = None,
) -> ModuleT:
    """Make a model's BatchNorm layers synchronise; ``restore_batchnorm`` undoes this.

    Each layer remains the same object, with its parameters, buffers, hooks, mode,
    device and dtype. Its new class is made from its own class and
    :class:`SyncBatchNorm`, so a subclass keeps its methods. Call this on every rank,
    before or after DDP wraps the model. InstanceNorm, GroupNorm and layers that already
    synchronise do not change.

    A subclass that overrides ``forward`` is not converted. It can inherit from
    :class:`SyncBatchNorm` instead.

    Args:
        module: the model, or a layer.
        include: convert only layers that match a pattern of layer names, such as
            ``"backbone.*"``, a class of layers, or one of several of these. If a module
            matches, so do all layers in it.
        exclude: do not convert layers that match; takes the same values as ``include``.
        process_group: the ranks whose batches are joined: ``None`` for all, ``"node"``
            for those on the same machine (in the same network namespace, if containers
            have their own), a number ``n`` for groups of ``n`` consecutive ranks, of
            which the last may be smaller, or a process group. ``"node"`` and numbers
            need an initialised process group and make the call collective.

    Returns:
        ``module`` itself.

    Warns:
        UserWarning: layers are not converted because they override ``forward``, are
            parametrised or lazy, or had their ``forward`` replaced.

    Raises:
        ConfigurationError: ``include`` or ``exclude`` is invalid or matches no layer,
            or ``process_group`` is invalid.

    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    >>> isinstance(convert_sync_batchnorm(model)[1], SyncBatchNorm)
    True
    >>> type(restore_batchnorm(model)[1]) is torch.nn.BatchNorm2d
    True
    """
    conversion = convert(module, LayerChoice.of(include, exclude), group_of(process_group))
    warning = conversion.warning()
    if warning is not None:
        warnings.warn(warning, stacklevel=2)
    return module


def convert(
    module: Module, choice: LayerChoice, process_group: dist.ProcessGroup | None = None
) -> Conversion:
    """Convert layers as ``convert_sync_batchnorm`` does, and report on all of them.

    Unsupported layers are in the report, without a warning.
    """
    not_chosen = choice.reasons_against(module)
    converted: dict[str, BatchNorm] = {}
    left_alone: dict[str, str] = {}
    unsupported: dict[str, str] = {}
    for layer, name in batchnorm_layers(module).items():
        shown = name or "the module"  # a lone layer has no name
        if isinstance(layer, (SyncBatchNorm, torch.nn.SyncBatchNorm)):
            left_alone[shown] = "synchronises already"
        elif layer in not_chosen:
            left_alone[shown] = not_chosen[layer]
        elif reason := _why_unsupported(layer):
            unsupported[f"{shown} ({type(layer).__name__})"] = reason
        else:
            converted[shown] = layer
    max_features = max((layer.num_features for layer in converted.values()), default=0)
    context = SyncContext(process_group, tuple(converted), max_features=max_features)
    for index, layer in enumerate(converted.values()):
        synchronise(layer, replace(context, index=index))
    return Conversion(tuple(converted), left_alone, unsupported, context.world_size)


def restore_batchnorm(module: ModuleT) -> ModuleT:
    """Undo ``convert_sync_batchnorm``; the layers keep their current weights.

    Each layer gets its former class back. Layers that the model created as
    ``SyncBatchNorm`` do not change. Copies of converted layers are also converted, and
    must be restored separately. Not collective.

    Returns:
        ``module`` itself.
    """
    for layer in module.modules():
        restore(layer)
    return module


def _why_unsupported(layer: Module) -> str | None:
    if parametrize.is_parametrized(layer):
        return "is parametrised (remove the parametrisation first)"
    if isinstance(layer, LazyModuleMixin):
        return "is lazy (run a first batch before the conversion)"
    if "forward" in vars(layer):
        return "had its forward replaced on the object"
    if type(layer).forward is not BatchNorm.forward:
        return "overrides forward"
    return None
