"""The control channel: one TCP connection from each rank to rank 0, for messages by topic.

A closed connection reveals a dead rank, whatever state Python, the store or a collective is in. The main thread serves
the connections during the handshake, and a daemon thread does so afterwards. Callbacks on that thread must not wait for
messages, since the thread itself would have to deliver them.
"""

from __future__ import annotations

import errno
import logging
import os
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.wire import MAX_MESSAGE, SILENT, Connection, Message, encode, keep_alive

Listener = Callable[[Message], None]
# Called with the topic and body of a message from a connection that has no rank yet.
Admit = Callable[[Connection, str, Message], None]
OnClosed = Callable[[int, str], None]

_logger = logging.getLogger(__name__)

_PAUSE_WITHOUT_DESCRIPTORS = 0.1
_FLUSH_WITHIN = 1.0
_LEAVING = "leaving"


class Channel:
    """The connections of this process: rank 0 is connected to every other rank, and every other rank to rank 0.

    Attributes:
        ended: the ranks whose connections closed, with the reasons; a reason is empty if the rank left in order.
    """

    def __init__(self, heartbeat: float) -> None:
        self.ended: dict[int, str] = {}
        self._heartbeat = heartbeat
        self._peers: dict[int, Connection] = {}
        self._listener: socket.socket | None = None
        self._admit: Admit | None = None
        self._on_closed: OnClosed = lambda rank, reason: None
        self._listeners: dict[str, Listener] = {}
        self._unclaimed: dict[str, list[Message]] = {}
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._is_closing = self._has_warned = False
        self._selector = selectors.DefaultSelector()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)  # a full pipe also wakes the reader
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._on_wake)
        _open_channels.add(self)

    # During the handshake.

    def connect(self, rank: int, connected: socket.socket) -> None:
        """Serve a connection to a rank, and close an earlier one to the same rank."""
        if rank in self._peers:
            self._close(self._peers[rank])
        keep_alive(connected, self._heartbeat)
        connection = Connection(connected)
        self.adopt(rank, connection)
        self._watch(connection)

    def accept(self, listener: socket.socket, admit: Admit) -> None:
        """Accept connections on ``listener``; ``admit`` receives a connection's messages until it is adopted."""
        listener.setblocking(False)
        self._listener, self._admit = listener, admit
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def adopt(self, rank: int, connection: Connection) -> None:
        """Assign a connection to a rank."""
        connection.rank = rank
        with self._lock:
            self.ended.pop(rank, None)
            self._peers[rank] = connection

    def poll(self, seconds: float | None = None) -> None:
        """Wait up to ``seconds`` for events, and handle those that are ready."""
        for key, events in self._selector.select(seconds):
            if self._selector.get_map().get(key.fd) is not key:  # an earlier event of this poll closed it
                continue
            try:
                key.data(events)
            except Exception:
                _logger.exception("the control channel continues after an error")

    def start(self, on_closed: OnClosed) -> None:
        """Start a thread that serves the connections, if there are any.

        Args:
            on_closed: called with each rank whose connection closes or has closed, and the reason, as in ``ended``.
        """
        self._on_closed = on_closed
        for rank, reason in self.ended.items():
            on_closed(rank, reason)
        if self._peers or self._listener is not None:
            self._thread = threading.Thread(target=self._serve, name="ddpx-channel", daemon=True)
            self._thread.start()

    # Callable from any thread.

    def send(self, topic: str, body: Message, ranks: Collection[int] | None = None) -> None:
        """Send a message to rank 0, or from rank 0 to ``ranks`` (by default all others). Never waits or raises."""
        line = encode(topic, body)
        if len(line) > MAX_MESSAGE:  # the receiver would close the connection
            _logger.error("a message on %r was not sent: it has %d bytes (limit: %d)", topic, len(line), MAX_MESSAGE)
            return
        with self._lock:  # all ranks receive messages in the same order
            for rank, connection in self._peers.items():
                if ranks is None or rank in ranks:
                    connection.send(line)
            is_unfinished = any(connection.unsent for connection in self._peers.values())
        if is_unfinished:
            self._wake()

    def reply(self, connection: Connection, topic: str, body: Message) -> None:
        """Send a message over one connection; for ``admit``."""
        connection.send(encode(topic, body))
        self._watch(connection)

    def listen(self, topic: str, listener: Listener) -> None:
        """Pass a topic's messages to ``listener`` on the serving thread, earlier ones immediately on this thread."""
        while True:
            with self._lock:
                waiting = self._unclaimed.pop(topic, [])
                if not waiting:
                    self._listeners[topic] = listener
                    return
            for body in waiting:
                listener(body)

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller runs on the serving thread, so it must not wait for messages."""
        return threading.current_thread() is self._thread

    def close(self, *, in_order: bool = True) -> None:
        """Send all pending messages and close the connections; unless ``in_order``, this rank then counts as dead."""
        if self._is_closing:
            return
        if in_order:
            self.send(_LEAVING, {})
        self._is_closing = True
        if self._thread is None:
            self._finish()
        else:
            self._wake()
            if not self.is_current_thread:
                self._thread.join(timeout=2 * _FLUSH_WITHIN)
        self._listeners.clear()

    def close_sockets(self) -> None:
        """Close all sockets. A forked child closes its copies, so that other ranks notice the death of its parent."""
        self._wake_writer.close()
        if self._listener is not None:
            self._listener.close()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()

    # On the serving thread.

    def _serve(self) -> None:
        while not self._is_closing:
            self.poll()
        self._finish()

    def _wake(self) -> None:
        with suppress(OSError):
            self._wake_writer.send(b".")

    def _on_wake(self, _events: int) -> None:
        with suppress(OSError):
            self._wake_reader.recv(1 << 12)
        with self._lock:
            unfinished = [connection for connection in self._peers.values() if connection.unsent]
        for connection in unfinished:
            self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Watch a connection for incoming messages and, if it has unsent ones, for room to send them."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        serve = partial(self._serve_connection, connection)
        with suppress(OSError, ValueError):  # the connection is closed
            try:
                self._selector.modify(connection.socket, events, serve)
            except KeyError:
                self._selector.register(connection.socket, events, serve)

    def _serve_connection(self, connection: Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            connection.flush()
            self._watch(connection)
        if events & selectors.EVENT_READ:
            for topic, body in connection.receive():
                self._handle_message(connection, topic, body)
            if connection.close_reason:
                self._end(connection)

    def _handle_message(self, connection: Connection, topic: str, body: Message) -> None:
        if connection.rank is None:
            assert self._admit is not None
            self._admit(connection, topic, body)
        elif topic == _LEAVING:
            self.ended[connection.rank] = ""
        else:
            self._route(topic, {**body, "from": connection.rank})

    def _route(self, topic: str, body: Message) -> None:
        with self._lock:
            listener = self._listeners.get(topic)
            if listener is None:
                self._unclaimed.setdefault(topic, []).append(body)
                return
        try:
            listener(body)
        except Exception:
            _logger.exception("the control channel continues after an error in a listener for %r", topic)

    def _end(self, connection: Connection) -> None:
        rank, reason = connection.rank, connection.close_reason
        self._close(connection)
        with self._lock:
            if rank is None or self._peers.get(rank) is not connection:
                return
            del self._peers[rank]
            reason = f"{reason} for {self._heartbeat:g} s" if reason == SILENT else reason
            reason = self.ended.setdefault(rank, reason)
        if not self._is_closing:
            self._on_closed(rank, reason)

    def _close(self, connection: Connection) -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(connection.socket)
        connection.close()

    def _accept(self, _events: int) -> None:
        assert self._listener is not None
        try:
            connected, _ = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                if not self._has_warned:
                    _logger.warning("rank 0 has no file descriptors left for more ranks; raise the limit (ulimit -n)")
                self._has_warned = True
                time.sleep(_PAUSE_WITHOUT_DESCRIPTORS)  # the listener stays ready, which would keep this thread busy
            return
        keep_alive(connected, self._heartbeat)
        self._watch(Connection(connected))

    def _finish(self) -> None:
        """Close the connections after the peers: closing a socket with unread data discards undelivered messages."""
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
        self.close_sockets()
        self._selector.close()
        _open_channels.discard(self)


_open_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _close_inherited() -> None:
    for channel in list(_open_channels):
        channel.close_sockets()


os.register_at_fork(after_in_child=_close_inherited)
