"""Exchange messages over one TCP connection: a topic and a JSON object on each line."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from typing import Any

MAX_MESSAGE = 1 << 20
MAX_HELLO = 1 << 14
MAX_UNSENT = 8 << 20

CLOSED = "its process ended unexpectedly"
SILENT = "no sign of life from its host"
NOT_READING = "it stopped reading messages"
MALFORMED = "it sent a malformed message"

Message = dict[str, Any]


class Connection:
    """A connection. Any thread may send; only the thread that owns the socket may receive from it or close it.

    Attributes:
        rank: the peer's rank; ``None`` until it is known.
        close_reason: why the connection was closed; empty while it is open.
        unsent: bytes that the kernel has not accepted yet.
    """

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.rank: int | None = None
        self.close_reason = ""
        self.unsent = b""
        self._unread = b""
        self._lock = threading.Lock()

    def send(self, line: bytes) -> None:
        """Send an encoded message; bytes that the kernel does not accept stay in ``unsent``. Never blocks or raises."""
        with self._lock:
            self.unsent += line
            if len(self.unsent) > MAX_UNSENT:
                self._end(NOT_READING)
        self.flush()

    def flush(self) -> None:
        """Send as much of ``unsent`` as the kernel accepts."""
        with self._lock, suppress(OSError):  # the owner of the socket finds the reason when it reads
            while self.unsent and not self.close_reason:
                sent = self.socket.send(self.unsent)
                self.unsent = self.unsent[sent:]

    def receive(self) -> list[tuple[str, Message]]:
        """Return the complete messages that have arrived; set ``close_reason`` if the connection is closed or must be.

        Until ``rank`` is set, the peer is not trusted, and its messages may only be as long as a hello.
        """
        try:
            received = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError as error:
            self._end(CLOSED if isinstance(error, ConnectionError) else SILENT)
            return []
        if not received:
            self._end(CLOSED)
        longest = MAX_HELLO if self.rank is None else MAX_MESSAGE
        *lines, self._unread = (self._unread + received).split(b"\n")
        messages = []
        for line in lines:
            message = decode(line) if len(line) <= longest else None
            if message is None:
                self._end(MALFORMED)
                break
            messages.append(message)
        if len(self._unread) > longest:
            self._end(MALFORMED)
        return messages

    def close(self) -> None:
        """Close the socket; only for its owner."""
        with self._lock:
            self._end(CLOSED)
            self.socket.close()

    def _end(self, reason: str) -> None:
        if not self.close_reason:
            self.close_reason = reason
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)


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


def keep_alive(connected: socket.socket, heartbeat: float) -> None:
    """Disable delays, and have the kernel close the connection after ``heartbeat`` seconds of silence."""
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
