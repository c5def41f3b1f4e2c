"""Write or remove a checkpoint: a local file atomically, any other URL through fsspec."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from lightning_ddp_ext.checkpoint.location import Location, PathOrUrl, locate
from lightning_ddp_ext.errors import CheckpointError, CheckpointSaveError
from lightning_ddp_ext.ranks import reason_of

_WritePart = Callable[[memoryview], int | None]


def write(checkpoint: Any, path: PathOrUrl) -> None:
    """Write ``checkpoint`` to ``path`` in torch's format.

    A local file is streamed, flushed to disk and then renamed in one step; if it cannot
    be written, an existing file is unchanged. In a store behind fsspec, the checkpoint is
    written within a transaction. Stores with atomic uploads (S3, GCS, Azure, memory) give
    the same guarantee, except that durability is up to the store.

    Args:
        checkpoint: anything that ``torch.save`` accepts.
        path: a path or URL; missing directories are created.

    Raises:
        CheckpointSaveError: the file was not written.
    """
    location = locate(path)
    opened = _upload(location) if location.local is None else _atomic_file(location.local)
    try:
        with _checksums(), opened as write_part:
            _save(checkpoint, _Sink(write_part))
    except Exception as error:  # of the system, the store, or pickle, which names the object
        is_system_error = isinstance(error, OSError)
        remedy = "; check its space and permissions, or save elsewhere" if is_system_error else ""
        raise CheckpointSaveError(
            f"cannot save checkpoint {location.url}: {_reason(error)}{remedy}",
            path=location.url,
            errno=getattr(error, "errno", None),
        ) from error


def remove(path: PathOrUrl) -> None:
    """Remove a checkpoint file or directory; do nothing if it does not exist.

    Raises:
        CheckpointError: the checkpoint could not be removed.
    """
    location = locate(path)
    try:
        location.fs.rm(location.path, recursive=True)
    except FileNotFoundError:
        return
    except Exception as error:  # each kind of store raises its own errors
        raise CheckpointError(
            f"cannot remove checkpoint {location.url}: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or reason_of(error)


def _save(checkpoint: Any, sink: _Sink) -> None:
    """Call ``torch.save``, and raise the sink's own error.

    torch would replace it, even a KeyboardInterrupt.
    """
    try:
        torch.save(checkpoint, sink)  # type: ignore[arg-type] # only needs write and flush
    finally:
        if sink.error is not None:
            raise sink.error from None


class _Sink:
    """Writes all data that it gets, and keeps the error that stopped it.

    Args:
        write_part: writes data, and returns the number of bytes written, if not all.
    """

    def __init__(self, write_part: _WritePart) -> None:
        self._write_part = write_part
        self.error: BaseException | None = None

    def write(self, data: bytes | memoryview) -> int:
        if self.error is not None:
            raise self.error  # torch writes again after an error
        view = memoryview(data).cast("B")
        size = len(view)
        try:
            while view:
                written = self._write_part(view)
                view = view[written or len(view) :]  # paramiko returns nothing (sftp://)
        except BaseException as error:
            self.error = error
            raise
        return size

    def flush(self) -> None:
        """Do nothing, because nothing is buffered here."""


@contextmanager
def _atomic_file(path: Path) -> Iterator[_WritePart]:
    """Replace the file at ``path`` by what the block writes, unless the block raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".ddpx-{secrets.token_hex(8)}.partial")
    # O_EXCL does not follow a link that another user may have created there.
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            yield lambda data: os.write(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)  # before the file is in place, since it may raise
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
    with suppress(OSError):  # file systems may not support it; the directory may be unreadable
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@contextmanager
def _upload(location: Location) -> Iterator[_WritePart]:
    """Upload what the block writes, unless the block raises."""
    fs = location.fs
    fs.makedirs(fs._parent(location.path), exist_ok=True)
    with fs.transaction, fs.open(location.path, "wb") as file:
        yield file.write


@contextmanager
def _checksums() -> Iterator[None]:
    """Make torch record checksums, regardless of the user's setting."""
    chosen = get_crc32_options()
    set_crc32_options(True)
    try:
        yield
    finally:
        set_crc32_options(chosen)
