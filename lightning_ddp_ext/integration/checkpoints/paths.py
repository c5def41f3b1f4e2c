"""Name the directories and files of a Trainer's checkpoints.

A launcher needs them before ``ModelCheckpoint`` chooses its directory and before the
ranks connect.
"""

from __future__ import annotations

import os
import re
from typing import Any

from lightning_ddp_ext.checkpoint.location import PathOrUrl, locate
from lightning_ddp_ext.data.proxy import copy_attributes
from lightning_ddp_ext.errors import ConfigurationError

from ..private.compat import checkpoint_of_requeued_job, chosen_directory_of
from ..private.lightning_tree import SLURMEnvironment, pl
from .fit_identity import command
from .stored_files import matching_files


def check_file_name(field: str, name: Any) -> None:
    """Raise if ``name`` is not the name or path of a file, or ``None``.

    Raises:
        ConfigurationError: it has another type, or is that of a directory.
    """
    is_path = isinstance(name, (str, os.PathLike))
    is_directory = is_path and os.path.basename(os.fspath(name)) in ("", ".", "..")
    if is_directory or not (is_path or name is None):
        raise ConfigurationError(
            f"{field} must be the name or path of a file, or None (got {name!r}); for example,"
            f' write {field}="last.ckpt"'
        )


def path_of_run_file(name: PathOrUrl, trainer: Any) -> str:
    """Return the path of a checkpoint that no callback saves.

    The same command finds the file there again. A path is kept; a file name is placed
    next to the other checkpoints. If a logger chooses the directory of these, possibly
    a new one in each run, the file is placed in a directory of this command under the
    default root directory.
    """
    path = os.fspath(name)
    if os.path.dirname(path):
        return _canonical(path)
    if _follows_logger(trainer):
        directory = os.path.join(trainer.default_root_dir, "checkpoints", command())
    else:
        directory = _checkpoint_directory(trainer)
    return _canonical(os.path.join(directory, path))


def _follows_logger(trainer: Any) -> bool:
    """Whether Lightning takes the checkpoint directory from a logger.

    This includes a directory that it took from one in an earlier run.
    """
    callback = trainer.checkpoint_callback
    if not trainer.loggers or not isinstance(callback, pl.callbacks.ModelCheckpoint):
        return False
    undirected = copy_attributes(callback)
    undirected.dirpath = None
    by_logger = chosen_directory_of(undirected, trainer)
    return callback.dirpath in (None, by_logger)


def _checkpoint_directory(trainer: Any) -> str:
    """Return the directory of the Trainer's first checkpoint callback.

    By default, it is the default root directory.
    """
    callback = trainer.checkpoint_callback
    if isinstance(callback, pl.callbacks.ModelCheckpoint):
        return chosen_directory_of(callback, trainer)
    return str(getattr(callback, "dirpath", None) or trainer.default_root_dir)


def _canonical(path: str) -> str:
    """Return one name for a local file, whose directory is resolved.

    A file that is a link is not resolved, because it may get another target.
    """
    local = locate(path).local
    if local is None:
        return path
    return os.path.join(os.path.realpath(local.parent), local.name)


def versioned(path: str, number: int) -> str:
    """Return the path of another version of a file, named as Lightning does."""
    stem, suffix = os.path.splitext(path)
    return f"{stem}-v{number}{suffix}" if number else path


def versions_of(path: str) -> set[str]:
    """Return the paths of all versions of a file that exist.

    If listing is refused, return ``path`` itself; reading it then raises the reason on
    every rank.

    Raises:
        CheckpointError: the store does not answer.
    """
    directory, name = os.path.split(path)
    stem, suffix = os.path.splitext(name)
    # A job's number may come before the version.
    version = re.compile(rf"{re.escape(stem)}(-v\d+)*{re.escape(suffix)}")
    return matching_files(directory, version, if_refused=path)


def files_that_last_means(trainer: Any) -> set[str]:
    """Return the files that Lightning's ``"last"`` means.

    The file of a requeued SLURM job is included.
    """
    paths: set[str | None] = set()
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, pl.callbacks.ModelCheckpoint):
            paths |= _last_files(callback, trainer)
        elif isinstance(callback, pl.callbacks.OnExceptionCheckpoint):
            paths.add(callback.ckpt_path)
    if SLURMEnvironment.detect():
        paths.add(checkpoint_of_requeued_job(trainer))
    return {_canonical(path) for path in paths if path}


def _last_files(callback: pl.callbacks.ModelCheckpoint, trainer: Any) -> set[str]:
    """Return the files that Lightning takes for ``"last"``.

    Lightning itself loses the protocol of a URL. If listing is refused, return the
    usual file; reading it then raises the reason on every rank.
    """
    directory = chosen_directory_of(callback, trainer)
    stem = callback.CHECKPOINT_NAME_LAST
    suffix = callback.FILE_EXTENSION
    name = re.compile(rf"{stem}.*{re.escape(suffix)}")
    return matching_files(directory, name, if_refused=os.path.join(directory, f"{stem}{suffix}"))
