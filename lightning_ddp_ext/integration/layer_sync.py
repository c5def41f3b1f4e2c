"""A model's BatchNorm layers while it is trained: synchronised when training begins, themselves again at its end."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_ddp_ext.batchnorm.conversion import Conversion, convert, restore_batchnorm, warning_of
from lightning_ddp_ext.batchnorm.groups import Ranks, check_ranks, group_of, own_group
from lightning_ddp_ext.batchnorm.layer import SyncBatchNorm
from lightning_ddp_ext.batchnorm.report import summary, table
from lightning_ddp_ext.batchnorm.selection import Predicate, Selection, check_predicate
from lightning_ddp_ext.errors import ConversionError
from lightning_ddp_ext.integration.lightning_tree import (
    LayerSync,
    LightningModule,
    TorchSyncBatchNorm,
    TrainerStatus,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_ddp_ext.rank_logger import rank_logger

_logger = rank_logger(__name__, ranks=0)


class TrainedLayers:
    """The BatchNorm layers of the model that is being trained.

    Args:
        include, exclude, predicate, process_group: as in ``convert_sync_batchnorm``.
    """

    def __init__(
        self,
        include: Selection = None,
        exclude: Selection = None,
        predicate: Predicate | None = None,
        process_group: Ranks = None,
    ) -> None:
        check_ranks(process_group)
        check_predicate(predicate)
        self._selection = (include, exclude, predicate)
        self._ranks = process_group
        self._conversion: Conversion | None = None

    def refuse_to_contradict(self, layer_sync: LayerSync | None) -> None:
        """Only one of the Trainer's own layer synchronisation and a choice of layers can be meant.

        Raises:
            ConversionError: there are both.
        """
        if layer_sync is not None and any(choice is not None for choice in (*self._selection, self._ranks)):
            raise ConversionError(
                "sync_batchnorm=True converts all layers over all ranks, and SyncBatchNormConversion was told to "
                "choose among them; leave sync_batchnorm out"
            )

    def convert(self, model: Module) -> None:
        """Synchronise the layers and say so. Collective: every rank must call it."""
        if not _has_several_ranks():
            return
        group = own_group() if self._ranks is None else group_of(self._ranks)
        self._conversion = conversion = convert(model, *self._selection, process_group=group)
        rank_zero_info(summary(conversion))
        if _logger.isEnabledFor(logging.DEBUG):
            _logger.debug("BatchNorm layers:\n%s", table(conversion))
        warning = warning_of(conversion.verdicts)
        if warning is not None:
            rank_zero_warn(warning)

    def stop_broadcasts(self, wrapped: object) -> None:
        """Take the running statistics, which are the same on all ranks, out of what DDP sends before each forward."""
        if self._conversion is not None and isinstance(wrapped, DistributedDataParallel):
            _leave_out_of_broadcasts(wrapped)

    def before_backward(self) -> None:
        """This rank's forward pass is at its end: a rank that is still in a layer learns of it."""
        if self._conversion is not None:
            self._conversion.exchange.announce_end_of_forward()

    def restore(self, *, has_failed: bool) -> None:
        """Make the layers what they were. Unless training ``has_failed``, every rank must call it."""
        conversion, self._conversion = self._conversion, None
        if conversion is None:
            return
        restore_batchnorm(conversion.module)
        if has_failed:
            conversion.exchange.forget()
        else:
            conversion.exchange.settle()


class RanksLayerSync(LayerSync):
    """What ``Trainer(sync_batchnorm=True)`` stands for under our strategy."""

    def __init__(self) -> None:
        self.layers = TrainedLayers()

    @classmethod
    def in_place_of(cls, chosen: LayerSync | None) -> LayerSync | None:
        """Ours where the Trainer would take torch's; what the user has chosen stays."""
        return cls() if type(chosen) is TorchSyncBatchNorm else chosen

    @override
    def apply(self, model: Module) -> Module:
        self.layers.convert(model)
        return model

    @override
    def revert(self, model: Module) -> Module:
        assert isinstance(model, LightningModule)
        self.layers.restore(has_failed=bool(model.trainer.state.status == TrainerStatus.INTERRUPTED))
        return model


def _has_several_ranks() -> bool:
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _leave_out_of_broadcasts(wrapped: DistributedDataParallel) -> None:
    if not hasattr(wrapped, "parameters_to_ignore") or not hasattr(wrapped, "_assign_modules_buffers"):
        _logger.warning("torch %s has another DDP than known: it goes on sending buffers; tell us", torch.__version__)
        return
    layers = (module for module in wrapped.module.modules() if _is_the_same_on_all_ranks(module))
    ours = {id(buffer) for layer in layers for buffer in layer.buffers(recurse=False)}
    names: Any = {name for name, buffer in wrapped.module.named_buffers() if id(buffer) in ours}
    wrapped.parameters_to_ignore |= names
    wrapped._assign_modules_buffers()


def _is_the_same_on_all_ranks(module: Module) -> bool:
    """Whether it is a layer whose statistics are those of all ranks; one that a user wrote may be of fewer."""
    return isinstance(module, SyncBatchNorm) and module._ddpx_peers.world_size == torch.distributed.get_world_size()
