"""The sockets of this process can be found and cut, whoever has opened them, and its addresses be told apart."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from lightning_ddp_ext.rendezvous.sockets import (
    interface_of,
    is_loopback,
    listen,
    network_identity,
    own_addresses,
    sockets_opened,
)
from tests.harness.network import Network
from tests.harness.ranks import run_ranks


class Connection:
    """Both ends of a connection as C++ code has them, which Python knows nothing of."""

    def __init__(self, listener: socket.socket) -> None:
        ours = socket.create_connection(listener.getsockname()[:2])
        self.ends = ours.detach(), listener.accept()[0].detach()

    def has_ended(self) -> bool:
        """Whether an end has been told that there is no other one any more; else one byte arrives."""
        if not self._is_readable():
            os.write(self.ends[0], b".")
        assert self._is_readable(seconds=10.0)
        return os.read(self.ends[1], 1) == b""

    def _is_readable(self, seconds: float = 0.0) -> bool:
        return bool(select.select([self.ends[1]], [], [], seconds)[0])

    def close(self) -> None:
        for end in self.ends:
            os.close(end)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1", 0) as listener:
        yield listener


def test_what_a_block_has_opened_can_be_severed(listener: socket.socket) -> None:
    """Also while it still runs; connections from before and after it stay."""
    with closing(Connection(listener)) as before, sockets_opened() as opened:
        with closing(Connection(listener)) as first:
            opened.sever()
            assert first.has_ended()
        with closing(Connection(listener)) as during:
            opened.complete()
            with closing(Connection(listener)) as after:
                opened.sever()
                opened.sever()  # a second time is no harm
                assert [each.has_ended() for each in (before, during, after)] == [False, True, False]


def test_a_socket_of_another_thread_is_left_alone(listener: socket.socket) -> None:
    """Such as a logger's: it was opened by Python code while the block ran."""
    found: list[socket.socket] = []
    is_done = threading.Event()

    def open_one() -> None:
        found.append(socket.create_connection(listener.getsockname()[:2]))
        is_done.wait()

    thread = threading.Thread(target=open_one)
    with sockets_opened() as opened:
        thread.start()
        theirs, _ = listener.accept()
    opened.sever()
    is_done.set()
    thread.join()
    with theirs, found[0] as ours:
        ours.sendall(b".")
        assert theirs.recv(1) == b"."


def test_a_listening_socket_is_left_alone() -> None:
    """Gloo aborts the process if its listener is shut down, so others can still connect to one."""
    with sockets_opened() as opened:
        listener = listen("127.0.0.1", 0)
    opened.sever()
    with listener, closing(socket.create_connection(listener.getsockname()[:2])):
        pass


def test_a_descriptor_that_means_something_else_by_now_is_left_alone(listener: socket.socket) -> None:
    """A number that was given to another connection since is told by its inode."""
    with sockets_opened() as opened:
        first = Connection(listener)
    first.close()
    with closing(Connection(listener)) as second:
        assert set(second.ends) == set(first.ends)
        opened.sever()
        assert not second.has_ended()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_loopback_host_is_reachable_from_this_host_only(host: str) -> None:
    """A run of one machine is not offered to the network."""
    with listen(host, 0) as listener:
        assert is_loopback(listener.getsockname()[0])
        socket.create_connection((host, listener.getsockname()[1])).close()


def test_an_ipv6_listener_takes_ipv4_connections_too() -> None:
    """Ranks may reach rank 0 by either family."""
    with listen("::", 0) as listener:
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, listener.getsockname()[1])).close()


def test_a_port_of_a_run_that_has_just_ended_can_be_bound_again(listener: socket.socket) -> None:
    """Connections that linger in the kernel do not keep the next run from the same port."""
    Connection(listener).close()
    address = listener.getsockname()[:2]
    listener.close()
    listen(*address).close()


def test_addresses_that_others_can_reach_come_first() -> None:
    """All of this host's addresses are listed, loopback last, and each belongs to an interface."""
    addresses = own_addresses()
    assert "127.0.0.1" in addresses
    loopback = [is_loopback(address) for address in addresses]
    assert loopback == sorted(loopback)
    assert all(interface_of(address) for address in addresses)


def identity_of(rank: int, world_size: int) -> str:
    return network_identity()


@pytest.mark.netns
def test_hosts_have_networks_of_their_own(two_hosts: Network) -> None:
    """Two processes have the same network identity if, and only if, they are on one host."""
    here, also_here, there = run_ranks(identity_of, 3, namespaces=[two_hosts[0], two_hosts[0], two_hosts[1]])
    assert here == also_here != there
