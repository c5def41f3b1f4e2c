"""The control channel: one TCP connection from each rank to rank 0, for messages by topic.

A closed connection is a dead rank, whatever state Python, the store or a collective is in. One daemon thread owns all
sockets of a process; what it calls must not wait for anything that the thread itself brings.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from lightning_ddp_ext.rank_logger import own_logger
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.wire import (
    MAX_HELLO,
    MAX_MESSAGE,
    SILENT,
    Connection,
    Message,
    encode,
    keep_alive,
)

Listener = Callable[[Message], None]
# Called with what a connection says that belongs to no rank yet.
Admit = Callable[[Connection, Message], None]
OnClosed = Callable[[int, str], None]

_logger = own_logger(__name__)

# Connections that have not said which rank they are.
_MAX_PENDING = 256
_PAUSE_WITHOUT_DESCRIPTORS = 0.2
_FLUSH_WITHIN = 1.0
_LEAVING = "leaving"


class Channel:
    """The connections of this process; rank 0 has one to every other rank, and each of those has one to rank 0.

    Args:
        heartbeat: seconds of silence after which the kernel ends a connection.
    """

    def __init__(self, heartbeat: float) -> None:
        self._heartbeat = heartbeat
        self._peers: dict[int, Connection] = {}
        self._pending: dict[Connection, None] = {}
        self._listener: socket.socket | None = None
        self._admit: Admit | None = None
        self._closed: dict[int, str] = {}
        self._on_closed: OnClosed | None = None
        self._listeners: dict[str, Listener] = {}
        self._unclaimed: dict[str, list[Message]] = {}
        self._actions: deque[Callable[[], None]] = deque()
        self._lock = threading.RLock()
        self._is_closing = False
        self._has_warned = False
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)  # a full pipe wakes the reader, too
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._drain_wakes)
        self._thread = threading.Thread(target=self._serve, name="ddpx-channel", daemon=True)
        self._thread.start()
        _open_channels.add(self)

    # For any thread.

    def connect(self, rank: int, connected: socket.socket) -> None:
        """Serve a connection to a rank."""
        keep_alive(connected, self._heartbeat)
        connection = Connection(connected)
        self.adopt(rank, connection)
        self._run(lambda: self._register(connection))

    def adopt(self, rank: int, connection: Connection) -> None:
        """From now on a connection is that of a rank."""
        connection.rank, connection.longest = rank, MAX_MESSAGE
        with self._lock:
            self._pending.pop(connection, None)
            self._closed.pop(rank, None)
            self._peers[rank] = connection

    def accept(self, listener: socket.socket, admit: Admit) -> None:
        """Serve whoever connects to ``listener``; ``admit`` gets what a connection says until it is adopted."""
        listener.setblocking(False)
        self._listener, self._admit = listener, admit
        self._run(lambda: self._watch_listener(listener))

    def stop_accepting(self) -> None:
        """Close the listening socket; its port is free when this returns."""
        if self._listener is None or self._is_closing:
            return
        listener, is_closed = self._listener, threading.Event()

        def close() -> None:
            with suppress(KeyError, ValueError):
                self._selector.unregister(listener)
            listener.close()
            self._listener = None
            is_closed.set()

        self._run(close)
        is_closed.wait(_FLUSH_WITHIN)

    def send(self, topic: str, body: Message) -> None:
        """Send a message to rank 0, or from rank 0 to all others. Never waits, never raises."""
        line = _line(topic, body)
        with self._lock:  # all ranks get messages in one order
            unfinished = [connection for connection in self._peers.values() if connection.send(line)]
        for connection in unfinished:
            self._run(partial(self._await_writable, connection))

    def reply(self, connection: Connection, topic: str, body: Message) -> None:
        """Send a message to one connection."""
        if connection.send(_line(topic, body)):
            self._run(lambda: self._await_writable(connection))

    def listen(self, topic: str, listener: Listener) -> None:
        """Pass messages of a topic to ``listener`` on the channel's thread; those that came before come now."""
        while True:
            with self._lock:
                waiting = self._unclaimed.pop(topic, [])
                if not waiting:
                    self._listeners[topic] = listener
                    return
            for body in waiting:
                listener(body)

    def on_closed(self, on_closed: OnClosed) -> None:
        """Call ``on_closed`` with each rank whose connection ends, and why; the reason is empty if it left.

        Connections that have ended before are reported now.
        """
        with self._lock:
            self._on_closed = on_closed
            closed = dict(self._closed)
        for rank, reason in closed.items():
            on_closed(rank, reason)

    @property
    def peers(self) -> set[int]:
        """The ranks that are connected."""
        with self._lock:
            return set(self._peers)

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller is a listener, or something else that must not wait for messages."""
        return threading.current_thread() is self._thread

    def disconnect(self, rank: int) -> None:
        """End the connection to a rank, and forget it."""
        with self._lock:
            connection = self._peers.pop(rank, None)
            self._closed.pop(rank, None)
        if connection is not None:
            self._run(lambda: self._release(connection))

    def close(self, *, in_order: bool = True) -> None:
        """End all connections, once everything is sent; unless ``in_order``, that counts as this rank's death."""
        if in_order:
            self.send(_LEAVING, {})
        self._is_closing = True
        self._run(lambda: None)
        if not self.is_current_thread:
            self._thread.join(timeout=2 * _FLUSH_WITHIN)
        self._admit = self._on_closed = None
        self._listeners.clear()

    def close_inherited(self) -> None:
        """In a forked child: close its copies of the sockets, so that the death of its parent is noticed."""
        connections = [*self._peers.values(), *self._pending]
        sockets = [connection.socket for connection in connections]
        for inherited in (*sockets, self._listener, self._wake_reader, self._wake_writer):
            if inherited is not None:
                inherited.close()

    # On the channel's thread.

    def _serve(self) -> None:
        while not self._is_closing:
            for key, events in self._selector.select():
                if self._selector.get_map().get(key.fd) is not key:  # closed by an event of the same round
                    continue
                try:
                    key.data(events)
                except Exception:
                    _logger.exception("the control channel goes on after an error")
        self._flush()
        self._selector.close()
        self.close_inherited()

    def _run(self, action: Callable[[], None]) -> None:
        self._actions.append(action)
        with suppress(OSError):
            self._wake_writer.send(b".")

    def _drain_wakes(self, _events: int) -> None:
        with suppress(OSError):
            self._wake_reader.recv(1 << 12)
        while self._actions:
            try:
                self._actions.popleft()()
            except Exception:
                _logger.exception("the control channel goes on after an error")

    def _register(self, connection: Connection) -> None:
        with suppress(OSError, ValueError):
            self._selector.register(
                connection.socket, selectors.EVENT_READ, lambda events: self._serve_connection(connection, events)
            )

    def _await_writable(self, connection: Connection) -> None:
        self._watch_for(connection, selectors.EVENT_READ | selectors.EVENT_WRITE)

    def _watch_for(self, connection: Connection, events: int) -> None:
        with suppress(KeyError, ValueError, OSError):
            key = self._selector.get_key(connection.socket)
            self._selector.modify(connection.socket, events, key.data)

    def _serve_connection(self, connection: Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE and not connection.flush():
            self._watch_for(connection, selectors.EVENT_READ)
        if events & selectors.EVENT_READ:
            for message in connection.receive():
                self._take(connection, message)
            if not connection.is_open:
                self._end(connection)

    def _take(self, connection: Connection, message: Message) -> None:
        topic, body = message.get("topic"), message.get("body")
        if connection.rank is None:
            assert self._admit is not None
            self._admit(connection, message)
        elif topic == _LEAVING:
            self._closed[connection.rank] = ""
        elif isinstance(topic, str) and isinstance(body, dict):
            self._route(topic, {**body, "from": connection.rank})

    def _route(self, topic: str, body: Message) -> None:
        with self._lock:
            listener = self._listeners.get(topic)
            if listener is None:
                self._unclaimed.setdefault(topic, []).append(body)
        if listener is not None:
            try:
                listener(body)
            except Exception:
                _logger.exception("the control channel goes on after an error in a listener for %r", topic)

    def _end(self, connection: Connection) -> None:
        rank, reason = connection.rank, connection.close_reason
        with self._lock:
            self._pending.pop(connection, None)
            is_peer = rank is not None and self._peers.get(rank) is connection
            if rank is not None and is_peer:
                del self._peers[rank]
                reason = f"{reason} for {self._heartbeat:g} s" if reason == SILENT else reason
                reason = self._closed.setdefault(rank, reason)
            on_closed = self._on_closed
        self._release(connection)
        if rank is not None and is_peer and on_closed is not None and not self._is_closing:
            on_closed(rank, reason)

    def _release(self, connection: Connection) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.close()

    # New connections, on rank 0.

    def _watch_listener(self, listener: socket.socket) -> None:
        if not self._is_closing and listener.fileno() >= 0:
            self._selector.register(listener, selectors.EVENT_READ, lambda _events: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        try:
            connected, _ = listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._pause_accepting(listener)
            return
        keep_alive(connected, self._heartbeat)
        connection = Connection(connected, longest=MAX_HELLO)
        self._pending[connection] = None
        self._register(connection)
        if len(self._pending) > _MAX_PENDING:
            self._end(next(iter(self._pending)))

    def _pause_accepting(self, listener: socket.socket) -> None:
        """Make room: a listener that is always ready would otherwise keep this thread busy."""
        if not self._has_warned:
            _logger.warning("rank 0 has no file descriptors left for more ranks; raise the limit (ulimit -n)")
            self._has_warned = True
        if self._pending:
            self._end(next(iter(self._pending)))
        self._selector.unregister(listener)
        again = threading.Timer(_PAUSE_WITHOUT_DESCRIPTORS, self._run, [lambda: self._watch_listener(listener)])
        again.daemon = True
        again.start()

    # The end.

    def _flush(self) -> None:
        """Wait until the others close, too: where messages are left unread, closing drops what was not delivered."""
        deadline = Deadline(_FLUSH_WITHIN)
        connections = list(self._peers.values())
        for connection in connections:
            with suppress(OSError):
                connection.flush()
                connection.socket.shutdown(socket.SHUT_WR)
        for connection in connections:
            with suppress(OSError):
                connection.socket.settimeout(max(0.001, deadline.remaining))
                while connection.socket.recv(1 << 16):
                    pass


def _line(topic: str, body: Message) -> bytes:
    return encode({"topic": topic, "body": body})


_open_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _close_inherited() -> None:
    for channel in list(_open_channels):
        channel.close_inherited()


os.register_at_fork(after_in_child=_close_inherited)
