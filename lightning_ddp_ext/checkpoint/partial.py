"""A file that is being written: it appears at its path whole or not at all, and a killed writer's rest is known.

It is written under a name of its own in the same directory, forced to the disk, and put in the place of what was there
in one step. While it is open its writer holds a lock on it, which ends with the process: a rest whose lock is free is
nobody's any more.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"\.ddpx-[0-9a-f]{16}\.partial")
# The disk is set to work each time so much has been written: in the end less is left to wait for.
_WRITE_BACK_EVERY = 32 << 20
_LONGEST_WRITE = 8 << 20
_SYNC_FILE_RANGE_WRITE = 2  # start, do not wait
_NOT_SUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}

# A process's own locks never stand in its own way, so what it is writing has to be known otherwise: by name, for one
# directory goes by several paths.
_mine: set[str] = set()


class Sink:
    """The writable end of a partial file: unbuffered, counts what it takes, keeps what has broken it off.

    Args:
        descriptor: where to write.
        on_progress: called with the number of bytes so far.
    """

    def __init__(self, descriptor: int, on_progress: Callable[[int], None] | None = None) -> None:
        self._descriptor = descriptor
        self._on_progress = on_progress
        self._written_back = 0
        self.position = 0
        self.error: BaseException | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write all of it; who gets the error of a disk, or Ctrl-C, in other words finds it in ``error``."""
        view = memoryview(data).cast("B")
        try:
            for start in range(0, len(view), _LONGEST_WRITE):
                self._write(view[start : start + _LONGEST_WRITE])
        except BaseException as error:
            self.error = error
            raise
        return len(view)

    def _write(self, view: memoryview) -> None:
        while view:
            view = view[os.write(self._descriptor, view) :]
        self.position = os.lseek(self._descriptor, 0, os.SEEK_CUR)
        if self.position - self._written_back >= _WRITE_BACK_EVERY:
            _start_write_back(self._descriptor, self._written_back, self.position)
            self._written_back = self.position
        if self._on_progress is not None:
            self._on_progress(self.position)

    def flush(self) -> None:
        """Nothing is held back."""


@contextmanager
def replacing(path: Path, on_progress: Callable[[int], None] | None = None) -> Iterator[Sink]:
    """What the block writes to the sink is at ``path`` afterwards, on the disk; if it raises, nothing has changed.

    Raises:
        OSError: the system's, as it is.
    """
    partial = path.parent / f".ddpx-{secrets.token_hex(8)}.partial"
    _mine.add(partial.name)
    try:
        descriptor = _create_locked(partial)
        try:
            yield Sink(descriptor, on_progress)
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
        _mine.discard(partial.name)


def _create_locked(partial: Path) -> int:
    while True:
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
    """What a killed save has left behind."""

    path: Path
    size: int
    """Bytes."""
    age: float
    """Seconds since it was last written to."""


def find_leftovers(directory: Path) -> list[Leftover]:
    """Partial files in the directory that nobody is writing any more, on whichever host."""
    found = []
    for entry in os.scandir(directory):
        path = Path(entry.path)
        if _NAME.fullmatch(entry.name) and entry.name not in _mine and not _is_being_written(path):
            with suppress(FileNotFoundError):
                status = entry.stat()
                found.append(Leftover(path, status.st_size, max(0.0, time.time() - status.st_mtime)))
    return sorted(found, key=lambda leftover: leftover.path)


def remove_leftovers(directory: Path) -> list[Leftover]:
    """Remove what :func:`find_leftovers` finds, and return it."""
    leftovers = find_leftovers(directory)
    for leftover in leftovers:
        leftover.path.unlink(missing_ok=True)
    return leftovers


def _is_being_written(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # it has just been finished
    except OSError:
        return True  # somebody else's, whom this process cannot ask
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


def _start_write_back(descriptor: int, start: int, end: int) -> None:
    if _sync_file_range is not None:
        _sync_file_range(descriptor, start, end - start, _SYNC_FILE_RANGE_WRITE)


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    """Linux's own; elsewhere all of the waiting is in the end."""
    try:
        function = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


_sync_file_range = _find_sync_file_range()
