"""Lightning's ``CheckpointIO`` on top of the subpackage ``checkpoint``, for one rank."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from typing_extensions import override

from lightning_ddp_ext.checkpoint.async_save import Saver
from lightning_ddp_ext.checkpoint.load import LoadOptions, MapLocation, Mode, placement
from lightning_ddp_ext.checkpoint.location import PathLike, locate
from lightning_ddp_ext.checkpoint.restore import restore
from lightning_ddp_ext.checkpoint.save import link, remove, write
from lightning_ddp_ext.ranks import Ranks

from .lightning_tree import pl, rank_zero_info, rank_zero_warn
from .options import check_choice

# The file in which Lightning's launchers pass weights from a started rank to the process that started it.
_HANDED_OVER = ".temp.ckpt"


class RankZeroCheckpointIO(pl.plugins.CheckpointIO):
    """Writes a checkpoint whole or not at all, checks what it reads, and saves in the background on request.

    It is the default of :class:`~lightning_ddp_ext.DDPExtStrategy`, and a plugin for any other strategy:
    ``Trainer(plugins=[RankZeroCheckpointIO(background=True)])``. With a stock strategy only rank 0 raises a save error,
    and each rank reads the whole file; add :class:`~lightning_ddp_ext.RankZeroCheckpoint`, and the ranks save, fail and
    read together.

    Local files are streamed to the disk, and then put in place in one step. Other URLs (``s3://``, ``gs://``,
    ``memory://``, ...) go through fsspec within a transaction.

    Args:
        map_location: the device for the file's tensors, in any form that ``torch.load`` accepts. ``None``: the CPU,
            from which model and optimisers copy them to each rank's device.
        background: whether ``save_checkpoint`` returns as soon as the content is copied in memory. The file may not
            exist yet: see :meth:`wait`. The next save, or the end of ``fit``, raises the save error.
        verify: whether checksums are checked on loading. Files of torch 1.6 and later have them, unless they were
            switched off; a file without checksums is read with a warning.
        weights_only: whether only data may be read, and no objects of other classes; ``None``: torch's own default.
            ``Trainer.fit(weights_only=...)`` takes precedence.
        restore: how ranks read together. ``"map"``: each maps the file. ``"broadcast"``: rank 0 reads and sends.
            ``"auto"``: map if all see the same file, else broadcast.

    Raises:
        ConfigurationError: an argument has an unknown value.
    """

    def __init__(
        self,
        map_location: MapLocation = None,
        *,
        background: bool = False,
        verify: bool = True,
        weights_only: bool | None = None,
        restore: Mode = "auto",
    ) -> None:
        placement(map_location)  # raises for a wrong one now rather than when it is used
        check_choice("restore", restore, *get_args(Mode))
        self.background = background
        self.load_options = LoadOptions(restore, map_location, weights_only, verify)
        self.is_default = False
        self.saver = Saver()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: PathLike, storage_options: Any = None) -> None:
        """Write ``checkpoint`` to ``path``. Only rank 0 needs to call it.

        Raises:
            CheckpointSaveError: it was not written, and an existing local file is left untouched; in the background
                also: an earlier save failed, and this one was not attempted.
        """
        if storage_options is not None:
            raise TypeError(
                f"storage_options is not supported by RankZeroCheckpointIO (got {storage_options!r}); configure the "
                "file system with fsspec's own settings"
            )
        self.saver.raise_error()
        if self.background and Path(path).name != _HANDED_OVER:
            self.saver.save_later(os.fspath(path), checkpoint, partial(write, path=path))
        else:
            self.saver.save(os.fspath(path), partial(write, checkpoint, path))

    @override
    def load_checkpoint(
        self, path: PathLike, map_location: MapLocation = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint on this rank alone, into its own memory.

        Raises:
            CheckpointError: one of its kinds.
        """
        self.wait()
        return self.read(path, Ranks(), map_location, weights_only)  # type: ignore[no-any-return]

    def read(
        self,
        path: PathLike,
        ranks: Ranks,
        map_location: MapLocation = None,
        weights_only: bool | None = None,
        *,
        map_weights: bool = False,
    ) -> Any:
        """Read a checkpoint on all of ``ranks``, or raise on all; warn of a file without checksums. Collective."""
        given: dict[str, Any] = {"map_location": map_location, "weights_only": weights_only}
        options = replace(self.load_options, **{name: value for name, value in given.items() if value is not None})
        content, how, is_checked = restore(locate(path), ranks, options, map_weights=map_weights)
        if ranks.world_size > 1:
            rank_zero_info(f"checkpoint {os.fspath(path)}: {how}")
        if not is_checked:
            rank_zero_warn(
                f"checkpoint {os.fspath(path)} has no checksums, so altered numbers cannot be detected; "
                "save it again with RankZeroCheckpointIO, or pass verify=False"
            )
        return content

    @override
    def remove_checkpoint(self, path: PathLike) -> None:
        """Remove a checkpoint after all earlier saves; if the last one failed, after the next save that succeeds.

        Only rank 0 needs to call it.

        Raises:
            CheckpointError: it could not be removed.
        """
        self.saver.follow_up(os.fspath(path), partial(remove, path), later=self.background, postpone=True)

    def link(self, target: PathLike, path: PathLike) -> None:
        """Make ``path`` a symbolic link to the checkpoint ``target``, in one step and after all earlier saves.

        Raises:
            CheckpointSaveError: the file system has no links, or the path is a directory.
        """
        self.saver.follow_up(os.fspath(path), partial(link, target, path), later=self.background)

    def wait(self) -> None:
        """Wait until all checkpoints are on the disk. Only rank 0 has anything to wait for.

        Raises:
            CheckpointSaveError: a save failed, and its error was not raised yet.
        """
        self.saver.wait()

    @override
    def teardown(self) -> None:
        """Wait for all saves, and release the memory of background saves; the strategy calls it at the end."""
        try:
            self.wait()
        finally:
            self.saver.release()
