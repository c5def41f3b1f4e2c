"""Write files atomically, and remove temporary files left behind by killed processes.

A file is written under a temporary name in the same directory, flushed to disk and then
renamed. A temporary file counts as left behind after an hour without a write, because
on some file systems locks only work within one host.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_NAME = re.compile(r"\.ddpx-[0-9a-f]{16}\.partial")
_LEFT_BEHIND_AFTER = 3600.0
_NOT_SUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF}


class Sink:
    """Writes all data that it gets, and records the error that stopped it.

    Args:
        write: writes data, and returns the number of bytes written.
    """

    def __init__(self, write: Callable[[memoryview], int]) -> None:
        self._write = write
        self.error: BaseException | None = None

    def write(self, data: bytes | memoryview) -> int:
        """Write all of ``data``; record an exception in ``error``.

        torch replaces exceptions, even disk errors and Ctrl-C, and may write again.
        """
        if self.error is not None:
            raise self.error
        view = memoryview(data).cast("B")
        size = len(view)
        try:
            while view:
                view = view[self._write(view) :]
        except BaseException as error:
            self.error = error
            raise
        return size

    def flush(self) -> None:
        """Do nothing, because nothing is buffered."""


@contextmanager
def atomic_write(path: Path) -> Iterator[Sink]:
    """Replace the file at ``path`` with the data that the block writes.

    If the block raises, nothing changes.

    Raises:
        NotDurableError: the file is in place, but its directory could not be flushed to
            disk.
        OSError: the system's own error; nothing has changed.
    """
    partial = _temporary(path)
    # O_EXCL does not follow a link that another user may have created there.
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            yield Sink(lambda data: os.write(descriptor, data))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)  # before the file is in place, since it may raise
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(partial)
        raise
    try:
        _sync_directory(path.parent)
    except OSError as error:
        raise NotDurableError(*error.args) from error


class NotDurableError(OSError):
    """The file is in place, but a power failure may still undo that."""


def atomic_symlink(target: Path, path: Path) -> None:
    """Make ``path`` a symbolic link to ``target`` in one step.

    Raises:
        OSError: the system's own error.
    """
    temporary = _temporary(path)
    os.symlink(os.path.relpath(target, path.parent), temporary)
    try:
        os.replace(temporary, path)
    except OSError:
        os.unlink(temporary)
        raise


def _temporary(path: Path) -> Path:
    return path.parent / f".ddpx-{secrets.token_hex(8)}.partial"


def _sync_directory(directory: Path) -> None:
    """Flush a directory's names to disk, if file system and permissions allow that."""
    with suppress(PermissionError):  # a directory may be writable but not readable
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
        finally:
            os.close(descriptor)


def remove_leftovers(directory: Path) -> None:
    """Remove this user's temporary files that have not been written to for an hour."""
    for name in filter(_NAME.fullmatch, os.listdir(directory)):
        path = directory / name
        with suppress(OSError):  # another process may have removed it
            status = path.lstat()
            age = time.time() - status.st_mtime
            if status.st_uid == os.geteuid() and age > _LEFT_BEHIND_AFTER:
                path.unlink()
