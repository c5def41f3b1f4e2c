"""One connection between two ranks: lines of JSON, and a kernel that notices when the other end is gone."""

from __future__ import annotations

import json
import select
import socket
import time
from contextlib import suppress
from typing import Any

LONGEST_LINE = 1 << 20
SEND_WITHIN = 1.0
# Seconds of silence after which the kernel gives a connection up; nothing is needed from Python for that.
_SILENCE_LIMIT = 5
_SILENT = f"no sign of life from its host for {_SILENCE_LIMIT} s"
_WITHOUT_GOODBYE = "its process ended without a goodbye"
_NOT_READING = f"it took no news for {SEND_WITHIN:g} s"
_NO_MESSAGE = "it sent something that is no message"
_KEEPALIVE = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": _SILENCE_LIMIT * 1000}

Message = dict[str, Any]


class Line:
    """One connection, read and written as lines of JSON objects, none longer than ``longest`` bytes."""

    def __init__(self, connection: socket.socket, *, longest: int = LONGEST_LINE) -> None:
        self.socket = connection
        self.longest = longest
        self.is_open = True
        self.end = ""
        self._unread = b""

    def send(self, message: Message) -> None:
        """Send all of it, or end the connection: half a message would garble the next one."""
        unsent = json.dumps(message).encode() + b"\n"
        moment = time.monotonic() + SEND_WITHIN
        with suppress(OSError, ValueError):  # closed already
            while unsent and self._is_writable(moment - time.monotonic()):
                with suppress(BlockingIOError):
                    unsent = unsent[self.socket.send(unsent) :]
            if unsent:
                self.end = _NOT_READING
                self.socket.shutdown(socket.SHUT_RDWR)

    def _is_writable(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self.socket, select.POLLOUT)
        return bool(poll.poll(max(0.0, seconds) * 1000))

    def receive(self) -> list[Message]:
        """The messages that have arrived whole; at the end of the connection, ``is_open`` turns false."""
        try:
            received = self.socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError as cause:
            self._end_with(_WITHOUT_GOODBYE if isinstance(cause, ConnectionError) else _SILENT)
            return []
        if not received:
            self._end_with(_WITHOUT_GOODBYE)
        *lines, self._unread = (self._unread + received).split(b"\n")
        if len(self._unread) > self.longest:
            self._end_with(_NO_MESSAGE)
        try:
            return [_message_in(line, self.longest) for line in lines]
        except ValueError:
            self._end_with(_NO_MESSAGE)
            return []

    def _end_with(self, reason: str) -> None:
        self.is_open = False
        self.end = self.end or reason


def _message_in(line: bytes, longest: int) -> Message:
    """The JSON object in a line; a ``ValueError`` if there is anything else in it."""
    if len(line) > longest:
        raise ValueError(f"a line of {len(line)} bytes")
    try:
        message = json.loads(line)
    except RecursionError:
        raise ValueError("too many brackets") from None
    if not isinstance(message, dict):
        raise ValueError("no object")
    return message


def prepare(connection: socket.socket) -> None:
    """Have the kernel send at once, and end the connection some seconds after the other host has fallen silent."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # ranks wait for what is sent here
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        option = getattr(socket, name, None)  # macOS knows only some of them
        if option is not None:
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
