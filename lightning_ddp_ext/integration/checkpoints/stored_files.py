"""Look for files in a directory or an object store: which exist, and when they changed.

A store that does not answer ends the search with an error, because each further request
might also take minutes. Any other error is an answer: the file may exist, and reading
it later raises the reason on every rank.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable

from lightning_ddp_ext.checkpoint.location import Location, locate
from lightning_ddp_ext.errors import CheckpointError
from lightning_ddp_ext.ranks import chain_of, reason_of

# The name of the store's host may also be unknown at the moment.
_UNANSWERED = (TimeoutError, ConnectionError, socket.gaierror)


def absolute(path: str) -> str:
    """Return one name for a local file or directory; a URL is unchanged.

    A file that is a link is not resolved, because it may get another target.

    Raises:
        CheckpointError: no library for this kind of URL is installed, or the URL is
            invalid.
    """
    local = locate(path).local
    if local is None:
        return path
    return os.path.join(os.path.realpath(local.parent), local.name)


def names_in(directory: str, *, if_refused: str) -> set[str]:
    """Return the names of the files and folders in a directory, which may be missing.

    If listing is refused, return ``{if_refused}``.

    Raises:
        CheckpointError: the store does not answer.
    """
    try:
        location = _locate_anew(directory)
        listed = location.fs.ls(location.path, detail=False)
    except (FileNotFoundError, NotADirectoryError, NotImplementedError):
        return set()
    except Exception as error:  # each kind of store raises its own errors
        _raise_if_unanswered(directory, error)
        return {if_refused}
    # Only the names, because a file system lists paths without the protocol of a URL.
    return {os.path.basename(path.rstrip("/")) for path in listed}


def modification_times(paths: Iterable[str]) -> dict[str, float]:
    """Return when the files that exist were changed, by path.

    A time is infinity if the store refuses or does not record it.

    Raises:
        CheckpointError: the store does not answer.
    """
    times = {path: _modification_time(path) for path in paths}
    return {path: time for path, time in times.items() if time is not None}


def _modification_time(path: str) -> float | None:
    location = _locate_anew(path)
    try:
        if location.local is not None:
            return location.local.stat().st_mtime
        return float(location.fs.modified(location.path).timestamp())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except Exception as error:  # each kind of store raises its own errors
        _raise_if_unanswered(path, error)
        return float("inf")


def _raise_if_unanswered(path: str, error: BaseException) -> None:
    """Raise if the error is, or follows from, a timeout or a lost connection."""
    # Clients of stores wrap the errors of their connections.
    if any(isinstance(cause, _UNANSWERED) for cause in chain_of(error)):
        raise CheckpointError(
            f"cannot search {path} for checkpoints: {reason_of(error)}; check that it can be"
            " reached, or pass the path of a checkpoint as ckpt_path"
        ) from error


def _locate_anew(path: str) -> Location:
    """Return the location, without what its store listed earlier.

    Other processes may have changed it since.
    """
    location = locate(path)
    location.fs.invalidate_cache(location.path)
    return location
