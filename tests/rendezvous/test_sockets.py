"""The sockets of this process can be found and cut, whoever has opened them, and its addresses be told apart."""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from lightning_ddp_ext.rendezvous import sockets as module
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


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1", 0) as listener:
        yield listener


class Descriptor:
    """A socket as C++ code has it, that Python knows nothing of."""

    def __init__(self, opened: socket.socket) -> None:
        self.number = opened.detach()

    def sendall(self, data: bytes) -> None:
        os.write(self.number, data)

    def recv(self, length: int) -> bytes:
        select.select([self.number], [], [], 10.0)
        return os.read(self.number, length)

    def close(self) -> None:
        os.close(self.number)


def connect(listener: socket.socket) -> tuple[Descriptor, Descriptor]:
    """Both ends of a connection to the listener."""
    ours = socket.create_connection(listener.getsockname()[:2])
    theirs, _ = listener.accept()
    return Descriptor(ours), Descriptor(theirs)


def has_ended(end: Descriptor) -> bool:
    """Whether this end has been told that there is no other one any more; else one byte arrives."""
    return end.recv(1) == b""


# Severing


def test_what_a_block_has_opened_can_be_severed(listener: socket.socket) -> None:
    """Connections of the block end at both sides; those from before and after it stay."""
    before = connect(listener)
    with sockets_opened() as opened:
        during = connect(listener)
    after = connect(listener)
    opened.sever()
    for ours, theirs in (before, after):
        ours.sendall(b".")
        assert not has_ended(theirs)
    assert has_ended(during[0])
    assert has_ended(during[1])
    for end in (*before, *during, *after):
        end.close()


def test_a_block_that_still_runs_can_be_severed(listener: socket.socket) -> None:
    """Whoever waits in the block is released from outside."""
    with sockets_opened() as opened:
        ours, theirs = connect(listener)
        opened.sever()
        assert has_ended(theirs)
    opened.sever()  # a second time is no harm
    for end in (ours, theirs):
        end.close()


def test_a_socket_of_another_thread_is_left_alone(listener: socket.socket) -> None:
    """Such as a logger's: it was opened by Python code while the block ran."""
    found: list[socket.socket] = []
    with sockets_opened() as opened:
        is_done = threading.Event()

        def open_one() -> None:
            found.append(socket.create_connection(listener.getsockname()[:2]))
            is_done.wait()

        thread = threading.Thread(target=open_one)
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
        first = connect(listener)
    numbers = {end.number for end in first}
    for end in first:
        end.close()
    second = connect(listener)
    assert {end.number for end in second} == numbers
    opened.sever()
    second[0].sendall(b".")
    assert not has_ended(second[1])
    for end in second:
        end.close()


def test_without_proc_nothing_is_severed(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a system that does not list a process's files, connections stay."""
    monkeypatch.setattr(module, "_OPEN_FILES", "/nonexistent")
    with sockets_opened() as opened:
        ours, theirs = connect(listener)
    opened.sever()
    ours.sendall(b".")
    assert not has_ended(theirs)
    for end in (ours, theirs):
        end.close()


# Listening


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_loopback_host_is_reachable_from_this_host_only(host: str) -> None:
    """A run of one machine is not offered to the network."""
    with listen(host, 0) as listener:
        assert is_loopback(listener.getsockname()[0])
        with closing(socket.create_connection((host, listener.getsockname()[1]))):
            pass


def test_an_ipv6_listener_takes_ipv4_connections_too() -> None:
    """Ranks may reach rank 0 by either family."""
    with listen("::", 0) as listener:
        for host in ("127.0.0.1", "::1"):
            with closing(socket.create_connection((host, listener.getsockname()[1]))):
                pass


def test_a_port_of_a_run_that_has_just_ended_can_be_bound_again(listener: socket.socket) -> None:
    """Connections that linger in the kernel do not keep the next run from the same port."""
    ours, theirs = connect(listener)
    theirs.close()  # the side that closes first lingers
    ours.close()
    address = listener.getsockname()[:2]
    listener.close()
    listen(*address).close()


# Addresses


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
