"""Sockets of this process that any code opened can be found and shut down; listeners are reachable as requested."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from lightning_ddp_ext.rendezvous.sockets import OpenedSockets, is_loopback, listen
from tests.harness.environment import loopback


class Connection:
    """Open a connection, both ends, without Python's socket objects, as C++ code does."""

    def __init__(self, listener: socket.socket) -> None:
        ours = socket.create_connection(listener.getsockname()[:2])
        self.ends = ours.detach(), listener.accept()[0].detach()

    def is_severed(self) -> bool:
        """Whether a connection's other end is closed."""
        is_readable = bool(select.select([self.ends[1]], [], [], 0.0)[0])
        return is_readable and os.read(self.ends[1], 1) == b""

    def close(self) -> None:
        for end in self.ends:
            os.close(end)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1", 0) as listener:
        yield listener


def test_a_descriptor_that_means_something_else_by_now_is_left_alone(listener: socket.socket) -> None:
    """The inode shows that another connection has the number now."""
    with OpenedSockets() as opened:
        first = Connection(listener)
    first.close()
    with closing(Connection(listener)) as second:
        assert set(second.ends) == set(first.ends)
        opened.abort()
        assert not second.is_severed()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::"])
def test_ranks_reach_rank_0_by_either_family_or_on_this_host_only(host: str) -> None:
    """A run on one machine is not reachable from the network; gloo's listeners stay open, since gloo needs them."""
    with OpenedSockets() as opened:
        listener = listen(host, 0)
    opened.abort()
    address, port = listener.getsockname()[:2]
    assert is_loopback(address) == (host != "::")
    with listener:
        for reached in loopback() if host == "::" else (host,):
            socket.create_connection((reached, port)).close()
