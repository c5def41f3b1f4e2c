"""Locate a Trainer's checkpoints: directories, and files that a run may resume from.

A launcher needs them before ``ModelCheckpoint`` chooses its directory and before the
ranks connect.
"""

from __future__ import annotations

import os
import re
import socket
from typing import Any

from lightning_ddp_ext.checkpoint.location import Location, PathOrUrl, locate
from lightning_ddp_ext.data.proxy import copy_attributes
from lightning_ddp_ext.errors import CheckpointError, ConfigurationError
from lightning_ddp_ext.ranks import chain_of, reason_of

from ..private.compat import checkpoint_of_requeued_job, chosen_directory_of
from ..private.lightning_tree import SLURMEnvironment, pl

# The name of the store's host may also be unknown at the moment.
_UNANSWERED = (TimeoutError, ConnectionError, socket.gaierror)


def checkpoint_directory(trainer: Any) -> str:
    """Return the directory of the Trainer's first checkpoint callback.

    By default, it is the default root directory.
    """
    callback = trainer.checkpoint_callback
    if isinstance(callback, pl.callbacks.ModelCheckpoint):
        return chosen_directory_of(callback, trainer)
    return str(getattr(callback, "dirpath", None) or trainer.default_root_dir)


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


def path_of_run_file(name: PathOrUrl | None, command: str, trainer: Any) -> str | None:
    """Return the path of a checkpoint that no callback saves.

    The command that ``command`` names finds the file there again. A path is kept; a
    file name is placed next to the other checkpoints. If a logger chooses the directory
    of these, possibly a new one in each run, the file is placed in a directory of this
    command under the default root directory.
    """
    if name is None:
        return None
    path = os.fspath(name)
    if os.path.dirname(path):
        return canonical(path)
    if follows_logger(trainer):
        directory = os.path.join(trainer.default_root_dir, "checkpoints", command)
    else:
        directory = checkpoint_directory(trainer)
    return canonical(os.path.join(directory, path))


def canonical(path: str) -> str:
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


def versions_of(path: str | None) -> set[str]:
    """Return the paths of all versions of a file that exist.

    If listing is refused, return ``path`` itself; reading it then raises the reason on
    every rank.

    Raises:
        CheckpointError: the store does not answer.
    """
    if path is None:
        return set()
    directory, name = os.path.split(path)
    stem, suffix = os.path.splitext(name)
    # A job's number may come before the version.
    version = re.compile(rf"{re.escape(stem)}(-v\d+)*{re.escape(suffix)}")
    return _matching_files(directory, version, if_refused=path)


def _matching_files(directory: str, pattern: re.Pattern[str], *, if_refused: str) -> set[str]:
    """Return the files whose names match, or ``{if_refused}`` if listing is refused."""
    try:
        files = _files_in(directory)
    except Exception as error:  # each kind of store raises its own errors
        raise_if_unanswered(directory, error)
        return {if_refused}
    return {path for path in files if pattern.fullmatch(os.path.basename(path))}


def raise_if_unanswered(path: str, error: BaseException) -> None:
    """End a search if a store did not answer a request.

    Each further request might also take minutes. Any other error is an answer.

    Raises:
        CheckpointError: the error is, or follows from, a timeout or a lost connection.
    """
    # Clients of stores wrap the errors of their connections.
    if any(isinstance(cause, _UNANSWERED) for cause in chain_of(error)):
        raise CheckpointError(
            f"cannot search {path} for checkpoints: {reason_of(error)}; check that it can be"
            " reached, or pass the path of a checkpoint as ckpt_path"
        ) from error


def _files_in(directory: str) -> list[str]:
    """Return the paths or URLs of the files in a directory, also if it does not exist.

    A file system lists them without the protocol of a URL.
    """
    location = _locate_anew(directory)
    try:
        listed = location.fs.ls(location.path, detail=False)
    except (FileNotFoundError, NotADirectoryError, NotImplementedError):
        return []
    return [os.path.join(directory, os.path.basename(path)) for path in listed]


def _locate_anew(path: str) -> Location:
    """Return the location, without what its store listed earlier.

    Other processes may have changed it since.
    """
    location = locate(path)
    location.fs.invalidate_cache(location.path)
    return location


def follows_logger(trainer: Any) -> bool:
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
    return {canonical(path) for path in paths if path}


def _last_files(callback: pl.callbacks.ModelCheckpoint, trainer: Any) -> set[str]:
    """Return the files that Lightning takes for ``"last"``.

    Lightning itself loses the protocol of a URL. If listing is refused, return the
    usual file; reading it then raises the reason on every rank.
    """
    directory = chosen_directory_of(callback, trainer)
    stem = callback.CHECKPOINT_NAME_LAST
    suffix = callback.FILE_EXTENSION
    name = re.compile(rf"{stem}.*{re.escape(suffix)}")
    return _matching_files(directory, name, if_refused=os.path.join(directory, f"{stem}{suffix}"))


def modification_time(path: str) -> float | None:
    """Return a file's modification time, or ``None`` if the file does not exist.

    The time is infinity if the store refuses or does not record it.

    Raises:
        CheckpointError: the store does not answer.
    """
    location = _locate_anew(path)
    try:
        if location.local is not None:
            return location.local.stat().st_mtime
        return float(location.fs.modified(location.path).timestamp())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # each kind of store raises its own errors
        raise_if_unanswered(path, error)
        return float("inf")


def change_token(path: str) -> str:
    """Return a text that differs after a file was changed or replaced.

    It is empty if the store does not tell.
    """
    location = _locate_anew(path)
    try:
        return str(location.fs.ukey(location.path))
    except Exception:  # each kind of store raises its own errors
        return ""
