"""Write or remove a checkpoint: a local file directly, any other URL through fsspec."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from lightning_ddp_ext.checkpoint.atomic_file import (
    NotDurableError,
    Sink,
    atomic_symlink,
    atomic_write,
    remove_leftovers,
)
from lightning_ddp_ext.checkpoint.location import Location, PathOrUrl, locate
from lightning_ddp_ext.errors import CheckpointError, CheckpointSaveError

# What a failed save means for the file at its path.
_UNTOUCHED = "an existing file is left untouched"
_IN_PLACE = "the new file is complete and in place, but a power failure may still undo the save"
_NOT_KNOWN = "whether an existing file is left untouched depends on the store"
_REMEDY = "check its space and permissions, or save elsewhere"


def write(checkpoint: Any, path: PathOrUrl) -> None:
    """Write ``checkpoint`` to ``path`` in torch's format.

    A local file is streamed, flushed to disk and then renamed in one step; if it cannot
    be written, an existing file is unchanged. Temporary files left behind in its
    directory by killed saves are removed. In a store behind fsspec, the checkpoint is
    written within a transaction, which is aborted after an error. Stores with atomic
    uploads (S3, GCS, Azure, memory) give the same guarantee, except that durability is
    up to the store.

    Args:
        checkpoint: anything that ``torch.save`` accepts.
        path: a path or URL; missing directories are created.

    Raises:
        CheckpointSaveError: the file was not written or may not be durable; the message
            describes the file at the path.
    """
    location = locate(path)
    if location.local is None:
        opened = _upload(location)
        outcome = _NOT_KNOWN
    else:
        opened = _local_file(location.local)
        outcome = _UNTOUCHED
    try:
        with _checksums(), opened as sink:
            _save(checkpoint, sink)
    except OSError as error:
        if isinstance(error, NotDurableError):
            outcome = _IN_PLACE
        message = f"cannot save checkpoint {location.url}: {_explained(error)}; {outcome}"
        raise CheckpointSaveError(message, path=location.url, errno=error.errno) from error
    except Exception as error:
        raise unwritable(path, error, outcome) from error


def _save(checkpoint: Any, sink: Sink) -> None:
    """Call ``torch.save``, and raise the sink's own error.

    torch would replace it, even a KeyboardInterrupt.
    """
    try:
        torch.save(checkpoint, sink)  # type: ignore[arg-type] # only needs write and flush
    except Exception:
        if sink.error is None:
            raise
        raise sink.error from None


@contextmanager
def _local_file(path: Path) -> Iterator[Sink]:
    path.parent.mkdir(parents=True, exist_ok=True)
    if _is_directory(path):  # raise before writing a gigabyte in vain
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with suppress(OSError):  # leftover files are harmless
        remove_leftovers(path.parent)
    with atomic_write(path) as sink:
        yield sink


@contextmanager
def _upload(location: Location) -> Iterator[Sink]:
    """Upload what the block writes, or abort the upload if the block raises.

    An upload that a store cannot be told to abort stays there.
    """
    fs = location.fs
    fs.makedirs(fs._parent(location.path), exist_ok=True)
    fs.start_transaction()
    try:
        file = fs.open(location.path, "wb")

        def write_part(data: memoryview) -> int:
            written: int | None = file.write(data)
            return len(data) if written is None else written  # paramiko counts nothing (sftp://)

        try:
            yield Sink(write_part)
        except BaseException:
            file.forced = True  # HACK: fsspec then closes the file without uploading the rest
            raise
        finally:
            file.close()
    except BaseException:
        with suppress(Exception):
            fs.transaction.complete(commit=False)
        raise
    fs.end_transaction()


@contextmanager
def _checksums() -> Iterator[None]:
    """Make torch record checksums, regardless of the user's setting."""
    chosen = get_crc32_options()
    set_crc32_options(True)
    try:
        yield
    finally:
        set_crc32_options(chosen)


def remove(path: PathOrUrl) -> None:
    """Remove a checkpoint file or directory; do nothing if it does not exist.

    Raises:
        CheckpointError: the checkpoint could not be removed.
    """
    location = locate(path)
    local = location.local
    try:
        if local is None:
            location.fs.rm(location.path, recursive=True)
        elif _is_directory(local):
            shutil.rmtree(local)
        else:
            local.unlink()
    except FileNotFoundError:
        return
    except Exception as error:  # each kind of store raises its own errors
        raise CheckpointError(
            f"cannot remove checkpoint {location.url}: {_explained(error)}"
        ) from error


def link(target: PathOrUrl, path: PathOrUrl) -> None:
    """Make ``path`` a symbolic link to the local file ``target`` in one step.

    Raises:
        CheckpointSaveError: the file system does not support links, or the path is a
            directory.
    """
    local = locate(path).local
    source = locate(target).local
    assert local is not None, "Lightning refuses links elsewhere"
    assert source is not None
    try:
        atomic_symlink(source, local)
    except OSError as error:
        message = (
            f"cannot link checkpoint {path} to {target}: {error.strerror}; remove a directory at"
            " that path, or use save_last=True to write a file"
        )
        raise CheckpointSaveError(message, path=path, errno=error.errno) from error


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _explained(error: Exception) -> str:
    """Return the system's or the store's reason, and the remedy."""
    reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
    return f"{reason}; {_REMEDY}"


def unwritable(path: PathOrUrl, error: Exception, outcome: str = _UNTOUCHED) -> CheckpointSaveError:
    """Return the error for a checkpoint that cannot be copied or pickled.

    The error of pickle names the class of the object.
    """
    message = f"cannot save checkpoint {path}: {type(error).__name__}: {error}; {outcome}"
    return CheckpointSaveError(message, path=str(path))
