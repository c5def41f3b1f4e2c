"""Locate a checkpoint: find its file system and its path there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from lightning_ddp_ext.errors import CheckpointError, CheckpointNotFoundError

PathOrUrl = str | Path

_COPY_BUFFER = 8 << 20  # bytes


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
    except ImportError as error:
        raise CheckpointError(
            f"checkpoint path {url!r} needs a library that is not installed: {error}"
        ) from error
    except Exception as error:  # each kind of store raises its own errors
        raise CheckpointError(
            f"checkpoint path {url!r} is not a valid path or URL ({type(error).__name__}: {error});"
            " write it as /path/to/file or s3://bucket/key"
        ) from error
    return Location(fs, inner, url)


@contextmanager
def on_local_disk(location: Location) -> Iterator[str]:
    """Yield a local path of the file, or of a temporary copy from an object store.

    Raises:
        CheckpointNotFoundError: the object does not exist.
        CheckpointError: the object cannot be fetched.
    """
    if location.local is not None:
        yield str(location.local)
        return
    with tempfile.NamedTemporaryFile(prefix="checkpoint-") as file:
        try:
            _copy(location, file.name)
        except FileNotFoundError:
            raise CheckpointNotFoundError(
                f"checkpoint {location.url} does not exist; pass the path of a file"
            ) from None
        except Exception as error:  # each kind of store raises its own errors
            raise CheckpointError(
                f"checkpoint {location.url} cannot be fetched: {type(error).__name__}: {error}"
            ) from error
        yield file.name


def _copy(location: Location, target: str) -> None:
    """Copy the file to the local path ``target``, in parallel if the store can do that.

    Otherwise, read it from its beginning to its end.
    """
    try:
        location.fs.get_file(location.path, target)
    except FileNotFoundError:
        raise
    except Exception:  # s3fs repeats an interrupted request only if a file is read
        with location.fs.open(location.path, "rb") as source, open(target, "wb") as copy:
            shutil.copyfileobj(source, copy, _COPY_BUFFER)
