"""Record the sockets that a block of code opens, and abort their connections."""

from __future__ import annotations

import gc
import os
import socket
from contextlib import ExitStack, suppress

_OPEN_FILES = "/proc/self/fd"


class OpenedSockets:
    """The sockets of torch that this process opens during a ``with`` block.

    They can be aborted at any time. torch opens them in C++, in any thread. Those of
    Python objects, such as a logger's, are left alone.
    """

    def __init__(self) -> None:
        self._before = _open_sockets()
        self._after: set[tuple[int, str]] | None = None

    def __enter__(self) -> OpenedSockets:
        return self

    def __exit__(self, *exception: object) -> None:
        self._after = _open_sockets()

    def abort(self) -> None:
        """Shut down these connections; threads that wait on one get an error.

        This unblocks threads in a gloo collective or a store; torch's ``abort`` and
        ``destroy_process_group`` do not if another thread calls them. Listening sockets
        stay open, as do descriptors that were closed and have been reused: these have
        another inode.
        """
        still_open = _open_sockets() - self._before
        opened = still_open if self._after is None else still_open & self._after
        of_python = _descriptors_of_python() if opened else set()
        for descriptor, inode in opened:
            if descriptor not in of_python:
                _end_connection(descriptor, inode)


def _open_sockets() -> set[tuple[int, str]]:
    """Return this process's sockets, each a descriptor and an inode."""
    sockets = set()
    for descriptor in os.listdir(_OPEN_FILES):
        with suppress(OSError):  # closed meanwhile
            inode = os.readlink(f"{_OPEN_FILES}/{descriptor}")
            if inode.startswith("socket:"):
                sockets.add((int(descriptor), inode))
    return sockets


def _descriptors_of_python() -> set[int]:
    """Return the descriptors of Python's socket objects; this takes some 0.1 s."""
    # The type of an object, since its class may be an attribute that has effects.
    objects = (each for each in gc.get_objects() if issubclass(type(each), socket.socket))
    return {each.fileno() for each in objects}


def _end_connection(descriptor: int, inode: str) -> None:
    with suppress(OSError), ExitStack() as stack:
        duplicate = os.dup(descriptor)
        stack.callback(os.close, duplicate)
        if os.readlink(f"{_OPEN_FILES}/{duplicate}") != inode:
            return  # closed and reused meanwhile, for example by a file with a lock
        is_blocking = os.get_blocking(duplicate)
        connection = socket.socket(fileno=duplicate)
        stack.callback(connection.detach)
        os.set_blocking(duplicate, is_blocking)  # socket.setdefaulttimeout changes it
        # Raises for a listening socket: shutting it down would abort gloo's process.
        connection.getpeername()
        connection.shutdown(socket.SHUT_RDWR)
