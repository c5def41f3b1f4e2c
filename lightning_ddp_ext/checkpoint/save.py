"""Write a checkpoint, or remove one: on a local disk by ourselves, elsewhere through fsspec."""

from __future__ import annotations

import errno
import os
import pwd
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_crc32_options, set_crc32_options

from lightning_ddp_ext.checkpoint.atomic_file import Sink, atomic_symlink, atomic_write
from lightning_ddp_ext.checkpoint.location import Location, PathLike, locate
from lightning_ddp_ext.checkpoint.skeleton import split
from lightning_ddp_ext.errors import CheckpointError, CheckpointSaveError

Progress = Callable[[int], None]


def write(checkpoint: Any, path: PathLike, on_progress: Progress | None = None) -> None:
    """Write ``checkpoint`` in torch's format to ``path``, which then holds it whole, or else what it held before.

    A local file is streamed, forced to the disk and put in place in one step. In a store behind fsspec it is written
    within a transaction: where the store completes an upload as a whole (S3, GCS, Azure, memory) the same holds, and
    the store itself answers for its lasting.

    Args:
        checkpoint: whatever ``torch.save`` takes.
        path: a path or URL; missing directories are made.
        on_progress: called with the number of bytes so far.

    Raises:
        CheckpointSaveError: it is not written; what was there before is untouched.
    """
    location = locate(path)
    try:
        if location.local is not None:
            _write_local(checkpoint, location.local, on_progress)
        else:
            _write_remote(checkpoint, location, on_progress)
    except OSError as error:
        raise save_error(error, location) from error
    except CheckpointError:
        raise
    except Exception as error:
        raise unwritable(checkpoint, path, error) from error


def _write_local(checkpoint: Any, path: Path, on_progress: Progress | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Before a gigabyte has been written, not after; a name that is too long is found here, too.
    if path.is_dir() and not path.is_symlink():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with atomic_write(path, on_progress) as sink:
        _fill(checkpoint, sink)


def _fill(checkpoint: Any, sink: Sink) -> None:
    try:
        with _checksums():
            torch.save(checkpoint, sink)  # type: ignore[arg-type] # needs no more than write and flush
    except Exception:
        if sink.error is not None:
            raise sink.error from None  # torch says it in other words, and Ctrl-C, too
        raise


@contextmanager
def _checksums() -> Iterator[None]:
    """Have torch record checksums, whatever the user's setting."""
    chosen = get_crc32_options()
    set_crc32_options(True)
    try:
        yield
    finally:
        set_crc32_options(chosen)


def _write_remote(checkpoint: Any, location: Location, on_progress: Progress | None) -> None:
    location.fs.makedirs(location.fs._parent(location.path), exist_ok=True)
    with location.fs.transaction, location.fs.open(location.path, "wb") as file, _checksums():
        torch.save(checkpoint, file)
        if on_progress is not None:
            on_progress(file.tell())


def remove(path: PathLike) -> None:
    """Remove a checkpoint, file or directory; nothing happens where there is none.

    Raises:
        CheckpointError: it is still there.
    """
    location = locate(path)
    try:
        if location.local is not None:
            _remove_local(location.local)
        elif location.fs.exists(location.path):
            location.fs.rm(location.path, recursive=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot remove checkpoint {location.url}: {error.strerror or error}; {_remedy(error, location)}"
        ) from error


def link(target: PathLike, path: PathLike) -> None:
    """Make ``path`` a symbolic link to the local file ``target`` in one step; a copy where there are no links.

    Raises:
        CheckpointSaveError: neither could be made.
    """
    location, source = locate(path), locate(target)
    assert location.local is not None, "Lightning refuses links elsewhere"
    assert source.local is not None, "Lightning refuses links elsewhere"
    try:
        if location.local.is_dir() and not location.local.is_symlink():
            shutil.rmtree(location.local)
        try:
            atomic_symlink(source.local, location.local)
        except OSError:
            with atomic_write(location.local) as sink, source.local.open("rb") as file:
                shutil.copyfileobj(file, sink)
    except OSError as error:
        raise save_error(error, location) from error


def _remove_local(path: Path) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    except FileNotFoundError:
        pass


def save_error(error: OSError, location: Location) -> CheckpointSaveError:
    """The named error for what the system said."""
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
        return f"free some space{_space_left(directory)}, or save elsewhere"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"let user {_user()} write to {directory}, or save elsewhere"
    if error.errno == errno.EROFS:
        return "its file system is mounted read-only: save elsewhere"
    if error.errno in (errno.EISDIR, errno.ENOTEMPTY):
        return "there is a directory at that path: remove it, or choose another name"
    if error.errno == errno.ENAMETOOLONG:
        return f"shorten the file name ({len(os.fsencode(Path(location.path).name))} bytes)"
    if error.errno == errno.ENOENT:
        return f"directory {directory} has been removed: make it again, or save elsewhere"
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return "a file stands where the path needs a directory: choose another path"
    return "look at the file system, or save elsewhere"


def _space_left(directory: Path) -> str:
    try:
        status = os.statvfs(directory)
    except OSError:
        return ""
    return f" ({status.f_bavail * status.f_frsize / 2**20:.0f} MiB are left on the file system of {directory})"


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


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
