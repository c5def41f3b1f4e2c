"""Exchange messages over one TCP connection: each line is a JSON list, topic and body."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from typing_extensions import override

# The longest line, in bytes; a peer that sends a longer one is disconnected.
MAX_MESSAGE = 1 << 20

# Values of ``Connection.close_reason``. Messages show them after the name of a rank.
CLOSED = "its process ended unexpectedly"
NOT_READING = "it stopped reading messages"
MALFORMED = "it sent a malformed message"

_MAX_UNSENT = 8 << 20  # bytes that may wait for a peer to read
_CHUNK = 1 << 16  # bytes of one read

# The body of a message, a JSON object.
Message = dict[str, Any]


class Connection(asyncio.Protocol):
    """A connection to a peer; only for the event loop's thread.

    Args:
        connected: the socket, which the connection closes.
        heartbeat: the silence in seconds after which the kernel closes it.
        on_message: called with the topic and body of each message.
        on_lost: called once, after the connection was closed.

    Attributes:
        socket: the connected socket.
        rank: the peer's rank; ``None`` until it is known.
        has_left: whether the peer has announced an orderly exit.
        close_reason: why the connection was closed; empty while it is open.
        lost: done after ``on_lost`` was called.
    """

    def __init__(
        self,
        connected: socket.socket,
        heartbeat: float,
        on_message: Callable[[Connection, str, Message], None],
        on_lost: Callable[[Connection], None],
    ) -> None:
        connected.setblocking(False)
        _keep_alive(connected, heartbeat)
        self.socket = connected
        self.rank: int | None = None
        self.has_left = False
        self.close_reason = ""
        self.lost = asyncio.get_running_loop().create_future()
        self._silence_reason = f"no sign of life from its host for {heartbeat:g} s"
        self._on_message = on_message
        self._on_lost = on_lost
        self._unread = b""

    def send(self, line: bytes) -> None:
        """Send an encoded message, or close the connection if the peer does not read.

        Never waits or raises.
        """
        if self._transport.is_closing():
            return
        self._transport.write(line)
        if self._transport.get_write_buffer_size() > _MAX_UNSENT:
            self.close(NOT_READING)

    def close_in_order(self) -> None:
        """Send unsent messages; the peer closes the connection after receiving them."""
        with suppress(OSError):  # the peer has closed it
            self._transport.write_eof()

    def close(self, reason: str) -> None:
        """Close the connection now."""
        self.close_reason = self.close_reason or reason
        self._transport.abort()

    # Called by the event loop.

    @override
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    @override
    def data_received(self, data: bytes) -> None:
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            message = decode(line) if len(line) <= MAX_MESSAGE else None
            if message is None:
                self.close(MALFORMED)
                return
            self._on_message(self, *message)
        if len(self._unread) > MAX_MESSAGE:
            self.close(MALFORMED)

    @override
    def eof_received(self) -> None:
        self.close(CLOSED)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if not self.close_reason:
            # A failed write ends reading, but earlier messages may explain it. A malformed
            # message sets the reason.
            self._receive_rest()
            is_closed = exc is None or isinstance(exc, ConnectionError)
            self.close_reason = self.close_reason or (CLOSED if is_closed else self._silence_reason)
        self._on_lost(self)
        self.lost.set_result(None)

    def _receive_rest(self) -> None:
        with suppress(OSError):
            while not self.close_reason and (data := self.socket.recv(_CHUNK)):
                self.data_received(data)


def encode(topic: str, body: Message) -> bytes:
    """Return the line that carries a message."""
    return json.dumps([topic, body]).encode() + b"\n"


def decode(line: bytes) -> tuple[str, Message] | None:
    """Return topic and body of the message in a line; ``None`` if it is malformed."""
    try:
        topic, body = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    return (topic, body) if isinstance(topic, str) and isinstance(body, dict) else None


def _keep_alive(connected: socket.socket, heartbeat: float) -> None:
    """Have the kernel send without delay, and close a connection that stays silent.

    The limit is ``heartbeat`` seconds of silence.
    """
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = max(1, round(heartbeat / 6))
    options = {
        socket.TCP_KEEPIDLE: 2 * seconds,
        socket.TCP_KEEPINTVL: seconds,
        socket.TCP_KEEPCNT: 4,
        socket.TCP_USER_TIMEOUT: round(heartbeat * 1000),
    }
    for option, value in options.items():
        with suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, option, value)
