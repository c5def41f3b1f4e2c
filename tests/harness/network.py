"""Hosts made of network namespaces, for tests that need several machines.

Each host has a network, a host name and an ``/etc/hosts`` of its own; processes, files and the clock are shared. The
hosts hang on a switch in a third namespace, so that a cut cable looks as it does between machines: links stay up,
packets vanish, and nobody gets a reset.

::

    def test_two_nodes(two_hosts: Network) -> None:
        host_a, host_b = two_hosts
        run_ranks(function, 4, namespaces=[host_a, host_a, host_b, host_b])          # ranks of tests.harness.ranks
        run_script(source, launcher=(*host_a.prefix, "torchrun", "--nnodes=2"))      # scripts of tests.harness.scripts
        two_hosts.cut()
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_NAMESPACES = Path("/run/netns")
_ETC = Path("/etc/netns")  # ``ip netns exec`` mounts what is in here over /etc
_PREFIX = "ddp-test"
_RENAME = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """One host: its name, the network namespace behind it, and its addresses (``address6`` empty without IPv6)."""

    name: str
    namespace: str
    address: str
    address6: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """The words that make a command run on this host; the command keeps its process id."""
        return ("ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", _RENAME, self.name)

    def enter(self) -> None:
        """Move this process to the host, for good; only while it has one thread. Needs root."""
        with open(_NAMESPACES / self.namespace) as network:
            _checked("setns", network.fileno(), _CLONE_NEWNET)
        _checked("unshare", _CLONE_NEWUTS | _CLONE_NEWNS)
        socket.sethostname(self.name)
        _checked("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        _checked("mount", bytes(_hosts_file(self.namespace)), b"/etc/hosts", None, _MS_BIND, None)


class Network:
    """Hosts on one switch, see ``network``; a sequence of them."""

    def __init__(self, hosts: Sequence[Host], switch: str) -> None:
        self.hosts = tuple(hosts)
        self._switch = switch

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def address(self, index: int, *, family: int = 4) -> str:
        """The IPv4 or IPv6 address of a host."""
        return self.hosts[index].address if family == 4 else self.hosts[index].address6

    def cut(self, index: int = 1) -> None:
        """Pull the host's cable out of the switch: from now on packets to and from it are lost without a word."""
        _ip(f"link set port{index} nomaster", namespace=self._switch)

    def mend(self, index: int = 1) -> None:
        """Plug the host's cable in again."""
        _ip(f"link set port{index} master switch", namespace=self._switch)


@contextlib.contextmanager
def network(*names: str) -> Iterator[Network]:
    """Make hosts of these names, and take them down again."""
    _remove_leftovers()
    stem = f"{_PREFIX}-{os.getpid()}-{next(_numbers)}"
    hosts = [_host(stem, number, name) for number, name in enumerate(names)]
    switch = f"{stem}-switch"
    try:
        _make_host_files(hosts)
        _make_namespaces([*(host.namespace for host in hosts), switch])
        _lay_cables(hosts, switch)
        yield Network(hosts, switch)
    finally:
        for namespace in (*(host.namespace for host in hosts), switch):
            _remove(namespace)


@functools.cache
def why_unavailable() -> str | None:
    """Why there can be no hosts here; None where there can."""
    missing = [tool for tool in ("ip", "unshare", "sh") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need the programs {', '.join(missing)} (iproute2, util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with network("probe") as probe:
            subprocess.run([*probe[0].prefix, "true"], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are refused here: {error.stderr.strip()}"
    return None


def leftovers() -> list[str]:
    """Namespaces that this process has made and not removed."""
    return [name for name in _names() if name.startswith(f"{_PREFIX}-{os.getpid()}-")]


def _host(stem: str, number: int, name: str) -> Host:
    address6 = f"fd77::{number + 1}" if _has_ipv6() else ""
    return Host(name, f"{stem}-{name}", f"10.77.0.{number + 1}", address6)


def _make_host_files(hosts: Sequence[Host]) -> None:
    lines = ["127.0.0.1 localhost", "::1 localhost", *(f"{host.address} {host.name}" for host in hosts)]
    for host in hosts:
        path = _hosts_file(host.namespace)
        path.parent.mkdir(parents=True)
        path.write_text("\n".join(lines) + "\n")


def _make_namespaces(namespaces: Sequence[str]) -> None:
    for namespace in namespaces:
        _ip(f"netns add {namespace}")


def _lay_cables(hosts: Sequence[Host], switch: str) -> None:
    _ip("link add switch type bridge", namespace=switch)
    for number, host in enumerate(hosts):
        _ip(f"link add port{number} type veth peer name eth0 netns {host.namespace}", namespace=switch)
        _ip("link set lo up", f"addr add {host.address}/24 dev eth0", namespace=host.namespace)
        if host.address6:
            _ip(f"addr add {host.address6}/64 dev eth0 nodad", namespace=host.namespace)
        _ip("link set eth0 up", namespace=host.namespace)
        _ip(f"link set port{number} master switch up", namespace=switch)
    _ip("link set switch up", namespace=switch)


def _ip(*commands: str, namespace: str | None = None) -> None:
    within = ["-n", namespace] if namespace else []
    text = "\n".join(commands) + "\n"
    subprocess.run(["ip", *within, "-batch", "-"], input=text, check=True, capture_output=True, text=True)


def _names() -> list[str]:
    return [path.name for path in _NAMESPACES.iterdir()] if _NAMESPACES.is_dir() else []


def _remove(namespace: str) -> None:
    if namespace in _names():
        _ip(f"netns del {namespace}")
    shutil.rmtree(_ETC / namespace, ignore_errors=True)


def _remove_leftovers() -> None:
    """Remove what test runs have left that were killed."""
    for name in _names():
        if name.startswith(f"{_PREFIX}-") and not psutil.pid_exists(int(name.split("-")[2])):
            _remove(name)


def _hosts_file(namespace: str) -> Path:
    return _ETC / namespace / "hosts"


def _has_ipv6() -> bool:
    switch = Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")
    return switch.exists() and switch.read_text().strip() == "0"


def _checked(function: str, *args: object) -> None:
    """Call a function of libc (Python 3.11 has no ``os.setns`` and ``os.unshare``)."""
    if getattr(ctypes.CDLL(None, use_errno=True), function)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")
