"""Connect each rank to rank 0 by the control channel, which carries messages by topic.

Every rank except rank 0 has one TCP connection to it. A closed connection reveals a
dead rank, whatever state Python, the store or a collective is in. An asyncio event loop
on a daemon thread serves the connections. Callbacks on that thread must not wait for
messages, since the thread itself would have to deliver them.

The life of a connection on rank 0: ``accept`` opens it without a rank, ``admit`` gets
its messages until ``adopt`` assigns a rank, and then the handler of each topic gets
them. A rank that leaves in order says so before it closes.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress

from lightning_ddp_ext.rendezvous.wire import CLOSED, MAX_MESSAGE, Connection, Message, encode

# Called with the body of a message, to which the channel adds "from", the sender's rank.
Handler = Callable[[Message], None]
# Called with the topic and body of a message from a connection that has no rank yet.
Admit = Callable[[Connection, str, Message], None]
# Called with a rank and the reason for which its connection closed, as in ``ended``.
OnClosed = Callable[[int, str], None]

_logger = logging.getLogger(__name__)

_PAUSE_AFTER_ERROR = 0.1  # seconds until rank 0 tries to accept again
_FLUSH_SECONDS = 1.0  # the longest wait for messages to be sent, or for peers to close
_LEAVING = "leaving"


class Channel:
    """The connections of this process: on rank 0 to all other ranks, else to rank 0.

    Args:
        heartbeat: the silence in seconds after which the kernel closes a connection.

    Attributes:
        ended: the ranks whose connections closed, with the reasons; a reason is empty
            if the rank left in order.
        arrived: notified after each message and each closed connection. No message is
            delivered while a thread holds its lock.
    """

    def __init__(self, heartbeat: float) -> None:
        self.ended: dict[int, str] = {}
        self.arrived = threading.Condition(threading.RLock())
        self._heartbeat = heartbeat
        self._of_rank: dict[int, Connection] = {}
        self._connections: set[Connection] = set()  # also those without a rank
        self._listener: socket.socket | None = None
        self._accepting: Future[None] | None = None
        self._admit: Admit = lambda connection, topic, body: None
        self._on_closed: OnClosed = lambda rank, reason: None
        self._handlers: dict[str, Handler] = {}  # by topic
        self._unclaimed: dict[str, list[Message]] = {}  # of topics without a handler
        # Encoded messages with their receivers; None: all other ranks.
        self._outgoing: deque[tuple[bytes, Collection[int] | None]] = deque()
        self._loop = asyncio.SelectorEventLoop()
        self._thread: threading.Thread | None = None
        self._is_closing = False

    # Connecting.

    def connect(self, rank: int, connected: socket.socket) -> None:
        """Serve a connection to a rank, and close an earlier one to the same rank."""
        self._start()
        asyncio.run_coroutine_threadsafe(self._open(connected, rank), self._loop).result()

    def accept(self, listener: socket.socket, admit: Admit) -> None:
        """Accept connections on ``listener`` in the background.

        ``admit`` receives a connection's messages until it is adopted.
        """
        listener.setblocking(False)
        self._listener = listener
        self._admit = admit
        self._start()
        self._accepting = asyncio.run_coroutine_threadsafe(self._accept(listener), self._loop)

    def stop_accepting(self) -> None:
        """Close the listener; the kernel then refuses further connections."""
        if self._accepting is not None:
            self._accepting.cancel()

    # Callable from any thread.

    def send(self, topic: str, body: Message, ranks: Collection[int] | None = None) -> None:
        """Send a message to rank 0; on rank 0, to ``ranks``, by default all others.

        All ranks receive messages in the same order. Never waits, and does not raise if
        a connection is lost. A message that is too long is logged instead.

        Raises:
            TypeError: ``body`` is not JSON.
        """
        line = encode(topic, body)
        if len(line) > MAX_MESSAGE:  # the receiver would close the connection
            _logger.error(
                "a message on %r was not sent: it has %d bytes (limit: %d)",
                topic,
                len(line),
                MAX_MESSAGE,
            )
            return
        if self._thread is None or self._is_closing:
            return
        self._outgoing.append((line, ranks))
        if self.is_current_thread:
            self._flush()  # the rest of the current callback, such as an abort, may take seconds
        else:
            with suppress(RuntimeError):  # closed meanwhile
                self._loop.call_soon_threadsafe(self._flush)

    def on_message(self, topic: str, handler: Handler) -> None:
        """Have ``handler`` called with each message on a topic.

        This thread calls it with messages that arrived earlier, while it holds the lock
        of ``arrived``, and the serving thread with later ones. So it must neither wait
        for another thread nor for a message.
        """
        with self.arrived:  # later messages stay behind the earlier ones
            for body in self._unclaimed.pop(topic, []):
                handler(body)
            self._handlers[topic] = handler

    def on_closed(self, handler: OnClosed) -> None:
        """Have ``handler`` called with each rank whose connection closes or has closed."""
        with self.arrived:
            self._on_closed = handler
            ended = dict(self.ended)
        for rank, reason in ended.items():
            handler(rank, reason)

    def wait_for(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until ``condition`` holds, and return whether it does.

        It is checked after each message, sent or received, and each closed connection.
        """
        with self.arrived:
            return self.arrived.wait_for(condition, seconds)

    def wait_until_sent(self) -> None:
        """Wait shortly for messages to be sent, so that a sudden exit loses none."""
        self.wait_for(lambda: not self._outgoing or self._is_closing, _FLUSH_SECONDS)

    @property
    def is_current_thread(self) -> bool:
        """Whether this is the serving thread, which must not wait for messages."""
        return threading.current_thread() is self._thread

    def close(self, *, in_order: bool = True) -> None:
        """Send all pending messages and close the connections.

        Unless ``in_order``, the other ranks then count this rank as dead.
        """
        if self._is_closing:
            return
        if in_order:
            self.send(_LEAVING, {})
        self._is_closing = True
        if self._thread is None:
            self._loop.close()
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        if not self.is_current_thread:
            self._thread.join(timeout=2 * _FLUSH_SECONDS)
        self._handlers.clear()

    def close_inherited_sockets(self) -> None:
        """Close a forked child's copies, so that other ranks notice its parent's death.

        The loop must not close them, since it would also remove the parent's sockets
        from the selector, which both processes share.
        """
        self._is_closing = True
        for connection in self._connections:
            connection.socket.close()
        if self._listener is not None:
            self._listener.close()

    # On the serving thread.

    def adopt(self, rank: int, connection: Connection) -> None:
        """Assign a connection to a rank, and close an earlier one."""
        connection.rank = rank
        with self.arrived:
            self.ended.pop(rank, None)
            earlier = self._of_rank.get(rank)
            self._of_rank[rank] = connection
        if earlier is not None:
            earlier.close(CLOSED)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="ddpx-channel", daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        self._loop.run_forever()  # until `close` stops it
        self._loop.run_until_complete(self._close_connections())
        self._loop.close()

    async def _close_connections(self) -> None:
        """Send pending messages, stop accepting, and close all connections."""
        self._flush()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}  # those that accept
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # The peers close first: closing with unread data would discard sent messages.
        of_ranks = list(self._of_rank.values())
        for connection in of_ranks:
            connection.close_in_order()
        if of_ranks:
            lost = [connection.lost for connection in of_ranks]
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
                    has_no_descriptors = error.errno in (errno.EMFILE, errno.ENFILE)
                    if has_no_descriptors and not has_warned:
                        _logger.warning(
                            "rank 0 has no file descriptors left for more ranks; raise the limit"
                            " (ulimit -n)"
                        )
                        has_warned = True
                    await asyncio.sleep(_PAUSE_AFTER_ERROR)

    async def _open(self, connected: socket.socket, rank: int | None = None) -> None:
        connection = Connection(connected, self._heartbeat, self._handle_message, self._handle_lost)
        self._connections.add(connection)
        await self._loop.create_connection(lambda: connection, sock=connected)
        if rank is not None:  # before the event loop reads a message
            self.adopt(rank, connection)

    def _flush(self) -> None:
        while self._outgoing:
            line, ranks = self._outgoing[0]
            for rank, connection in self._of_rank.items():
                if ranks is None or rank in ranks:
                    connection.send(line)
            self._outgoing.popleft()  # not before, because of `wait_until_sent`
        with self.arrived:
            self.arrived.notify_all()

    def _handle_message(self, connection: Connection, topic: str, body: Message) -> None:
        if self._is_closing:
            return
        if connection.rank is None:
            self._admit(connection, topic, body)
        elif topic == _LEAVING:
            connection.has_left = True
        else:
            self._route(topic, {**body, "from": connection.rank})
        with self.arrived:
            self.arrived.notify_all()

    def _route(self, topic: str, body: Message) -> None:
        with self.arrived:
            handler = self._handlers.get(topic)
            if handler is None:
                self._unclaimed.setdefault(topic, []).append(body)
                return
        try:
            handler(body)
        except Exception:
            _logger.exception("the control channel continues after an error about %r", topic)

    def _handle_lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        rank = connection.rank
        if rank is None or self._of_rank.get(rank) is not connection:
            return
        reason = "" if connection.has_left else connection.close_reason
        with self.arrived:
            del self._of_rank[rank]
            self.ended[rank] = reason
            on_closed = self._on_closed
            self.arrived.notify_all()
        if not self._is_closing:
            on_closed(rank, reason)
