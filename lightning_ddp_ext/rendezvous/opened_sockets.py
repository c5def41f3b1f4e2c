"""Record the sockets that a block of code opens, and abort their connections."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

_OPEN_FILES = "/proc/self/fd"


class OpenedSockets:
    """The sockets that this process opens during a ``with`` block, in any thread.

    They can be aborted at any time.
    """

    def __init__(self) -> None:
        self._before = _sockets_of_this_process()
        self._opened: dict[int, str] | None = None

    def __enter__(self) -> OpenedSockets:
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened = self._opened_so_far()

    def abort(self) -> None:
        """Shut down these connections; threads that wait on one get an error.

        This unblocks threads in a gloo collective or a store; torch's ``abort`` and
        ``destroy_process_group`` do not if another thread calls them. Listening sockets
        stay open, as do descriptors that were closed and have been reused: these have
        another inode.
        """
        opened = self._opened_so_far() if self._opened is None else self._opened
        for descriptor, identity in opened.items():
            if _identity(descriptor) == identity:
                _end_connection(descriptor)

    def _opened_so_far(self) -> dict[int, str]:
        return {
            fd: identity
            for fd, identity in _sockets_of_this_process().items()
            if self._before.get(fd) != identity
        }


def _sockets_of_this_process() -> dict[int, str]:
    identities = {fd: _identity(fd) for fd in map(int, os.listdir(_OPEN_FILES))}
    return {fd: identity for fd, identity in identities.items() if identity.startswith("socket:")}


def _identity(descriptor: int) -> str:
    try:
        return os.readlink(f"{_OPEN_FILES}/{descriptor}")
    except OSError:
        return ""


def _end_connection(descriptor: int) -> None:
    with suppress(OSError):
        is_blocking = os.get_blocking(descriptor)
        with socket.socket(fileno=os.dup(descriptor)) as duplicate:
            os.set_blocking(descriptor, is_blocking)  # socket.setdefaulttimeout changes it
            # Raises for a listening socket: shutting it down would abort gloo's process.
            duplicate.getpeername()
            duplicate.shutdown(socket.SHUT_RDWR)
