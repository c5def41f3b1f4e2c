"""Where a checkpoint is: a file system, and a path in it."""

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

PathLike = str | Path

_PIECE = 16 << 20


@dataclass(frozen=True)
class Location:
    """Where a checkpoint is.

    Attributes:
        fs: the file system.
        path: the path in it.
        url: how the user wrote it.
    """

    fs: AbstractFileSystem
    path: str
    url: str

    @property
    def local(self) -> Path | None:
        """The path on this machine's own file systems, network ones among them; ``None`` for a store elsewhere."""
        return Path(self.path) if isinstance(self.fs, LocalFileSystem) else None


def locate(path: PathLike) -> Location:
    """The location that a path or URL (``s3://bucket/key``) stands for.

    Raises:
        CheckpointError: no library for that kind of URL is installed.
    """
    url = os.fspath(path)
    try:
        fs, inner = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise CheckpointError(f"checkpoint path {url!r} needs a file system that is not there: {error}") from error
    return Location(fs, inner, url)


@contextmanager
def on_local_disk(location: Location) -> Iterator[str]:
    """A path at which the file can be opened: its own, or that of a temporary copy of an object of a store elsewhere.

    Raises:
        CheckpointNotFoundError: there is no such object.
        CheckpointError: it cannot be fetched.
    """
    if location.local is not None:
        yield str(location.local)
        return
    with tempfile.NamedTemporaryFile(prefix="checkpoint-") as file:
        try:
            with location.fs.open(location.path, "rb") as remote:
                shutil.copyfileobj(remote, file, _PIECE)
            file.flush()
        except FileNotFoundError:
            raise CheckpointNotFoundError(
                f"checkpoint {location.url} does not exist; give the path of a file"
            ) from None
        except Exception as error:  # every kind of store has its own
            raise CheckpointError(
                f"checkpoint {location.url} cannot be fetched: {type(error).__name__}: {error}"
            ) from error
        yield file.name
