"""Write a checkpoint, or remove one: on a local disk by ourselves, elsewhere through fsspec."""

from __future__ import annotations

import errno
import os
import pwd
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from lightning_ddp_ext.checkpoint.atomic_file import atomic_symlink, atomic_write
from lightning_ddp_ext.checkpoint.location import Location, PathLike, locate
from lightning_ddp_ext.checkpoint.skeleton import split
from lightning_ddp_ext.errors import CheckpointError, CheckpointSaveError

_REMEDIES = {
    errno.EROFS: "its file system is mounted read-only: save elsewhere",
    errno.EISDIR: "there is a directory at that path: remove it, or choose another name",
    errno.ENAMETOOLONG: "shorten the file name",
    errno.ENOTDIR: "a file stands where the path needs a directory: choose another path",
    errno.EEXIST: "a file stands where the path needs a directory: choose another path",
}


def write(checkpoint: Any, path: PathLike) -> None:
    """Write ``checkpoint`` in torch's format to ``path``, which then holds it whole, or else what it held before.

    A local file is streamed, forced to the disk and put in place in one step. In a store behind fsspec it is written
    within a transaction: where the store completes an upload as a whole (S3, GCS, Azure, memory) the same holds, and
    the store itself answers for its lasting.

    Args:
        checkpoint: whatever ``torch.save`` takes.
        path: a path or URL; missing directories are made.

    Raises:
        CheckpointSaveError: it is not written; what was there before is untouched.
    """
    location = locate(path)
    try:
        with _checksums():
            if location.local is not None:
                _write_local(checkpoint, location.local)
            else:
                _write_remote(checkpoint, location)
    except OSError as error:
        raise _save_error(error, location) from error
    except CheckpointError:
        raise
    except Exception as error:
        raise unwritable(checkpoint, path, error) from error


def _write_local(checkpoint: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Before a gigabyte has been written, not after; a name that is too long is found here, too.
    if path.is_dir() and not path.is_symlink():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with atomic_write(path) as sink:
        try:
            torch.save(checkpoint, sink)  # type: ignore[arg-type] # needs no more than write and flush
        except Exception:
            if sink.error is not None:
                raise sink.error from None  # torch says it in other words, and Ctrl-C, too
            raise


def _write_remote(checkpoint: Any, location: Location) -> None:
    location.fs.makedirs(location.fs._parent(location.path), exist_ok=True)
    with location.fs.transaction, location.fs.open(location.path, "wb") as file:
        torch.save(checkpoint, file)


@contextmanager
def _checksums() -> Iterator[None]:
    """Have torch record checksums, whatever the user's setting."""
    chosen = get_crc32_options()
    set_crc32_options(True)
    try:
        yield
    finally:
        set_crc32_options(chosen)


def remove(path: PathLike) -> None:
    """Remove a checkpoint, file or directory; nothing happens where there is none.

    Raises:
        CheckpointError: it is still there.
    """
    location = locate(path)
    local = location.local
    try:
        if local is None:
            if location.fs.exists(location.path):
                location.fs.rm(location.path, recursive=True)
        elif local.is_dir() and not local.is_symlink():
            shutil.rmtree(local)
        else:
            local.unlink(missing_ok=True)
    except FileNotFoundError:
        return
    except OSError as error:
        raise CheckpointError(
            f"cannot remove checkpoint {location.url}: {error.strerror or error}; {_remedy(error, location)}"
        ) from error


def link(target: PathLike, path: PathLike) -> None:
    """Make ``path`` a symbolic link to the local file ``target`` in one step; a copy where there are no links.

    Raises:
        CheckpointSaveError: neither could be made.
    """
    location, source = locate(path), locate(target).local
    local = location.local
    assert local is not None and source is not None, "Lightning refuses links elsewhere"  # noqa: PT018
    try:
        if local.is_dir() and not local.is_symlink():
            shutil.rmtree(local)
        try:
            atomic_symlink(source, local)
        except OSError:
            with atomic_write(local) as sink, source.open("rb") as file:
                shutil.copyfileobj(file, sink)
    except OSError as error:
        raise _save_error(error, location) from error


def _save_error(error: OSError, location: Location) -> CheckpointSaveError:
    return CheckpointSaveError(
        f"cannot save checkpoint {location.url}: {error.strerror or error}; {_remedy(error, location)}; "
        "what was there before is untouched",
        path=location.url,
        errno=error.errno,
    )


def unwritable(checkpoint: Any, path: PathLike, error: Exception) -> CheckpointSaveError:
    """The named error for a checkpoint that cannot be written anywhere; says which entry is to blame."""
    return CheckpointSaveError(
        f"cannot save checkpoint {path}: {_culprit(checkpoint)}{type(error).__name__}: {error}; "
        "what was there before is untouched",
        path=str(path),
    )


def _remedy(error: OSError, location: Location) -> str:
    directory = Path(location.path).parent
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        with suppress(OSError):
            left = shutil.disk_usage(directory).free / 2**20
            return f"free some space ({left:.0f} MiB are left on the file system of {directory}), or save elsewhere"
    if error.errno in (errno.EACCES, errno.EPERM):
        with suppress(KeyError):
            return f"let user {pwd.getpwuid(os.geteuid()).pw_name} write to {directory}, or save elsewhere"
    return _REMEDIES.get(error.errno or 0, "look at the file system, or save elsewhere")


def _culprit(checkpoint: Any) -> str:
    """Which entry cannot be pickled, if that is the reason."""
    if not isinstance(checkpoint, dict):
        return ""
    for key, value in checkpoint.items():
        try:
            split(value)
        except Exception:
            return f"entry {key!r} cannot be pickled, so take it out or replace it in on_save_checkpoint: "
    return ""
