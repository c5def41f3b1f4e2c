"""Provide what a test needs of its machine: variables as launchers set them, free
ports, skipping, waiting, the processes that a test run has started, and further hosts.
"""

import ctypes
import functools
import os
import random
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

_NEED_EVERYTHING = "DDPX_TESTS_NEED_EVERYTHING"
# In the environment of every process that a test run starts; that of a script begins
# with that of the test run.
MARK = "TEST_HARNESS_MARK"

# The variables of ranks.

# What changes for ranks: a value for all ranks, a function of the rank, or None for a
# variable that must be unset.
Environment = Mapping[str, "str | Callable[[int], str | None] | None"]


def environment_of(rank: int, env: Environment) -> dict[str, str]:
    """Return this process's environment, changed by ``env`` as it is for that rank."""
    changes = {name: value(rank) if callable(value) else value for name, value in env.items()}
    merged: dict[str, str | None] = {**os.environ, "PYTEST_CURRENT_TEST": None, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def by_hand_env(world_size: int, port: int | None = None) -> dict[str, Callable[[int], str]]:
    """Return the variables of ranks that a user starts by hand on one machine; with a
    port, also the address.
    """
    variables: dict[str, Callable[[int], str]] = {
        "RANK": str,
        "WORLD_SIZE": lambda _: str(world_size),
        "LOCAL_RANK": str,
    }
    if port is not None:
        variables |= {"MASTER_ADDR": lambda _: "127.0.0.1", "MASTER_PORT": lambda _: str(port)}
    return variables


def by_srun() -> Environment:
    """Return the variables of ``srun --ntasks-per-node``, on one node."""
    return {
        # Lightning's port is 15000 plus the last four digits.
        "SLURM_JOB_ID": f"77{free_port('', range(15000, 25000)) - 15000:04}",
        "SLURM_JOB_NAME": "train",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_PROCID": str,
        "SLURM_LOCALID": str,
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost",
    }


def by_mpirun() -> Environment:
    """Return the variables of Open MPI's ``mpirun -np``."""
    return {
        "OMPI_COMM_WORLD_RANK": str,
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str,
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "prterun-host-4242@1",
    }


# Ports.

_reservations: list[socket.socket] = []  # while one is open, no other test gets its port


def free_port(host: str = "127.0.0.1", ports: range | None = None) -> int:
    """Return a free TCP port, which no other test on this machine gets while this process
    runs; by default one below those that the kernel chooses.

    A Unix socket of an abstract name reserves it. Other programs may still take the port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        port = random.SystemRandom().choice(ports or _ports_below_the_kernels())
        with suppress(OSError), socket.socket(family) as listener:
            listener.bind((host, port))
            reservation = socket.socket(socket.AF_UNIX)
            _reservations.append(reservation)
            reservation.bind(f"\0port {port} of tests")
            return port


def _ports_below_the_kernels() -> range:
    """Return 20,000 ports that the kernel does not choose by itself."""
    chosen_by_kernel = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest = int(chosen_by_kernel.read_text().split()[0]) if chosen_by_kernel.exists() else 32768
    return range(max(1024, lowest - 20000), lowest)


# Tests that need something of the machine.


def skip_because(reason: str | None) -> None:
    """Skip a test for a reason, if there is one; fail instead where every test must
    run.
    """
    if reason is None:
        return
    if os.environ.get(_NEED_EVERYTHING):
        pytest.fail(f"this test must run, because {_NEED_EVERYTHING} is set: {reason}")
    pytest.skip(reason)


# The processes that a test run has started.


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes that were started with this mark in their environment; a
    prefix of marks finds all of them.
    """
    variable = f"\0{MARK}={mark}".encode()
    processes = []
    for pid in psutil.pids():
        with suppress(OSError, psutil.NoSuchProcess):
            if variable in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                processes.append(psutil.Process(pid))
    return processes


def wait_until_exited(
    find: Callable[[], Collection[psutil.Process]], seconds: float
) -> Collection[psutil.Process]:
    """Wait up to ``seconds`` until ``find`` returns nothing; return what still runs."""
    deadline = time.monotonic() + seconds
    while True:
        running = find()
        seconds_left = deadline - time.monotonic()
        if not running or seconds_left <= 0:
            return running
        psutil.wait_procs(running, seconds_left)


def name_of(process: psutil.Process) -> str:
    """Return a line that identifies this process."""
    with suppress(psutil.Error):
        return f"process {process.pid}: {' '.join(process.cmdline())[:200]}"
    return f"process {process.pid}"


# Hosts, for tests that need several machines, are made from Linux namespaces. Each has its
# own network, host name and ``/etc/hosts``; processes, files and the clock are shared. The
# hosts are connected to a switch in another namespace, so a cut cable looks as it does
# between machines: links stay up, packets vanish without a reset.

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

    def name_as_loopback(self) -> None:
        """Have the host's own name resolve to 127.0.1.1, as on Debian."""
        known = self.hosts_file.read_text()
        self.hosts_file.write_text(
            known.replace(f"{self.address} {self.name}", f"127.0.1.1 {self.name}")
        )

    def ip(self, *commands: str) -> None:
        """Change the host's network by commands of the program ``ip``."""
        words = ["nsenter", f"--net=/proc/{self.pid}/ns/net", "ip", "-batch", "-"]
        subprocess.run(
            words, input="\n".join(commands) + "\n", check=True, capture_output=True, text=True
        )


class Network(list[Host]):
    """The hosts on one switch; see ``network``."""

    switch: Host

    def cut(self) -> None:
        """Pull the second host's cable out of the switch: from now on packets to and
        from it are lost silently.
        """
        self.switch.ip("link set port1 nomaster")


@contextmanager
def network(*names: str) -> Iterator[Network]:
    """Make hosts with these names, and remove them after the block."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hosts-")))
        hosts = Network(
            stack.enter_context(_host(number, name, directory))
            for number, name in enumerate(("switch", *names))
        )
        hosts.switch = hosts.pop(0)
        lines = [
            "127.0.0.1 localhost",
            "::1 localhost",
            *(f"{host.address} {host.name}" for host in hosts),
        ]
        for host in hosts:
            host.hosts_file.write_text("\n".join(lines) + "\n")
        _lay_cables(hosts, hosts.switch)
        yield hosts


@functools.cache
def why_no_hosts() -> str | None:
    """Return the reason why hosts cannot be made here; None if they can."""
    try:
        with network("probe"):
            return None
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        reason = str(getattr(error, "stderr", error)).strip()
        return f"network namespaces need root, iproute2 and util-linux: {reason}"


@contextmanager
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
