"""Implement Lightning's ``CheckpointIO`` with the subpackage ``checkpoint``."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from typing_extensions import override

from lightning_ddp_ext.checkpoint.async_save import Saver
from lightning_ddp_ext.checkpoint.load import LoadOptions, MapLocation, placement
from lightning_ddp_ext.checkpoint.location import PathOrUrl, locate
from lightning_ddp_ext.checkpoint.restore import restore
from lightning_ddp_ext.checkpoint.save import link, remove, write
from lightning_ddp_ext.ranks import Ranks

from ..private.lightning_tree import pl, rank_zero_info, rank_zero_warn

# The file in which a started rank passes weights to Lightning's launcher.
_HANDED_OVER = ".temp.ckpt"


class RankZeroCheckpointIO(pl.plugins.CheckpointIO):
    """Writes checkpoints atomically, optionally in the background, and verifies reads.

    It is the default of :class:`~lightning_ddp_ext.DDPExtStrategy` and a plugin for any
    other strategy: ``Trainer(plugins=[RankZeroCheckpointIO(background=True)])``. With a
    stock strategy, only rank 0 raises save errors, and each rank reads the whole file.
    Add :class:`~lightning_ddp_ext.RankZeroCheckpoint` to make the ranks save, fail and
    read together.

    Local files are streamed to disk and then put in place in one step. Other URLs
    (``s3://``, ``gs://``, ``memory://``, ...) go through fsspec within a transaction.

    Args:
        map_location: the device for the file's tensors, in any form that ``torch.load``
            accepts. ``None`` means the CPU, from which the model and its optimisers
            copy them to each rank's device.
        background: whether ``save_checkpoint`` returns as soon as the content is copied
            in memory. The file may not exist yet, see :meth:`wait`. A save error is
            raised in the next save or at the end of ``fit``.
        verify: whether to check checksums when loading. Files written by torch 1.6 or
            later have checksums unless these were switched off; a file without
            checksums is read with a warning.
        weights_only: whether only data may be read, and no objects of other classes;
            ``None`` uses torch's default. ``Trainer.fit(weights_only=...)`` takes
            precedence.

    Raises:
        ConfigurationError: an argument has an invalid value.
    """

    def __init__(
        self,
        map_location: MapLocation = None,
        *,
        background: bool = False,
        verify: bool = True,
        weights_only: bool | None = None,
    ) -> None:
        placement(map_location)  # raises for an invalid one now instead of when it is used
        self.background = background
        self.load_options = LoadOptions(map_location, weights_only, verify)
        self.is_default = False  # true if the strategy made it, so a callback may replace it
        self.saver = Saver()

    @override
    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: PathOrUrl, storage_options: Any = None
    ) -> None:
        """Write ``checkpoint`` to ``path``. Only rank 0 needs to call it.

        Raises:
            CheckpointSaveError: the file was not written, and an existing local file is
                left untouched; the file was written, but a power failure may undo that;
                or an earlier background save failed, and this save was not attempted.
            TypeError: ``storage_options`` is not ``None``.
        """
        if storage_options is not None:
            raise TypeError(
                "storage_options is not supported by RankZeroCheckpointIO (got"
                f" {storage_options!r}); configure the file system with fsspec's own settings"
            )
        if self.background and Path(path).name != _HANDED_OVER:
            self.saver.save_later(os.fspath(path), checkpoint, partial(write, path=path))
        else:
            self.saver.save(os.fspath(path), partial(write, checkpoint, path))

    @override
    def load_checkpoint(
        self, path: PathOrUrl, map_location: MapLocation = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint on this rank alone, into its own memory.

        Raises:
            CheckpointError: the checkpoint cannot be read.
        """
        self.wait()
        return self.read(path, Ranks(), map_location, weights_only)  # type: ignore[no-any-return]

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
        """
        arguments: dict[str, Any] = {"map_location": map_location, "weights_only": weights_only}
        passed = {name: value for name, value in arguments.items() if value is not None}
        options = replace(self.load_options, **passed)
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
        """Remove a checkpoint after all earlier saves.

        If the last save failed, remove it after the next save that succeeds. Only rank
        0 needs to call it.

        Raises:
            CheckpointError: the checkpoint could not be removed.
        """
        self.saver.follow_up(
            os.fspath(path), partial(remove, path), later=self.background, postpone=True
        )

    def link(self, target: PathOrUrl, path: PathOrUrl) -> None:
        """Make ``path`` a symbolic link to the checkpoint ``target``.

        This happens in one step and after all earlier saves.

        Raises:
            CheckpointSaveError: the file system does not support links, or the path is
                a directory.
        """
        self.saver.follow_up(os.fspath(path), partial(link, target, path), later=self.background)

    def wait(self) -> None:
        """Wait until all checkpoints are on disk. Only rank 0 has anything to wait for.

        Raises:
            CheckpointSaveError: a save failed, and its error has not been raised yet.
        """
        self.saver.wait()

    @override
    def teardown(self) -> None:
        """Wait for all saves, and release the memory of background saves.

        The strategy calls this at the end.
        """
        try:
            self.wait()
        finally:
            self.saver.release()
