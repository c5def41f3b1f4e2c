"""Listen on and connect to ports, and name the addresses of this host."""

from __future__ import annotations

import errno
import os
import socket
import struct
from pathlib import Path
from typing import Any


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
    all_interfaces = "::" if is_dual else "0.0.0.0"
    bound_to = host if is_loopback(host) else all_interfaces
    family, *_, address = socket.getaddrinfo(bound_to, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(
        address[:2], family=family, backlog=1024, dualstack_ipv6=is_dual
    )
    listener.setblocking(True)  # regardless of socket.setdefaulttimeout
    return listener


def connect_socket(host: str, port: int, seconds: float) -> socket.socket:
    """Return a TCP socket that is connected to a port.

    Raises:
        OSError: nothing accepts the connection within ``seconds``.
    """
    connected = socket.create_connection((host, port), timeout=seconds)
    if connected.getsockname() == connected.getpeername():
        # No process listens, and the kernel chose the same port for this side. A reset
        # frees it for rank 0.
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connected.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    return connected


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
    entries = [entry for _, entry in _interfaces()]
    ordered = [
        entry.address
        for family in (socket.AF_INET, socket.AF_INET6)
        for entry in entries
        if entry.family == family
    ]
    # A scope such as %eth0 means nothing on another host.
    return sorted((address for address in ordered if "%" not in address), key=is_loopback)


def interface_of(address: str) -> str | None:
    """Return the name of this host's interface with the numeric ``address``, if any."""
    return next((name for name, entry in _interfaces() if entry.address == address), None)


def _interfaces() -> list[tuple[str, Any]]:
    """Return the names of this host's interfaces, each with one of its addresses."""
    import psutil  # importing it takes 6 ms, and a single process does not need it

    return [(name, each) for name, entries in psutil.net_if_addrs().items() for each in entries]


def network_identity() -> str:
    """Return an identity of this process's loopback network.

    It is the same for two processes if, and only if, they can reach each other by
    loopback. If a sandbox hides the boot or the namespace, it is the host's name.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/net")
    try:
        return f"{boot.read_text().strip()} {namespace.readlink()}"
    except OSError:  # one of them cannot be read
        return socket.gethostname()
