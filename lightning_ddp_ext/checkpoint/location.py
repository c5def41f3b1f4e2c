"""Locate a checkpoint: find its file system and its path there."""

from __future__ import annotations

import os
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
