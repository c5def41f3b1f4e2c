"""Record and abort the sockets that a block of code opens; list this host's addresses."""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

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
            # raises for a listening socket: shutting it down would abort gloo's process
            duplicate.getpeername()
            duplicate.shutdown(socket.SHUT_RDWR)


def listen(host: str, port: int) -> socket.socket:
    """Return a TCP socket that listens at a port.

    Args:
        host: the name or address by which others reach it. For ``localhost`` or a
            loopback address, the socket only accepts connections from this host. For
            any other host, or an empty one, it listens on all interfaces: an address
            may belong to a router in front of this host, and a host's own name often
            resolves to 127.0.1.1.

    Raises:
        OSError: the port cannot be bound.
    """
    is_dual = not is_loopback(host) and socket.has_dualstack_ipv6()
    if not is_loopback(host):
        host = "::" if is_dual else "0.0.0.0"
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(
        address[:2], family=family, backlog=1024, dualstack_ipv6=is_dual
    )
    listener.setblocking(True)  # regardless of socket.setdefaulttimeout
    return listener


def is_loopback(host: str) -> bool:
    """Whether a host name or address is only reachable from this host."""
    return host in ("::1", "localhost") or host.startswith(("127.", "::ffff:127."))


def host_of(address: tuple[Any, ...]) -> str:
    """Return the numeric host of a socket's address.

    A link-local host includes its scope, as in ``fe80::1%eth0``.
    """
    numeric = socket.NI_NUMERICHOST | socket.NI_NUMERICSERV
    return socket.getnameinfo(address, numeric)[0].removeprefix("::ffff:")


def own_addresses() -> list[str]:
    """Return this host's numeric addresses, loopback last, and IPv4 before IPv6."""
    entries = list(itertools.chain(*_interfaces().values()))
    ipv4 = [entry.address for entry in entries if entry.family == socket.AF_INET]
    ipv6 = [entry.address for entry in entries if entry.family == socket.AF_INET6]
    # A scope such as %eth0 means nothing on another host.
    without_scope = [address for address in ipv4 + ipv6 if "%" not in address]
    return sorted(without_scope, key=is_loopback)


def interface_of(address: str) -> str | None:
    """Return the name of this host's interface with the numeric ``address``, if any."""
    for name, entries in _interfaces().items():
        if any(entry.address == address for entry in entries):
            return str(name)
    return None


def _interfaces() -> dict[str, Any]:
    import psutil  # importing it takes 6 ms, and a single process does not need it

    return dict(psutil.net_if_addrs())


def network_identity() -> str:
    """Return an identity of this process's loopback network.

    It is the same for two processes if they can reach each other by loopback, and only
    then.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/net")
    try:
        return f"{boot.read_text().strip()} {namespace.readlink()}"
    except OSError:  # a sandbox may have neither
        return socket.gethostname()
