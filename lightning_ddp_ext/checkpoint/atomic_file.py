"""Write a file so that it appears at its path whole or not at all, and find what killed writers have left.

It is written under a temporary name in the same directory, forced to the disk, and renamed. While it is open its writer
holds a lock on it, which ends with the process. Some file systems keep locks to one host, so a temporary file counts as
left behind only when, besides, nobody has written to it for an hour.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"\.ddpx-([0-9a-f]{16}\.partial|[0-9a-f]+\.link)")
_LEFT_BEHIND_AFTER = 3600.0
# The disk is set to work each time so much has been written: in the end less is left to wait for.
_WRITE_BACK_EVERY = 32 << 20
_LONGEST_WRITE = 8 << 20
_NOT_SUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}

# To look at the lock of a file that this process is writing would end that lock. They are known by name, because one
# directory goes by several paths.
_being_written_here: set[str] = set()


class Sink:
    """The writable end of a temporary file: unbuffered; it keeps the error that ended it.

    Args:
        descriptor: where to write.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._written = self._written_back = 0
        self.error: BaseException | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write all of ``data``; an error of the disk, or Ctrl-C, is kept in ``error``: torch rewords it."""
        view = memoryview(data).cast("B")
        size = len(view)
        try:
            while view:
                view = view[os.write(self._descriptor, view[:_LONGEST_WRITE]) :]
        except BaseException as error:
            self.error = error
            raise
        self._written += size
        if self._written - self._written_back >= _WRITE_BACK_EVERY:
            self._start_write_back()
        return size

    def _start_write_back(self) -> None:
        # The pages that are written now are not dropped; on Linux this advice starts the disk, and does not wait.
        if hasattr(os, "posix_fadvise"):  # not on macOS
            length = self._written - self._written_back
            os.posix_fadvise(self._descriptor, self._written_back, length, os.POSIX_FADV_DONTNEED)
        self._written_back = self._written

    def flush(self) -> None:
        """Nothing is held back."""


@contextmanager
def atomic_write(path: Path) -> Iterator[Sink]:
    """Put at ``path``, on the disk, what the block writes to the sink; if it raises, nothing changes.

    Raises:
        OSError: the system's, as it is.
    """
    partial = _temporary(path, "partial")
    _being_written_here.add(partial.name)
    try:
        descriptor = _create_locked(partial)
        try:
            yield Sink(descriptor)
            os.fsync(descriptor)
            os.replace(partial, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(partial)
            raise
        finally:
            os.close(descriptor)
        sync_directory(path.parent)
    finally:
        _being_written_here.discard(partial.name)


def atomic_symlink(target: Path, path: Path) -> None:
    """Make ``path`` a symbolic link to ``target`` in one step.

    Raises:
        OSError: the system's, as it is.
    """
    temporary = _temporary(path, "link")
    os.symlink(os.path.relpath(target, path.parent), temporary)
    os.replace(temporary, path)


def _temporary(path: Path, suffix: str) -> Path:
    return path.parent / f".ddpx-{secrets.token_hex(8)}.{suffix}"


def _create_locked(partial: Path) -> int:
    while True:  # O_EXCL follows no link that somebody else may have put there
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        _lock(descriptor)
        if os.fstat(descriptor).st_nlink:
            return descriptor
        os.close(descriptor)  # somebody has taken it for a leftover before it was locked, and removed it


def sync_directory(directory: Path) -> None:
    """Force to the disk which names are in the directory, where its file system and its owner allow that."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        return  # one may write to it, and not read
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class Leftover:
    """A temporary file that no process of this host is writing.

    Attributes:
        path: where it is.
        size: bytes.
        age: seconds since it was last written to.
    """

    path: Path
    size: int
    age: float

    @property
    def is_left_behind(self) -> bool:
        """Whether nobody is writing it on another host, either."""
        return self.age > _LEFT_BEHIND_AFTER


def find_leftovers(directory: Path) -> list[Leftover]:
    """Temporary files in the directory that no process of this host is writing."""
    found = []
    for entry in os.scandir(directory):
        path = Path(entry.path)
        if _NAME.fullmatch(entry.name) and entry.name not in _being_written_here and not _is_being_written(path):
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                found.append(Leftover(path, status.st_size, max(0.0, time.time() - status.st_mtime)))
    return sorted(found, key=lambda leftover: leftover.path)


def remove_leftovers(directory: Path) -> list[Leftover]:
    """Remove temporary files that were left behind, and return them."""
    leftovers = [leftover for leftover in find_leftovers(directory) if leftover.is_left_behind]
    for leftover in leftovers:
        leftover.path.unlink(missing_ok=True)
    return leftovers


def _is_being_written(path: Path) -> bool:
    if path.suffix == ".link":
        return False
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return True  # it has just been finished, or is somebody else's, whom this process cannot ask
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True  # locked, or locks do not work here
    finally:
        os.close(descriptor)
    return False


def _lock(descriptor: int) -> None:
    # A record lock, not flock: it is not inherited by the loader's workers, which outlive a killed writer for a while.
    with suppress(OSError):
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
