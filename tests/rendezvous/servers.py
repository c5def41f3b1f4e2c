"""Test the rendezvous without Lightning: requests of ranks, and servers in place of rank 0."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from lightning_ddp_ext.rendezvous.endpoint import FileEndpoint, TcpEndpoint
from lightning_ddp_ext.rendezvous.init_method import Tcp
from lightning_ddp_ext.rendezvous.request import Request
from lightning_ddp_ext.world import World
from tests.harness.ranks import free_port

Answer = Callable[[socket.socket], None]


def place(kind: str, directory: Path) -> Tcp | str:
    """Return an init method for ranks on this host: ``tcp`` or ``file``."""
    return Tcp("127.0.0.1", free_port()) if kind == "tcp" else str(directory / "store")


def url(where: Tcp | str) -> str:
    return f"file://{where}" if isinstance(where, str) else str(where)


def request(
    rank: int,
    world_size: int,
    where: Tcp | str,
    *,
    init_timeout: float = 20.0,
    init_method: str | None = None,
    **fields: Any,
) -> Request:
    """Return the request of a Trainer on CPU; ``fields`` are those of ``Request``."""
    world = World(
        rank=rank, world_size=world_size, local_rank=rank, local_world_size=world_size, node_rank=0, source="tests"
    )
    return Request(
        world=world,
        endpoint=FileEndpoint(where) if isinstance(where, str) else TcpEndpoint(where),
        init_method=init_method or url(where),
        backend="gloo",
        device=torch.device("cpu"),
        timeout=None,
        init_timeout=timedelta(seconds=init_timeout),
        **fields,
    )


@contextlib.contextmanager
def server(answer: Answer, *, host: str = "127.0.0.1", port: int = 0) -> Iterator[Tcp]:
    """Run a foreign server at a TCP address; ``answer`` is called with each connection."""
    listener = socket.create_server((host, port))
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
        yield Tcp(host, listener.getsockname()[1])
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in (*connections, listener):
            connection.close()


def silent(connection: socket.socket) -> None:
    """Accept, and never send anything."""


def web(connection: socket.socket) -> None:
    """Answer as a web server does."""
    with contextlib.suppress(OSError):
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)


def drip(connection: socket.socket) -> None:
    """Send a byte now and then, and never a whole line."""

    def send() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(b"x")
                time.sleep(0.1)

    threading.Thread(target=send, daemon=True).start()


def forward(end: tuple[str, int], connection: socket.socket) -> None:
    """Forward data in both directions, as a tunnel does."""
    there = socket.socket()
    if there.connect_ex(end) != 0:
        connection.close()
    for ends in ((connection, there), (there, connection)):
        threading.Thread(target=_pump, args=ends, daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while received := source.recv(1 << 16):
            sink.sendall(received)
    with contextlib.suppress(OSError):  # also after a reset: else the other end would wait on
        sink.shutdown(socket.SHUT_WR)
