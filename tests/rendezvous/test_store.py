"""A TCP store opens within its deadline, or one sentence says why not."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import TCPStore

from lightning_ddp_ext.errors import StoreError
from lightning_ddp_ext.rendezvous import store as module
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.init_method import Tcp
from lightning_ddp_ext.rendezvous.sockets import listen
from lightning_ddp_ext.rendezvous.store import connect_tcp, host_tcp, serve, wait_for
from tests.ranks import free_port

HTTP = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
HERE = f"rank 0 on {socket.gethostname()} (pid {os.getpid()})"


@contextlib.contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[Tcp]:
    """A program that is not ours at a TCP address; ``answer`` is called with each connection."""
    listener = listen("127.0.0.1", 0)
    connections: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                answer(connection)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield Tcp("127.0.0.1", listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in (*connections, listener):
            connection.close()


def silent(connection: socket.socket) -> None:
    """Accept, and never say a word."""


def web(connection: socket.socket) -> None:
    """Answer as a web server does."""
    with contextlib.suppress(OSError):
        connection.recv(1 << 16)
        connection.sendall(HTTP)
        connection.shutdown(socket.SHUT_WR)


def hangs_up(connection: socket.socket) -> None:
    connection.close()


def refusal(where: Tcp, seconds: float = 0.5) -> str:
    with pytest.raises(StoreError) as refused:
        connect_tcp(where, Deadline(seconds))
    return str(refused.value)


# TCP


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_host_and_client_share_a_store(host: str) -> None:
    """What rank 0 sets in the store that it hosts, another rank reads, over IPv4 and IPv6."""
    where = Tcp(host, free_port("::1" if ":" in host else "127.0.0.1"))
    hosted = host_tcp(where, Deadline(10.0))
    client = connect_tcp(where, Deadline(10.0))
    hosted.set("from rank 0", "1")
    assert client.get("from rank 0") == b"1"


def test_a_listener_that_is_bound_already_becomes_the_server() -> None:
    """The launching process binds, and the store opens on its very socket: the port cannot be lost in between."""
    listener = listen("127.0.0.1", 0)
    where = Tcp("127.0.0.1", listener.getsockname()[1])
    hosted = host_tcp(where, Deadline(10.0), listener=listener)
    assert listener.fileno() == -1
    connect_tcp(where, Deadline(10.0)).set("key", "value")
    assert hosted.get("key") == b"value"


def test_a_rank_that_comes_first_waits_for_rank_0() -> None:
    """A client may be started long before its host."""
    where = Tcp("127.0.0.1", free_port())
    clients: list[object] = []
    waiting = threading.Thread(target=lambda: clients.append(connect_tcp(where, Deadline(20.0))))
    waiting.start()
    hosted = host_tcp(where, Deadline(10.0))
    waiting.join()
    assert clients
    del hosted


def test_a_port_that_nobody_listens_on() -> None:
    """The message says that rank 0 does not answer, at which address, for how long, and what to check."""
    where = Tcp("127.0.0.1", free_port())
    assert refusal(where, 0.3) == (
        f"no answer from rank 0 at 127.0.0.1:{where.port} within 0.3 s (Connection refused); check that rank 0 is "
        "started, that this address is its host's, and that no firewall is between"
    )


def test_a_host_that_does_not_resolve(caplog: pytest.LogCaptureFixture) -> None:
    """The message names host and remedy after the deadline; until then, a warning says that it is tried again."""
    with caplog.at_level(logging.WARNING):
        sentence = refusal(Tcp("no-such-host.invalid", 29500), 0.5)
    assert sentence.startswith("init_method 'tcp://no-such-host.invalid:29500': host 'no-such-host.invalid' does not ")
    assert f"does not resolve on {socket.gethostname()} (" in sentence
    assert sentence.endswith("give the address of rank 0's host, or a name that every host knows")
    assert [record.message for record in caplog.records] == [
        "init_method 'tcp://no-such-host.invalid:29500': host 'no-such-host.invalid' does not resolve yet; trying again"
    ]


@pytest.mark.parametrize("answer", [web, hangs_up])  # a silent one can hold a thread up for good: see test_bad_luck.py
def test_a_server_that_is_no_store(answer: Callable[[socket.socket], None]) -> None:
    """What listens at the address is said to be something else, within the deadline, with the remedy."""
    with server(answer) as where:
        assert refusal(where) == (
            f"what listens at 127.0.0.1:{where.port} does not answer as a torch.distributed store does: it is another "
            "program, or rank 0's process is stopped; choose a port that no other program uses, or look after rank 0"
        )


def test_a_host_that_is_still_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launching process that listens, but starts ranks before it serves the store, is waited for."""
    monkeypatch.setattr(module, "_ANSWER_WITHIN", 0.1)
    listener = listen("127.0.0.1", 0)
    where = Tcp("127.0.0.1", listener.getsockname()[1])
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(connect_tcp(where, Deadline(20.0), host_is_busy=True)))
    waiting.start()
    with pytest.raises(StoreError, match="does not answer"):
        connect_tcp(where, Deadline(20.0))
    assert not found
    monkeypatch.undo()
    store = serve(listener)
    waiting.join()
    assert found
    del store


def test_a_store_of_another_program() -> None:
    """A torch store without our mark is somebody else's, and is not used."""
    foreign = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sentence = refusal(Tcp("127.0.0.1", foreign.port))
    assert "it is a torch.distributed store, but not of a run with lightning_ddp_ext" in sentence
    assert foreign.num_keys() == 0


def test_the_store_of_a_launcher_needs_no_mark() -> None:
    """Torchrun's agent hosts a store of its own, which is used as it is."""
    foreign = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = connect_tcp(Tcp("127.0.0.1", foreign.port), Deadline(10.0), foreign=True)
    client.set("key", "value")
    assert foreign.get("key") == b"value"


def test_a_port_that_another_program_holds() -> None:
    """Rank 0 says who cannot bind which port, why, and what to do."""
    with server(web) as where, pytest.raises(StoreError) as refused:
        host_tcp(where, Deadline(0.5))
    assert str(refused.value) == (
        f"init_method 'tcp://127.0.0.1:{where.port}': {HERE} cannot bind port {where.port}: Address already in use; "
        "stop the program that holds it or choose another port"
    )


def test_a_port_that_this_user_may_not_bind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other reason than a port in use is told at once."""

    def forbidden(host: str, port: int) -> socket.socket:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module, "listen", forbidden)
    with pytest.raises(StoreError, match=r"cannot bind port 80: Permission denied; stop the program"):
        host_tcp(Tcp("127.0.0.1", 80), Deadline(60.0))


def test_rank_0_must_know_its_own_host() -> None:
    """The host that rank 0 is to listen on must resolve there, too."""
    with pytest.raises(StoreError, match=r"host 'no-such-host\.invalid' does not resolve"):
        host_tcp(Tcp("no-such-host.invalid", 29500), Deadline(1.0))


def test_a_second_rank_0_becomes_a_client_of_the_first() -> None:
    """So that the roll call finds out, and both are named on every rank."""
    where = Tcp("127.0.0.1", free_port())
    first = host_tcp(where, Deadline(10.0))
    second = host_tcp(where, Deadline(10.0))
    second.set("claim", "mine")
    assert first.get("claim") == b"mine"


def test_the_port_is_waited_for_while_the_last_run_ends() -> None:
    """Workers of a killed rank 0 keep its port until they notice; the next rank 0 outlives them."""
    holder = listen("127.0.0.1", 0)
    where = Tcp("127.0.0.1", holder.getsockname()[1])
    connection = threading.Thread(target=lambda: (holder.accept()[0].close(), holder.close()))
    connection.start()  # ends with the first client that looks who listens there
    assert host_tcp(where, Deadline(20.0)) is not None
    connection.join()


def test_a_served_store_carries_our_mark() -> None:
    """Every store that we host can be told from another program's."""
    store = serve(listen("127.0.0.1", 0))
    assert store.check(["lightning_ddp_ext"])


def test_waiting_for_a_key() -> None:
    """The value is returned once somebody sets it, nothing after the deadline."""
    store = serve(listen("127.0.0.1", 0))
    assert wait_for(store, "key", Deadline(0.05)) is None
    setter = threading.Thread(target=lambda: store.set("key", "value"))
    setter.start()
    assert wait_for(store, "key", Deadline(10.0)) == b"value"
    setter.join()
