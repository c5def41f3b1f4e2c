"""Make a model's BatchNorm layers synchronise, report on each, and restore them."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from torch.nn import Module

from lightning_ddp_ext.batchnorm.layer import (
    BatchNorm,
    SyncBatchNorm,
    can_synchronise,
    restore,
    synchronise,
)
from lightning_ddp_ext.batchnorm.sync_context import SyncContext
from lightning_ddp_ext.errors import ConfigurationError

ModuleT = TypeVar("ModuleT", bound=Module)
Selection = str | Iterable[str] | None


class LayerChoice:
    """A choice of BatchNorm layers by patterns of their names; by default all of them.

    Args:
        include: convert only layers that match one of these; ``None`` for all.
        exclude: do not convert layers that match one of these.

    Attributes:
        is_all: whether this chooses all layers of any model.

    Raises:
        ConfigurationError: a pattern is not a string.
    """

    def __init__(self, include: Selection = None, exclude: Selection = None) -> None:
        self._include = None if include is None else _patterns(include, "include")
        self._exclude = () if exclude is None else _patterns(exclude, "exclude")
        self.is_all = self._include is None and not self._exclude

    def layers_in(self, model: Module) -> set[Module]:
        """Return the BatchNorm layers that are chosen.

        Raises:
            ConfigurationError: a pattern matches no layer.
        """
        included = ("*",) if self._include is None else self._include
        return _matching(model, included, "include") - _matching(model, self._exclude, "exclude")


def convert_sync_batchnorm(
    module: ModuleT,
    include: Selection = None,
    exclude: Selection = None,
    process_group: dist.ProcessGroup | None = None,
) -> ModuleT:
    """Make a model's BatchNorm layers synchronise; ``restore_batchnorm`` undoes this.

    This converts layers of the classes ``BatchNorm1d``, ``BatchNorm2d`` and
    ``BatchNorm3d``. Each remains the same object, with its parameters, buffers, hooks,
    mode, device and dtype. Its new class inherits from its own class and from
    :class:`SyncBatchNorm`. Call this on every rank, before or after DDP wraps the
    model. InstanceNorm, GroupNorm and layers that are a :class:`SyncBatchNorm` do not
    change.

    Other subclasses of BatchNorm are left as they are. They can inherit from
    :class:`SyncBatchNorm` instead.

    Args:
        module: the model, or a layer.
        include: convert only layers that match a pattern of layer names, such as
            ``"backbone.*"``, or one of several patterns. If the name of a module
            matches, so do all layers in it.
        exclude: do not convert layers that match; takes the same values as ``include``.
        process_group: the ranks whose batches are joined, as a process group; ``None``
            for all ranks.

    Returns:
        ``module`` itself.

    Warns:
        UserWarning: layers are not converted because they belong to another subclass of
            BatchNorm, or had their ``forward`` replaced.

    Raises:
        ConfigurationError: ``include`` or ``exclude`` is invalid or matches no layer,
            or ``process_group`` is not a process group.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    >>> isinstance(convert_sync_batchnorm(model)[1], SyncBatchNorm)
    True
    >>> type(restore_batchnorm(model)[1]) is nn.BatchNorm2d
    True
    """
    warn = partial(warnings.warn, stacklevel=3)  # at the caller of this function
    convert(module, LayerChoice(include, exclude), process_group, warn=warn)
    return module


def convert(
    module: Module,
    choice: LayerChoice,
    process_group: dist.ProcessGroup | None = None,
    *,
    warn: Callable[[str], object],
) -> str:
    """Convert layers as ``convert_sync_batchnorm`` does.

    Returns:
        A sentence for the log, with the number of converted layers.
    """
    chosen = choice.layers_in(module)
    converted: dict[str, BatchNorm] = {}
    with_own_code: list[str] = []
    layers = _layers_in(module)
    for layer, name in layers:
        if can_synchronise(layer) and layer in chosen:
            converted[name] = layer
        elif layer in chosen and not isinstance(layer, SyncBatchNorm):
            with_own_code.append(f"{name} ({type(layer).__name__})")
    context = SyncContext(
        process_group,
        names=tuple(converted),
        max_features=max((layer.num_features for layer in converted.values()), default=0),
    )
    for index, layer in enumerate(converted.values()):
        synchronise(layer, replace(context, index=index))
    if with_own_code:
        warn(_warning_about(with_own_code))
    return (
        f"SyncBatchNorm: {len(converted)} of {len(layers)} layers, statistics over"
        f" {context.world_size} ranks"
    )


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


def _patterns(selection: Any, field: str) -> tuple[str, ...]:
    """Return the patterns in an argument, which may be an iterator."""
    is_one = isinstance(selection, str) or not isinstance(selection, Iterable)
    patterns = (selection,) if is_one else tuple(selection)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ConfigurationError(
                f"{field} takes patterns of layer names (got {pattern!r}); for any other choice,"
                " pass a list of names"
            )
    return patterns


def _layers_in(model: Module, *, with_each_name: bool = False) -> list[tuple[BatchNorm, str]]:
    """Return the BatchNorm layers of a model with their names.

    A layer in several places is returned once, or ``with_each_name``.
    """
    return [
        (module, name or "the module")  # a lone layer has no name
        for name, module in model.named_modules(remove_duplicate=not with_each_name)
        if isinstance(module, BatchNorm)
    ]


def _matching(model: Module, patterns: Iterable[str], field: str) -> set[Module]:
    """Return the BatchNorm layers that a pattern matches.

    Raises:
        ConfigurationError: one of the patterns matches none.
    """
    layers = _layers_in(model, with_each_name=True)
    selected: set[Module] = set()
    for pattern in patterns:
        matching = {layer for layer, name in layers if _matches(pattern, name)}
        if layers and not matching:
            names = ", ".join(name for _, name in layers[:5])
            more = ", …" if len(layers) > 5 else ""
            raise ConfigurationError(
                f"{field}={pattern!r} matches no BatchNorm layer; choose among {names}{more}, or"
                " modules that contain them"
            )
        selected |= matching
    return selected


def _matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a layer's name, or that of a module around it."""
    parts = name.split(".")
    ends = range(len(parts) + 1)  # the model has an empty name
    return any(fnmatch.fnmatchcase(".".join(parts[:end]), pattern) for end in ends)


def _warning_about(with_own_code: list[str]) -> str:
    return (
        "BatchNorm layers with their own class or forward method are not converted:"
        f" {', '.join(with_own_code)}. To use the statistics of all ranks, a class can inherit"
        " from lightning_ddp_ext.SyncBatchNorm, and a lazy layer can run a first batch before the"
        " conversion; to leave a layer out without this warning, use exclude="
    )
