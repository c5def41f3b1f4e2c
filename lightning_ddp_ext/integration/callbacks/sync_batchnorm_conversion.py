"""A callback that synchronises BatchNorm during training, with any strategy."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from lightning_ddp_ext.batchnorm.groups import JoinedRanks
from lightning_ddp_ext.batchnorm.selection import LayerChoice, Selection

from ..layer_sync import RanksLayerSync
from ..private.compat import layer_sync_of
from ..private.lightning_tree import pl


class SyncBatchNormConversion(pl.Callback):
    """Gives BatchNorm layers the statistics of all ranks' batches during training.

    When ``fit`` begins, layers are converted to synchronised ones, on both CPU and
    CUDA. When training ends, they are restored, so exports, and the ``on_train_end``
    hooks of the module and of later callbacks, see plain BatchNorm. State dicts keep
    the same keys. Copies of layers made during training are restored as well if they
    are in the module; others stay synchronised until ``restore_batchnorm`` restores
    them. Layers that are added later are not converted. Rank 0 logs the conversion.
    With one rank nothing is done.

    A subclass of BatchNorm that overrides ``forward`` is not converted, and rank 0
    names it in a warning. It can inherit from :class:`~lightning_ddp_ext.SyncBatchNorm`
    instead.

    DDP sends rank 0's running statistics to all ranks before each step, which changes
    nothing if all ranks have the same statistics; for groups of ranks with separate
    statistics, disable it with ``broadcast_buffers=False``.

    ``Trainer(strategy="ddp_ext", sync_batchnorm=True)`` does the same for all layers
    and all ranks, until just before ``on_fit_end``.

    Args:
        include, exclude: convert only, or do not convert, layers that match a pattern
            of layer names, such as ``"backbone.*"``, a class of layers, or one of
            several of these. If a module matches, so do all its layers.
        process_group: the ranks whose batches are joined: ``None`` for all, ``"node"``
            for those on the same machine (in the same network namespace, if containers
            have their own), a number ``n`` for groups of ``n`` consecutive ranks, or a
            ``torch.distributed.ProcessGroup`` that was created before the Trainer.

    Raises:
        ConfigurationError: an argument is invalid; in ``fit``, ``include`` or
            ``exclude`` matches no layer, or layers or ranks were selected in addition
            to ``sync_batchnorm=True``.

    Example::

        conversion = SyncBatchNormConversion(exclude="head.*")
        trainer = L.Trainer(strategy="ddp_ext", devices=2, callbacks=[conversion])
    """

    def __init__(
        self,
        include: Selection = None,
        exclude: Selection = None,
        process_group: JoinedRanks = None,
    ) -> None:
        self._layers = RanksLayerSync(process_group, LayerChoice.of(include, exclude))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self._layers.refuse_alongside(layer_sync_of(trainer.strategy))

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._layers.apply(pl_module)

    def _revert(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any
    ) -> None:
        self._layers.revert(pl_module)

    # The later hooks are for runs with nothing to train or ended early by the Tuner.
    on_train_end = on_fit_end = teardown = on_exception = _revert
