"""Connect each rank to rank 0 by the control channel, which carries messages by topic.

Every rank except rank 0 has one TCP connection to it. A closed connection reveals a
dead rank, whatever state Python, the store or a collective is in. An asyncio event loop
on a daemon thread, the **serving thread**, reads and writes. Callbacks on that thread
must not wait for messages, since the thread itself would have to deliver them.

The life of a connection on rank 0:

1. ``accept`` opens it. It has no rank yet, and its messages go to ``admit``.
2. ``adopt`` assigns a rank, and its messages go to the handlers of their topics.
3. It closes. A rank that leaves in order sends a message before that.

On other ranks, ``connect`` opens the only connection, with rank 0's number. Each line
of a connection is a message: a JSON list of topic and body.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import socket
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, cast

from typing_extensions import override

# Values of ``Connection.close_reason``. Messages show them after the name of a rank.
CLOSED = "its process ended unexpectedly"
MALFORMED = "it sent a malformed message"

# The topic of the message that the channel itself delivers when a connection closes.
ENDED = "ended"

# The body of a message, a JSON object.
Message = dict[str, Any]
# Called with the body of a message, to which the channel adds "from", the sender's rank.
Handler = Callable[[Message], None]
# Called with the topic and body of a message from a connection that has no rank yet.
Admit = Callable[["Connection", str, Message], None]

_logger = logging.getLogger(__name__)

_PAUSE_AFTER_ERROR = 0.1  # seconds until rank 0 tries to accept again
_FLUSH_SECONDS = 1.0  # the longest wait for messages to be sent, or for peers to close
_LEAVING = "leaving"
_CHUNK = 1 << 16  # bytes of one read


class Channel:
    """The connections of this process: on rank 0 to all other ranks, else to rank 0.

    Args:
        heartbeat: the silence in seconds after which the kernel closes a connection.

    Attributes:
        ended: the ranks whose connections closed, with the reasons; a reason is empty
            if the rank left in order.
        arrived: notified after each message and each closed connection. No message is
            delivered while a thread holds its lock.
        is_closing: whether this process has left the other ranks, or is leaving.
    """

    def __init__(self, heartbeat: float) -> None:
        self.ended: dict[int, str] = {}
        self.arrived = threading.Condition(threading.RLock())
        self.heartbeat = heartbeat
        self.is_closing = False
        # By topic: its handler, or messages without one. A message is handled or kept
        # with the lock of `arrived`.
        self._handlers: dict[str, Handler] = {}
        self._unclaimed: dict[str, list[Message]] = {}
        # Changed on the serving thread only: open connections, and those with a rank.
        self._connections: set[Connection] = set()
        self._of_rank: dict[int, Connection] = {}
        self._admit: Admit = lambda connection, topic, body: None  # on rank 0, see `accept`
        self._accepting: Future[None] = Future()  # until rank 0 stops accepting
        # The serving thread, and in `_loop` its event loop: from the first connection.
        self._thread: threading.Thread | None = None

    # Connecting.

    def connect(self, rank: int, connected: socket.socket) -> None:
        """Serve a connection to a rank."""
        self._start()
        asyncio.run_coroutine_threadsafe(self._open(connected, rank), self._loop).result()

    def accept(self, listener: socket.socket, admit: Admit) -> None:
        """Accept connections on ``listener`` in the background.

        ``admit`` receives a connection's messages until it is adopted.
        """
        listener.setblocking(False)
        self._admit = admit
        self._start()
        self._accepting = asyncio.run_coroutine_threadsafe(self._accept(listener), self._loop)

    def stop_accepting(self) -> None:
        """Close the listener; the kernel then refuses further connections."""
        self._accepting.cancel()

    # Callable from any thread.

    def send(self, topic: str, body: Message, ranks: Collection[int] | None = None) -> None:
        """Send a message to rank 0; on rank 0, to ``ranks``, by default all others.

        All ranks receive messages in the same order. Never waits, and does not raise if
        a connection is lost.

        Raises:
            TypeError: ``body`` is not JSON.
        """
        self.call(self._write, encode(topic, body), ranks)

    def call(self, action: Callable[..., object], *args: Any) -> None:
        """Have the serving thread call ``action``, after it has sent earlier messages.

        Nothing is called if the channel has no connections, or is closing.
        """
        if self._thread is not None and not self.is_closing:
            with suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(action, *args)

    def on_message(self, topic: str, handler: Handler) -> None:
        """Have ``handler`` called with each message on a topic.

        This thread calls it with messages that arrived earlier, and the serving thread
        with later ones, one at a time. It holds the lock of ``arrived``, which is
        notified afterwards, and must neither wait for another thread nor for a message.
        It also gets messages on the topic that it delivers itself.

        >>> channel = Channel(heartbeat=60)
        >>> channel.deliver("count", {"number": 1})
        >>> def count(body):
        ...     print(body["number"])
        ...     if body["number"] < 2:
        ...         channel.deliver("count", {"number": 2})
        >>> channel.on_message("count", count)
        1
        2
        """
        with self.arrived:  # later messages stay behind the earlier ones
            while earlier := self._unclaimed.pop(topic, []):
                for body in earlier:
                    handler(body)
            self._handlers[topic] = handler

    def forget(self, topic: str) -> None:
        """Drop the handler of a topic, and messages without one.

        To stop at a certain message, hold the lock of ``arrived``.
        """
        self._handlers.pop(topic, None)
        self._unclaimed.pop(topic, None)

    def deliver(self, topic: str, body: Message) -> None:
        """Call the handler of a topic with a message, or keep it for a later handler."""
        with self.arrived:
            handler = self._handlers.get(topic)
            try:
                if handler is None:
                    self._unclaimed.setdefault(topic, []).append(body)
                else:
                    handler(body)
            except Exception:
                _logger.exception("the control channel continues after an error about %r", topic)
            self.arrived.notify_all()

    def wait_for(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until ``condition`` holds, and return whether it does.

        It is checked after each message and each closed connection.
        """
        with self.arrived:
            return self.arrived.wait_for(condition, seconds)

    def wait_until_sent(self) -> None:
        """Wait shortly for messages to be sent, so that a sudden exit loses none."""
        if self._thread is not None:
            sent = threading.Event()
            self.call(sent.set)
            sent.wait(_FLUSH_SECONDS)

    @property
    def is_current_thread(self) -> bool:
        """Whether this is the serving thread, which must not wait for messages."""
        return threading.current_thread() is self._thread

    def close(self, *, in_order: bool = True) -> None:
        """Send all pending messages and close the connections.

        Unless ``in_order``, the other ranks then count this rank as dead.
        """
        if self.is_closing:
            return
        if in_order:
            self.send(_LEAVING, {})
        self.is_closing = True
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=2 * _FLUSH_SECONDS)
            self._handlers.clear()  # without the lock: the thread handles no more messages

    def close_inherited_sockets(self) -> None:
        """Close a forked child's copies, so that other ranks notice its parent's death.

        The event loop must not close them: it would remove the sockets from the
        selector, which the parent shares.
        """
        self.is_closing = True
        for connection in self._connections:
            connection.socket.close()

    # On the serving thread.

    def adopt(self, rank: int, connection: Connection) -> None:
        """Assign a connection to a rank."""
        connection.rank = rank
        self._of_rank[rank] = connection

    def _start(self) -> None:
        if self._thread is None:
            self._loop = asyncio.SelectorEventLoop()
            self._thread = threading.Thread(target=self._serve, name="ddpx-channel", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        self._loop.run_forever()  # until `close` stops it
        self._loop.run_until_complete(self._close_connections())
        self._loop.close()

    async def _close_connections(self) -> None:
        """Stop accepting, and close all connections."""
        tasks = asyncio.all_tasks() - {asyncio.current_task()}  # those that accept
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # The peers close first: closing with unread data would discard sent messages.
        lost = [connection.close_in_order() for connection in self._of_rank.values()]
        if lost:
            await asyncio.wait(lost, timeout=_FLUSH_SECONDS)
        for connection in list(self._connections):
            connection.close(CLOSED)
        await asyncio.sleep(0)  # in which the loop closes their sockets

    async def _accept(self, listener: socket.socket) -> None:
        """Accept connections until this is cancelled, and close the listener.

        asyncio's own server would log an error for each place in the backlog whenever
        file descriptors run out.
        """
        has_warned = False
        with listener:
            while True:
                try:
                    connected, _ = await self._loop.sock_accept(listener)
                    await self._open(connected)
                except OSError as error:
                    if error.errno in (errno.EMFILE, errno.ENFILE) and not has_warned:
                        _logger.warning(
                            "rank 0 has no file descriptors left for more ranks; raise the limit"
                            " (ulimit -n)"
                        )
                        has_warned = True
                    await asyncio.sleep(_PAUSE_AFTER_ERROR)

    async def _open(self, connected: socket.socket, rank: int | None = None) -> None:
        connection = Connection(connected, self)
        self._connections.add(connection)
        if rank is not None:  # before the event loop reads a message
            self.adopt(rank, connection)
        await self._loop.create_connection(lambda: connection, sock=connected)

    def _write(self, line: bytes, ranks: Collection[int] | None) -> None:
        for rank, connection in self._of_rank.items():
            if ranks is None or rank in ranks:
                connection.send(line)

    def handle_message(self, connection: Connection, topic: str, body: Message) -> None:
        """Handle a message of a connection."""
        if self.is_closing:
            return
        with self.arrived:
            if connection.rank is None:
                self._admit(connection, topic, body)
            elif topic == _LEAVING:
                connection.has_left = True
            else:
                self.deliver(topic, {**body, "from": connection.rank})
            self.arrived.notify_all()

    def handle_lost(self, connection: Connection) -> None:
        """Handle the end of a connection."""
        self._connections.discard(connection)
        rank = connection.rank
        if rank is not None:
            del self._of_rank[rank]
            reason = "" if connection.has_left else connection.close_reason
            # Without the lock, since each rank is set once; threads that wait for it are
            # notified by `deliver`.
            self.ended[rank] = reason
            if not self.is_closing:
                self.deliver(ENDED, {"from": rank, "reason": reason})


class Connection(asyncio.Protocol):
    """A connection to a peer; only for the event loop's thread.

    Args:
        connected: the socket, which the connection closes.
        channel: handles its messages, and its end.

    Attributes:
        socket: the connected socket.
        rank: the peer's rank; ``None`` until it is known.
        has_left: whether the peer has announced an orderly exit.
        close_reason: why the connection was closed; empty while it is open.
        lost: done after the channel has handled the end.

    The event loop sets ``_transport``, with which it writes, in ``connection_made``,
    before it calls any other method.
    """

    def __init__(self, connected: socket.socket, channel: Channel) -> None:
        connected.setblocking(False)
        _keep_alive(connected, channel.heartbeat)
        self.socket = connected
        self.rank: int | None = None
        self.has_left = False
        self.close_reason = ""
        self.lost = asyncio.get_running_loop().create_future()
        self._channel = channel
        self._unread = b""  # the beginning of a line whose end has not arrived

    def send(self, line: bytes) -> None:
        """Send an encoded message; never waits or raises."""
        if not self._transport.is_closing():
            self._transport.write(line)

    def close_in_order(self) -> asyncio.Future[None]:
        """Send unsent messages, and return ``lost``.

        The peer closes the connection after receiving them.
        """
        with suppress(OSError):  # the peer has closed it
            self._transport.write_eof()
        return self.lost

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
            message = _decode(line)
            if message is None:
                self.close(MALFORMED)
                return
            self._channel.handle_message(self, *message)

    @override
    def eof_received(self) -> None:
        self.close(CLOSED)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        if not self.close_reason:
            # A failed write ends reading, but earlier messages may explain it. If one
            # of them is malformed, this sets the reason.
            self._receive_rest()
            is_closed = exc is None or isinstance(exc, ConnectionError)
            silence = f"no sign of life from its host for {self._channel.heartbeat:g} s"
            self.close_reason = self.close_reason or (CLOSED if is_closed else silence)
        self._channel.handle_lost(self)
        self.lost.set_result(None)

    def _receive_rest(self) -> None:
        with suppress(OSError):
            while not self.close_reason and (data := self.socket.recv(_CHUNK)):
                self.data_received(data)


def encode(topic: str, body: Message) -> bytes:
    """Return the line that carries a message."""
    return json.dumps([topic, body]).encode() + b"\n"


def _decode(line: bytes) -> tuple[str, Message] | None:
    """Return topic and body of the message in a line; ``None`` if it is malformed."""
    try:
        topic, body = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    return (topic, body) if isinstance(topic, str) and isinstance(body, dict) else None


def _keep_alive(connected: socket.socket, heartbeat: float) -> None:
    """Have the kernel send without delay, and close a connection that stays silent.

    The limit is ``heartbeat`` seconds of silence: the kernel probes an idle connection
    after two sixths of it, and four times in the rest. The last option limits the time
    for which sent data may be unacknowledged.
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
