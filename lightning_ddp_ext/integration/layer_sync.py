"""Synchronise BatchNorm layers in training, for our callback and the Trainer's flag."""

from __future__ import annotations

from typing import NamedTuple

import torch.distributed as dist
from torch.nn import Module
from typing_extensions import override

from lightning_ddp_ext.batchnorm.classes import restore
from lightning_ddp_ext.batchnorm.conversion import convert
from lightning_ddp_ext.batchnorm.groups import JoinedRanks, batchnorm_group, check_ranks, group_of
from lightning_ddp_ext.batchnorm.layer import SyncBatchNorm
from lightning_ddp_ext.batchnorm.selection import LayerChoice
from lightning_ddp_ext.errors import ConfigurationError

from .private.lightning_tree import pl, rank_zero_info, rank_zero_warn


class _Applied(NamedTuple):
    """A model whose layers are synchronised, and those that already were before."""

    model: Module
    synchronised_before: set[SyncBatchNorm]


class RanksLayerSync(pl.plugins.LayerSync):
    """Synchronises a model's layers from ``apply`` to ``revert``.

    The strategy uses it for ``Trainer(sync_batchnorm=True)``, where Lightning would use
    torch's SyncBatchNorm.

    Args:
        process_group: as in ``convert_sync_batchnorm``.
        choice: which layers to synchronise.
    """

    def __init__(
        self, process_group: JoinedRanks = None, choice: LayerChoice | None = None
    ) -> None:
        check_ranks(process_group)
        self._ranks = process_group
        self._choice = choice or LayerChoice()
        self._applied: _Applied | None = None

    def refuse_alongside(self, other: pl.plugins.LayerSync | None) -> None:
        """Raise if this selects layers or ranks, and ``other`` synchronises all.

        Raises:
            ConfigurationError: both are in use.
        """
        selects = self._ranks is not None or self._choice != LayerChoice()
        if other is not None and selects:
            raise ConfigurationError(
                "sync_batchnorm=True synchronises all layers across all ranks, but"
                " SyncBatchNormConversion selects some of them; remove sync_batchnorm=True"
            )

    @override
    def apply(self, model: Module) -> Module:
        """Synchronise the layers and log this.

        Does nothing with one rank. Collective: every rank must call it.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return model
        group = batchnorm_group() if self._ranks is None else group_of(self._ranks)
        self.revert(model)  # an exception may have prevented it
        layers = model.modules()
        synchronised = {layer for layer in layers if isinstance(layer, SyncBatchNorm)}
        conversion = convert(model, self._choice, group)
        self._applied = _Applied(model, synchronised_before=synchronised)
        rank_zero_info(conversion.summary())
        warning = conversion.warning()
        if warning is not None:
            rank_zero_warn(warning)
        return model

    @override
    def revert(self, model: Module) -> Module:
        """Restore the layers that ``apply`` has converted, and copies of them."""
        if self._applied is not None:
            for layer in set(self._applied.model.modules()) - self._applied.synchronised_before:
                restore(layer)
            self._applied = None
        return model
