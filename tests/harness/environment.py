"""What a test needs of its machine: environment variables of ranks and scripts, a port, or else a reason to skip."""

from __future__ import annotations

import ctypes
import os
import random
import socket
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

NEED_EVERYTHING = "DDPX_TESTS_NEED_EVERYTHING"

# Variables for ranks: a value for all, a function of the rank, or None for a variable that must not be there.
Environment = Mapping[str, "str | Callable[[int], str | None] | None"]


def environment_of(rank: int, env: Environment) -> dict[str, str]:
    """This process's environment, changed by ``env`` as it is for that rank."""
    changes = {name: value(rank) if callable(value) else value for name, value in env.items()}
    merged: dict[str, str | None] = {**os.environ, "PYTEST_CURRENT_TEST": None, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def by_hand_env(world_size: int, port: int | None = None) -> dict[str, Callable[[int], str]]:
    """Variables of ranks that a user starts one by one on one machine; with a port also where they meet."""
    variables: dict[str, Callable[[int], str]] = {
        "RANK": str,
        "WORLD_SIZE": lambda _: str(world_size),
        "LOCAL_RANK": str,
    }
    if port is not None:
        variables |= {"MASTER_ADDR": lambda _: "127.0.0.1", "MASTER_PORT": lambda _: str(port)}
    return variables


def skip_because(reason: str | None) -> None:
    """Skip a test that cannot run here, if there is a reason; fail instead where every test has to run."""
    if reason is not None and os.environ.get(NEED_EVERYTHING):
        pytest.fail(f"this test has to run, as {NEED_EVERYTHING} is set: {reason}")
    if reason is not None:
        pytest.skip(reason)


PIDFD_OPEN = 434  # on every architecture


def refuse_system_call(number: int, error: int) -> None:
    """Have the kernel answer a system call of this process, and of those that it starts, with an error."""
    load, equal, end = 0x20, 0x15, 0x06  # a program of seccomp: instructions, and what it returns
    code = [(load, 0, 0, 0), (equal, 0, 1, number), (end, 0, 0, 0x50000 | error), (end, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    filters = struct.pack("HxxxxxxP", len(code), ctypes.addressof(program))
    prctl = ctypes.CDLL(None).prctl
    assert prctl(38, 1, 0, 0, 0) == prctl(22, 2, filters) == 0  # PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP


def free_port(host: str = "127.0.0.1") -> int:
    """Return a free TCP port that the kernel gives to nobody by itself: below those that it chooses from."""
    chosen_by_kernel = Path("/proc/sys/net/ipv4/ip_local_port_range")
    lowest = int(chosen_by_kernel.read_text().split()[0]) if chosen_by_kernel.exists() else 32768
    while True:
        port = random.SystemRandom().randrange(max(1024, lowest - 20000), lowest)
        with suppress(OSError), socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
            listener.bind((host, port))
            return port
