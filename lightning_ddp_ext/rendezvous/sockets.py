"""Listen on a TCP port, and identify this host's addresses and its network."""

from __future__ import annotations

import itertools
import socket
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
    named = ((name, entry) for name, entries in _interfaces().items() for entry in entries)
    return next((name for name, entry in named if entry.address == address), None)


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
