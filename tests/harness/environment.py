"""Provide what a test needs from its machine: variables as launchers set them, a free
port, or a reason to skip.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

NEED_EVERYTHING = "DDPX_TESTS_NEED_EVERYTHING"
_reservations: list[socket.socket] = []

# Variables for ranks: a value for all ranks, a function of the rank, or None for a
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


def skip_because(reason: str | None) -> None:
    """Skip a test that cannot run here, if there is a reason; fail instead where every
    test has to run.
    """
    if reason is not None and os.environ.get(NEED_EVERYTHING):
        pytest.fail(f"this test has to run, as {NEED_EVERYTHING} is set: {reason}")
    if reason is not None:
        pytest.skip(reason)


def loopback() -> list[str]:
    """Return the loopback addresses of this machine; containers may lack that of IPv6."""
    found = []
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        with suppress(OSError), socket.socket(family) as listener:
            listener.bind((address, 0))
            found.append(address)
    return found


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free TCP port below the range of the kernel, which no other test of this
    machine chooses.

    While this process runs, a Unix socket of an abstract name reserves it; other
    programs may still take it.
    """
    chosen_by_kernel = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest = int(chosen_by_kernel.read_text().split()[0]) if chosen_by_kernel.exists() else 32768
    while True:
        port = random.SystemRandom().randrange(max(1024, lowest - 20000), lowest)
        with (
            suppress(OSError),
            socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener,
        ):
            listener.bind((host, port))
            _reservations.append(socket.socket(socket.AF_UNIX))
            _reservations[-1].bind(f"\0port {port} of tests")
            return port


def by_srun() -> Environment:
    """``srun --ntasks-per-node``."""
    return {
        "SLURM_JOB_ID": _slurm_job_id(),
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
    """Open MPI's ``mpirun -np``."""
    return {
        "OMPI_COMM_WORLD_RANK": str,
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_RANK": str,
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": "prterun-host-4242@1",
    }


def _slurm_job_id() -> str:
    """Return a job number that gives a free port by Lightning's rule: 15000 plus its
    last four digits.
    """
    while True:
        digits = random.randint(0, 9999)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", 15000 + digits))
            return f"77{digits:04}"
