"""JSON objects over one TCP connection, one on each line."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import suppress
from typing import Any

MAX_HELLO = 16 << 10
MAX_MESSAGE = 1 << 20
MAX_UNSENT = 8 << 20

CLOSED = "its process ended unexpectedly"
SILENT = "no sign of life from its host"
NOT_READING = "it has not read what was sent to it"
MALFORMED = "it sent something that is no message"

Message = dict[str, Any]


class Connection:
    """One end of a connection. Any thread may send; only the thread that owns the socket receives and closes it.

    Args:
        connected: the socket.
        longest: bytes of the longest message that is accepted.

    Attributes:
        rank: at the other end; ``None`` until it is known.
        close_reason: why the connection has ended; empty while it is open.
    """

    def __init__(self, connected: socket.socket, *, longest: int = MAX_MESSAGE) -> None:
        connected.setblocking(False)
        self.socket = connected
        self.longest = longest
        self.rank: int | None = None
        self.close_reason = ""
        self._unread = b""
        self._unsent = b""
        self._lock = threading.Lock()

    def send(self, line: bytes) -> bool:
        """Send an encoded message, or keep what the kernel does not take at once. Never blocks, never raises.

        Returns:
            Whether something is left, to be sent by :meth:`flush` once the socket is writable.
        """
        with self._lock:
            self._unsent += line
            if len(self._unsent) > MAX_UNSENT:
                self._end(NOT_READING)
        return self.flush()

    def flush(self) -> bool:
        """Send what is left; returns whether something still is."""
        with self._lock:
            while self._unsent and not self.close_reason:
                try:
                    sent = self.socket.send(self._unsent)
                except BlockingIOError:
                    return True
                except OSError:  # the owner of the socket finds out why when it reads
                    return False
                self._unsent = self._unsent[sent:]
            return False

    def receive(self) -> list[Message]:
        """The messages that have arrived whole; at the end of the connection ``close_reason`` is set."""
        try:
            received = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError as error:
            self._end(CLOSED if isinstance(error, ConnectionError) else SILENT)
            return []
        if not received:
            self._end(CLOSED)
        *lines, self._unread = (self._unread + received).split(b"\n")
        messages = []
        for line in lines:
            message = decode(line) if len(line) <= self.longest else None
            if message is None:
                self._end(MALFORMED)
                break
            messages.append(message)
        if len(self._unread) > self.longest:
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


def encode(message: Message) -> bytes:
    """The line that carries a message."""
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> Message | None:
    """The JSON object in a line; ``None`` if there is anything else in it."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return message if isinstance(message, dict) else None


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
        option = getattr(socket, name, None)
        if option is not None:
            with suppress(OSError):
                connected.setsockopt(socket.IPPROTO_TCP, option, value)
