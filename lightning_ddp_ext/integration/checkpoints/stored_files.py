"""Look for files in a directory or an object store: which exist, and when they changed.

A store that does not answer ends the search with an error, because each further request
might also take minutes. Any other error is an answer: the file may exist, and reading
it later raises the reason on every rank.
"""

from __future__ import annotations

import os
import re
import socket

from lightning_ddp_ext.checkpoint.location import Location, locate
from lightning_ddp_ext.errors import CheckpointError
from lightning_ddp_ext.ranks import chain_of, reason_of

# The name of the store's host may also be unknown at the moment.
_UNANSWERED = (TimeoutError, ConnectionError, socket.gaierror)


def matching_files(directory: str, pattern: re.Pattern[str], *, if_refused: str) -> set[str]:
    """Return the paths or URLs of the files in a directory whose names match.

    A missing directory has none. If listing is refused, return ``{if_refused}``.

    Raises:
        CheckpointError: the store does not answer.
    """
    try:
        location = _locate_anew(directory)
        listed = location.fs.ls(location.path, detail=False)
    except (FileNotFoundError, NotADirectoryError, NotImplementedError):
        return set()
    except Exception as error:  # each kind of store raises its own errors
        raise_if_unanswered(directory, error)
        return {if_refused}
    # Only the names, because a file system lists paths without the protocol of a URL.
    names = map(os.path.basename, listed)
    return {os.path.join(directory, name) for name in names if pattern.fullmatch(name)}


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


def _locate_anew(path: str) -> Location:
    """Return the location, without what its store listed earlier.

    Other processes may have changed it since.
    """
    location = locate(path)
    location.fs.invalidate_cache(location.path)
    return location
