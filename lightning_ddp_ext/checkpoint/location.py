"""Locate a checkpoint in a file system or an object store, and look for others there.

A search that fails is an error, so that no run starts anew although it has a checkpoint.
A store whose library cannot list files, as that of http, has none to find.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_ddp_ext.errors import CheckpointError
from lightning_ddp_ext.ranks import reason_of

PathOrUrl = str | Path


@dataclass(frozen=True)
class Location:
    """The location of a checkpoint.

    Attributes:
        fs: the file system.
        path: the path within the file system.
        url: the path or URL as the user wrote it.
    """

    fs: AbstractFileSystem
    path: str
    url: str

    @property
    def local(self) -> Path | None:
        """The path on this machine's file systems, including network ones.

        It is ``None`` for an object store.
        """
        return Path(self.path) if isinstance(self.fs, LocalFileSystem) else None


def locate(path: PathOrUrl) -> Location:
    """Return the location of a path or URL (``s3://bucket/key``).

    Raises:
        CheckpointError: no library for this kind of URL is installed, or the URL is
            invalid.
    """
    url = os.fspath(path)
    try:
        fs, inner = url_to_fs(url)
    except Exception as error:  # each kind of store raises its own errors
        raise CheckpointError(
            f"checkpoint path {url!r} cannot be used ({reason_of(error)}); write it as"
            " /path/to/file or s3://bucket/key"
        ) from error
    return Location(fs, inner, url)


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


def names_in(directory: str) -> set[str]:
    """Return the names of the files and folders in a directory, which may be missing.

    Raises:
        CheckpointError: they cannot be listed.
    """
    try:
        location = _locate_anew(directory)
        listed = location.fs.ls(location.path, detail=False)
    except (FileNotFoundError, NotADirectoryError, NotImplementedError):
        return set()
    except Exception as error:  # each kind of store raises its own errors
        raise _search_error(directory, error) from error
    # Only the names, because a file system lists paths without the protocol of a URL.
    return {os.path.basename(path.rstrip("/")) for path in listed}


def modification_times(paths: Iterable[str]) -> dict[str, float]:
    """Return when the files that exist were changed, by path.

    A time is infinity if the store does not record it, so the file counts as the newest.

    Raises:
        CheckpointError: a time cannot be read.
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
    except NotImplementedError:
        return float("inf")
    except Exception as error:  # each kind of store raises its own errors
        raise _search_error(path, error) from error


def _search_error(path: str, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"cannot search {path} for checkpoints: {reason_of(error)}; check that it can be reached,"
        " or pass the path of a checkpoint as ckpt_path"
    )


def _locate_anew(path: str) -> Location:
    """Return the location, without what its store listed earlier.

    Other processes may have changed it since.
    """
    location = locate(path)
    location.fs.invalidate_cache(location.path)
    return location
