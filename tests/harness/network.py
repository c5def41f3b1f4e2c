"""Make hosts from Linux namespaces, for tests that need several machines.

Each host has its own network, host name and ``/etc/hosts``; processes, files and the
clock are shared. The hosts are connected to a switch in another namespace, so a cut
cable looks as it does between machines: links stay up, packets vanish without a reset.
"""

import contextlib
import ctypes
import functools
import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# CLONE_NEWNS, CLONE_NEWUTS and CLONE_NEWNET of sched.h.
_NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x40000000
# Ends when the test closes its end of the pipe, or is killed.
_HOLD = (
    'echo "$0" > /proc/sys/kernel/hostname && mount --bind "$1" /etc/hosts && echo ready &&'
    " exec cat"
)


@dataclass(frozen=True)
class Host:
    """One host: its name, its addresses (``address6`` empty without IPv6), and its
    ``/etc/hosts``.

    Its namespaces are those of process ``pid``, and disappear with it.
    """

    name: str
    address: str
    address6: str
    hosts_file: Path
    pid: int

    def enter(self) -> None:
        """Move this process to the host, for good; only while it has one thread.

        Needs root.
        """
        process = os.pidfd_open(self.pid)
        libc = ctypes.CDLL(None, use_errno=True)  # Python 3.11 has no os.setns
        if libc.setns(process, _NEW_NAMESPACES) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {self.name}")
        os.close(process)

    def ip(self, *commands: str) -> None:
        """Change the host's network by commands of the program ``ip``."""
        words = ["nsenter", f"--net=/proc/{self.pid}/ns/net", "ip", "-batch", "-"]
        subprocess.run(
            words, input="\n".join(commands) + "\n", check=True, capture_output=True, text=True
        )


@dataclass(frozen=True)
class Network:
    """The hosts on one switch, as a sequence; see ``network``."""

    hosts: tuple[Host, ...]
    switch: Host

    def __iter__(self) -> Iterator[Host]:
        return iter(self.hosts)

    def __getitem__(self, index: int) -> Host:
        return self.hosts[index]

    def cut(self) -> None:
        """Pull the second host's cable out of the switch: from now on packets to and
        from it are lost silently.
        """
        self.switch.ip("link set port1 nomaster")


@contextlib.contextmanager
def network(*names: str) -> Iterator[Network]:
    """Make hosts with these names, and remove them after the block."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
        numbered = enumerate(("switch", *names))
        switch, *hosts = (
            stack.enter_context(_host(number, name, directory)) for number, name in numbered
        )
        lines = [
            "127.0.0.1 localhost",
            "::1 localhost",
            *(f"{host.address} {host.name}" for host in hosts),
        ]
        for host in hosts:
            host.hosts_file.write_text("\n".join(lines) + "\n")
        _lay_cables(hosts, switch)
        yield Network(tuple(hosts), switch)


@functools.cache
def why_unavailable() -> str | None:
    """Return the reason why hosts cannot be made here; None if they can."""
    try:
        with network("probe"):
            return None
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        reason = str(getattr(error, "stderr", error)).strip()
        return f"network namespaces need root, iproute2 and util-linux: {reason}"


@contextlib.contextmanager
def _host(number: int, name: str, directory: Path) -> Iterator[Host]:
    hosts_file = directory / f"hosts-{number}"
    hosts_file.touch()
    command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", _HOLD, name, str(hosts_file)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise subprocess.CalledProcessError(1, command, stderr=process.communicate()[1])
        yield Host(
            name,
            f"10.77.0.{number}",
            f"fd77::{number}" if _has_ipv6() else "",
            hosts_file,
            process.pid,
        )


def _lay_cables(hosts: list[Host], switch: Host) -> None:
    switch.ip("link add switch type bridge")
    for number, host in enumerate(hosts):
        switch.ip(f"link add port{number} type veth peer name eth0 netns {host.pid}")
        host.ip("link set lo up", f"addr add {host.address}/24 dev eth0")
        if host.address6:
            host.ip(f"addr add {host.address6}/64 dev eth0 nodad")
        host.ip("link set eth0 up")
        switch.ip(f"link set port{number} master switch up")
    switch.ip("link set switch up")


def _has_ipv6() -> bool:
    switch = Path("/proc/sys/net/ipv6/conf/default/disable_ipv6")
    return switch.exists() and switch.read_text().strip() == "0"
