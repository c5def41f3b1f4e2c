"""What ``ckpt_path="last"`` stands for: the newest whole file among the last checkpoints and the stop checkpoint.

Each rank looks on its own disk before the ranks have met; later all restore what rank 0 has found. Rank 0 alone reads
the files to tell whether they are whole.
"""

from __future__ import annotations

import os
from typing import Any

from lightning_ddp_ext.checkpoint.load import refuse_damage
from lightning_ddp_ext.checkpoint.location import locate
from lightning_ddp_ext.checkpoint.zip_crc import open_archive
from lightning_ddp_ext.errors import CheckpointError

from .compat import requeued_checkpoint_of
from .lightning_tree import SLURMEnvironment, pl, rank_zero_info, rank_zero_warn, refuse_missing

refuse_missing(pl.callbacks.ModelCheckpoint, "_find_last_checkpoints")


def with_last_checkpoint(args: tuple[Any, ...], trainer: Any, *, is_rank_zero: bool) -> tuple[Any, ...]:
    """The arguments of a function of the Trainer's, with a path in place of ``ckpt_path="last"``.

    They stay as they are where nothing whole is found: then Lightning says that there is nothing, or reading says what
    is wrong.
    """
    if trainer is None or "last" not in [arg for arg in args if isinstance(arg, str)]:
        return args
    newest_first = sorted(candidates(trainer), key=_modified, reverse=True)
    found = newest_whole(newest_first) if is_rank_zero else next(iter(newest_first), None)
    if found is None:
        return args
    if is_rank_zero:  # a started rank does not know its rank yet, so all would log
        rank_zero_info(f"ckpt_path='last' is {found}")
    return tuple(found if isinstance(arg, str) and arg == "last" else arg for arg in args)


def candidates(trainer: Any) -> set[str]:
    """Last checkpoints, and the files that are saved when the ranks are asked to stop, or one of them fails."""
    callbacks = [each for each in trainer.checkpoint_callbacks if isinstance(each, pl.callbacks.ModelCheckpoint)]
    found: set[str | None] = {path for callback in callbacks for path in callback._find_last_checkpoints(trainer)}
    found |= {getattr(callback, "ckpt_path", None) for callback in trainer.callbacks}  # of an OnExceptionCheckpoint
    if trainer.strategy.stop_checkpoint is not None:
        directories = [callback.dirpath for callback in callbacks] or [trainer.default_root_dir]
        found |= {os.path.join(directory, trainer.strategy.stop_checkpoint) for directory in directories if directory}
    if SLURMEnvironment.detect():
        found.add(requeued_checkpoint_of(trainer))
    paths = {os.path.normpath(path) for path in found if path}
    return {path for path in paths if locate(path).fs.exists(locate(path).path)}


def newest_whole(newest_first: list[str]) -> str | None:
    """The first of these files that is whole; files that are passed over are named."""
    if len(newest_first) == 1:
        return newest_first[0]  # there is nothing else to take, and it is checked when it is read
    for path in newest_first:
        local = locate(path).local
        try:
            if local is not None:  # what a store elsewhere shows is whole
                archive = open_archive(local, path)
                refuse_damage(archive, archive.tensor_data)
        except CheckpointError as error:
            rank_zero_warn(f"ckpt_path='last' passes over a file that is not whole: {error}")
        else:
            return path
    return None


def _modified(path: str) -> float:
    location = locate(path)
    return float(location.fs.modified(location.path).timestamp())
