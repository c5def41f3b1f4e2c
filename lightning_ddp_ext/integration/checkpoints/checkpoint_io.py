"""Implement Lightning's ``CheckpointIO`` with the subpackage ``checkpoint``."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from lightning_ddp_ext.checkpoint.load import LoadOptions, MapLocation
from lightning_ddp_ext.checkpoint.location import PathOrUrl, locate
from lightning_ddp_ext.checkpoint.restore import restore
from lightning_ddp_ext.checkpoint.save import remove, write
from lightning_ddp_ext.ranks import Ranks

from ..private.lightning_tree import pl, rank_zero_info, rank_zero_warn


class RankZeroCheckpointIO(pl.plugins.CheckpointIO):
    """Use this plugin to choose how files are read, with any strategy.

    With :class:`~lightning_ddp_ext.DDPExtStrategy` it is the default. With a stock
    strategy, it also needs the callback :class:`~lightning_ddp_ext.RankZeroCheckpoint`,
    which makes the ranks save, fail and read together; without it, only rank 0 raises
    save errors, and each rank reads the whole file.

    Local files are streamed to disk and then put in place in one step. Other URLs
    (``s3://``, ``gs://``, ``memory://``, ...) go through fsspec within a transaction. To
    save in the background, pass Lightning's ``AsyncCheckpointIO(RankZeroCheckpointIO())``.

    Args:
        map_location: the device for the file's tensors, in any form that ``torch.load``
            accepts, or ``"rank"`` for the rank's own device. ``None`` means the CPU, from
            which the model and its optimisers copy them to each rank's device.
        verify: whether to check checksums when loading. Files written by torch 1.6 or
            later have checksums unless these were switched off; a file without
            checksums is read with a warning.
        weights_only: whether only data may be read, and no objects of other classes;
            ``None`` uses torch's default. ``Trainer.fit(weights_only=...)`` takes
            precedence.

    Example::

        trainer = L.Trainer(plugins=[RankZeroCheckpointIO(map_location="rank")])
    """

    def __init__(
        self,
        map_location: MapLocation = None,
        *,
        verify: bool = True,
        weights_only: bool | None = None,
    ) -> None:
        self.load_options = LoadOptions(map_location, weights_only, verify)

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathOrUrl, storage_options: Any = None
    ) -> None:
        """Write ``checkpoint`` to ``path``. Only rank 0 needs to call it.

        Raises:
            CheckpointSaveError: the file was not written, and an existing local file is
                left untouched.
            TypeError: ``storage_options`` is not ``None``.
        """
        if storage_options is not None:
            raise TypeError(
                "storage_options is not supported by RankZeroCheckpointIO (got"
                f" {storage_options!r}); configure the file system with fsspec's own settings"
            )
        write(checkpoint, path)

    @override
    def load_checkpoint(
        self, path: PathOrUrl, map_location: MapLocation = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint on this rank alone, into its own memory.

        Raises:
            CheckpointError: the checkpoint cannot be read.
        """
        # Lightning does not tell the rank's device, but selects it on a GPU.
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
        return self.read(  # type: ignore[no-any-return]
            path, Ranks(device=device), map_location, weights_only
        )

    def read(
        self,
        path: PathOrUrl,
        ranks: Ranks,
        map_location: MapLocation = None,
        weights_only: bool | None = None,
        *,
        map_weights: bool = False,
    ) -> Any:
        """Read a checkpoint on all ``ranks``, or raise on all of them.

        Warn if checksums are missing. Collective.

        Args:
            path: the file.
            ranks: the ranks that read.
            map_location: takes precedence over this object's own, unless ``None``.
            weights_only: takes precedence over this object's own, unless ``None``.
            map_weights: see :func:`~lightning_ddp_ext.checkpoint.restore.restore`.
        """
        options = replace(
            self.load_options, **given(map_location=map_location, weights_only=weights_only)
        )
        restored = restore(locate(path), ranks, options, map_weights=map_weights)
        if ranks.world_size > 1:
            rank_zero_info(f"checkpoint {os.fspath(path)}: {restored.how}")
        if restored.lacks_checksums:
            rank_zero_warn(
                f"checkpoint {os.fspath(path)} has no checksums, so damage cannot be detected; "
                "save it again with RankZeroCheckpointIO, or pass verify=False"
            )
        return restored.content

    @override
    def remove_checkpoint(self, path: PathOrUrl) -> None:
        """Remove a checkpoint. Only rank 0 needs to call it.

        Raises:
            CheckpointError: the checkpoint could not be removed.
        """
        remove(path)


def given(**arguments: Any) -> dict[str, Any]:
    """Return the arguments that are not ``None``."""
    return {name: value for name, value in arguments.items() if value is not None}
