"""Synchronise BatchNorm layers in training, for the Trainer's flag and by a callback."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.nn import Module
from typing_extensions import override

from lightning_ddp_ext.batchnorm.conversion import LayerChoice, Selection, convert
from lightning_ddp_ext.batchnorm.layer import SyncBatchNorm, restore
from lightning_ddp_ext.errors import ConfigurationError
from lightning_ddp_ext.ranks import is_gloo
from lightning_ddp_ext.rendezvous.process_context import current

from .private.compat import layer_sync_of
from .private.lightning_tree import pl, rank_zero_info, rank_zero_warn


class RanksLayerSync(pl.plugins.LayerSync):
    """Synchronises a model's layers from ``apply`` to ``revert``.

    The strategy uses it for ``Trainer(sync_batchnorm=True)``, where Lightning would use
    torch's SyncBatchNorm.

    Args:
        choice: which layers to synchronise; by default all.
    """

    def __init__(self, choice: LayerChoice | None = None) -> None:
        self._choice = choice or LayerChoice()
        # The layers that were synchronised already, from `apply` to `revert`; else ``None``.
        self._synchronised_before: set[Module] | None = None

    @override
    def apply(self, model: Module) -> Module:
        """Synchronise the layers and log this.

        Does nothing with one rank. Collective: every rank must call it.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return model
        self.revert(model)  # an exception may have ended an earlier run before it
        self._synchronised_before = {
            layer for layer in model.modules() if isinstance(layer, SyncBatchNorm)
        }
        rank_zero_info(convert(model, self._choice, _own_group(), warn=rank_zero_warn))
        return model

    @override
    def revert(self, model: Module) -> Module:
        """Restore the layers that ``apply`` has converted, and copies of them."""
        if self._synchronised_before is not None:
            for layer in set(model.modules()) - self._synchronised_before:
                restore(layer)
            self._synchronised_before = None
        return model


class SyncBatchNormConversion(pl.Callback):
    """Gives BatchNorm layers the statistics of all ranks' batches during training.

    When ``fit`` begins, layers are converted to synchronised ones, on both CPU and
    CUDA. When training ends, they are restored, so exports, and the ``on_train_end``
    hooks of the module and of later callbacks, see plain BatchNorm. State dicts keep
    the same keys. Copies of layers made during training are restored as well if they
    are in the module; others stay synchronised until ``restore_batchnorm`` restores
    them. Layers that are added later are not converted. Rank 0 logs the conversion.
    With one rank nothing is done.

    Subclasses of ``BatchNorm1d``, ``BatchNorm2d`` and ``BatchNorm3d`` are not
    converted, and rank 0 names them in a warning. They can inherit from
    :class:`~lightning_ddp_ext.SyncBatchNorm` instead.

    ``Trainer(strategy="ddp_ext", sync_batchnorm=True)`` does the same for all layers,
    until just before ``on_fit_end``.

    Args:
        include, exclude: convert only, or do not convert, layers that match a pattern
            of layer names, such as ``"backbone.*"``, or one of several patterns. If the
            name of a module matches, so do all layers in it.

    Raises:
        ConfigurationError: an argument is invalid; in ``fit``, ``include`` or
            ``exclude`` matches no layer, or layers were selected in addition to
            ``sync_batchnorm=True``.

    Example::

        conversion = SyncBatchNormConversion(exclude="head.*")
        trainer = L.Trainer(strategy="ddp_ext", devices=2, callbacks=[conversion])
    """

    def __init__(self, include: Selection = None, exclude: Selection = None) -> None:
        self._choice = LayerChoice(include, exclude)
        self._layers = RanksLayerSync(self._choice)

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        is_refused = not self._choice.is_all and layer_sync_of(trainer.strategy) is not None
        if stage == "fit" and is_refused:
            raise ConfigurationError(
                "sync_batchnorm=True synchronises all layers, but SyncBatchNormConversion selects"
                " some of them; remove sync_batchnorm=True"
            )

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._layers.apply(pl_module)

    def _revert(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any
    ) -> None:
        self._layers.revert(pl_module)

    # The later hooks are for runs that do not call `on_train_end`: those without anything
    # to train, those that the Tuner ends, and those that fail.
    on_train_end = on_fit_end = teardown = on_exception = _revert


def _own_group() -> dist.ProcessGroup | None:
    """Return a group of all ranks for BatchNorm only; ``None`` for the default group.

    Collective.

    With gloo and a separate group, DDP's gradients and the layers' statistics do not
    wait for each other, and a rank in another layer cannot mix them up.
    """
    context = current()
    if context is None or not is_gloo("cuda"):  # with NCCL, a separate group has no advantage
        return None
    return context.new_group(purpose="BatchNorm")
