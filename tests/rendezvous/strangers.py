"""Programs that are not ours, at an address where a rank looks for rank 0."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from lightning_ddp_ext.rendezvous.init_method import Tcp
from lightning_ddp_ext.rendezvous.sockets import listen

HTTP = b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


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
    """Accept, and never send anything."""


def web(connection: socket.socket) -> None:
    """Answer as a web server does."""
    with contextlib.suppress(OSError):
        connection.recv(1 << 16)
        connection.sendall(HTTP)
        connection.shutdown(socket.SHUT_WR)


def hangs_up(connection: socket.socket) -> None:
    """Accept, and close at once."""
    connection.close()
