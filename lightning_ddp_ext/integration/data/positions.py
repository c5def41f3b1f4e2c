"""Find the Trainer's epoch, its positions in training loaders, and this rank's generators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lightning_ddp_ext.data.loader import DistributedLoader, TrainingLoader
from lightning_ddp_ext.data.position import LoaderPosition
from lightning_ddp_ext.data.proxy import iterable_of

from ..private.compat import combined_loader_of
from ..start.devices import RankDevicesStrategy


def epoch_of(trainer: Any) -> int:
    """Return the current or next epoch.

    With ``max_steps``, ``trainer.current_epoch`` lags behind.
    """
    return int(trainer.fit_loop.epoch_progress.current.processed)


def training_loaders_of(trainer: Any) -> list[TrainingLoader]:
    """Return the training loaders, in the order of the combined loader."""
    return _loaders_of(trainer.fit_loop)


def positions_of(trainer: Any) -> list[LoaderPosition]:
    """Return each training loader's position, in the order of the combined loader."""
    return [loader.position for loader in training_loaders_of(trainer)]


def validation_loaders_of(trainer: Any) -> list[DistributedLoader]:
    """Return the loaders of the fit's validation, in the order of the combined loader."""
    return _loaders_of(trainer.fit_loop.epoch_loop.val_loop)


def _loaders_of(loop: Any) -> list[Any]:
    combined = combined_loader_of(loop)
    return [] if combined is None else [iterable_of(loader) for loader in combined.flattened]


def training_generators(
    strategy: RankDevicesStrategy, positions: Iterable[LoaderPosition]
) -> list[Any]:
    """Return the non-global generators of this rank's training.

    These are the generators of its CUDA devices and of loaders with these positions.
    """
    devices = [device for device in strategy.rank_devices if device.type == "cuda"]
    on_device = [torch.cuda.default_generators[device.index] for device in devices]
    in_loaders = [generator for position in positions for generator in position.generators]
    return [*on_device, *in_loaders]
