"""Messages over one TCP connection: a topic and a JSON object on each line."""

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
NOT_READING = "it has not read what was sent to it"
MALFORMED = "it sent something that is no message"

Message = dict[str, Any]


class Connection:
    """One end of a connection. Any thread may send; only the thread that owns the socket receives and closes it.

    Attributes:
        rank: at the other end; ``None`` until it is known.
        close_reason: why the connection has ended; empty while it is open.
        unsent: what the kernel has not taken so far.
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
        """Send an encoded message, or keep in ``unsent`` what the kernel does not take. Never blocks, never raises."""
        with self._lock:
            self.unsent += line
            if len(self.unsent) > MAX_UNSENT:
                self._end(NOT_READING)
        self.flush()

    def flush(self) -> None:
        """Send what is left, as far as the kernel takes it."""
        with self._lock, suppress(OSError):  # the owner of the socket finds out why when it reads
            while self.unsent and not self.close_reason:
                sent = self.socket.send(self.unsent)
                self.unsent = self.unsent[sent:]

    def receive(self) -> list[tuple[str, Message]]:
        """The messages that have arrived whole; at the end of the connection ``close_reason`` is set.

        Who is at the other end may be anybody until ``rank`` is known, and so may send no more than a hello.
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
        """Release the socket; for its owner."""
        with self._lock:
            self._end(CLOSED)
            self.socket.close()

    def _end(self, reason: str) -> None:
        if not self.close_reason:
            self.close_reason = reason
            with suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)


def encode(topic: str, body: Message) -> bytes:
    """The line that carries a message."""
    return json.dumps([topic, body]).encode() + b"\n"


def decode(line: bytes) -> tuple[str, Message] | None:
    """Topic and body of the message in a line; ``None`` if there is anything else in it."""
    try:
        topic, body = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    return (topic, body) if isinstance(topic, str) and isinstance(body, dict) else None


def keep_alive(connected: socket.socket, heartbeat: float) -> None:
    """Send at once, and let the kernel end the connection after ``heartbeat`` seconds of silence."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = max(1, round(heartbeat / 6))
    options = {
        "TCP_KEEPIDLE": 2 * seconds,
        "TCP_KEEPALIVE": 2 * seconds,  # the name that macOS has for it
        "TCP_KEEPINTVL": seconds,
        "TCP_KEEPCNT": 4,
        "TCP_USER_TIMEOUT": round(heartbeat * 1000),
    }
    for name, value in options.items():
        if hasattr(socket, name):
            with suppress(OSError):
                connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
