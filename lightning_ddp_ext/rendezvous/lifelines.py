"""A dead rank is news within seconds: every rank keeps a plain TCP connection to rank 0, and the kernel watches it.

A connection that ends without a goodbye is a death, whatever state Python, the store or a collective is in. What
rank 0 learns it passes on to everybody. Lines of JSON travel, never pickle, and only connections that bring this
attempt's nonce are accepted.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace

from lightning_ddp_ext.errors import StoreError
from lightning_ddp_ext.rendezvous.claims import Claim, Table
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.line import LONGEST_LINE, SEND_WITHIN, Line, Message, prepare
from lightning_ddp_ext.rendezvous.news import News, death_of
from lightning_ddp_ext.rendezvous.sockets import listen, own_addresses

_LONGEST_HELLO = 1 << 10
# Of a traceback its end is what counts; a message must fit into a line.
_LONGEST_TEXT = 1 << 16
# Connections that have not said who they are; a rank says so at once.
_MOST_STRANGERS = 128
_CONNECT_WITHIN = 3.0


def listen_for_lifelines() -> tuple[socket.socket, tuple[tuple[str, ...], int]]:
    """On rank 0: a listening socket, and the addresses and port by which others may reach it."""
    try:
        listener = listen("::", 0)  # takes IPv4 connections, too
    except OSError:
        listener = listen("0.0.0.0", 0)  # this host has no IPv6
    return listener, (tuple(own_addresses()), listener.getsockname()[1])


def answers(table: Table) -> bool:
    """Whether the run of ``table`` still goes on: its rank 0 answers on its lifeline."""
    for address in table.lifeline[0]:
        with suppress(OSError, ValueError), _connected(address, table, {"ask": True}):
            return True
    return False


_open: weakref.WeakSet[Lifelines] = weakref.WeakSet()


def _let_go() -> None:
    """In a forked child: while a loader's worker held a copy of a line, its parent's death would go unnoticed."""
    for lifelines in list(_open):
        lifelines.let_go()


os.register_at_fork(after_in_child=_let_go)


class Lifelines:
    """This rank's end of the lifelines, served by a daemon thread.

    Args:
        table: the final table of the roll call.
        rank: this process's rank.
        on_news: called from the thread with each piece of news about another rank, in the order of arrival.
        on_message: called from the thread with each message of :meth:`send`: its subject and what it says.
        listener: on rank 0, the socket that :func:`listen_for_lifelines` made.
        preferred: an address of rank 0's host that is known to be reachable, tried first.
        deadline: when to give up connecting.

    Raises:
        StoreError: none of rank 0's addresses can be reached.
    """

    def __init__(
        self,
        table: Table,
        rank: int,
        on_news: Callable[[News], None],
        deadline: Deadline,
        *,
        on_message: Callable[[str, Message], None] = lambda subject, message: None,
        listener: socket.socket | None = None,
        preferred: str | None = None,
    ) -> None:
        self._table = table
        self._rank = rank
        self._on_news = on_news
        self._on_message = on_message
        self._lines: dict[int, Line] = {}
        self._strangers: dict[Line, None] = {}
        self._gone: dict[int, News] = {}
        self._ended: set[int] = set()
        self._lock = threading.Lock()
        to_rank_zero = None if rank == 0 else _reach_rank_zero(table, rank, preferred, deadline)
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_reader, selectors.EVENT_READ, self._drain_wakes)
        self._closing = False
        self._settled = threading.Event()
        self._listener = listener
        if listener is not None:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, self._accept)
        if to_rank_zero is not None:
            self._add(0, to_rank_zero)
        self._note_whether_settled()
        self._thread = threading.Thread(target=self._serve, name="ddpx-lifelines", daemon=True)
        self._thread.start()
        _open.add(self)

    @property
    def local_address(self) -> str | None:
        """This rank's own address on the connection to rank 0; ``None`` on rank 0."""
        line = self._lines.get(0)
        return str(line.socket.getsockname()[0]) if line else None

    @property
    def remote_address(self) -> str | None:
        """The address of rank 0 that this rank has reached; ``None`` on rank 0."""
        line = self._lines.get(0)
        return str(line.socket.getpeername()[0]) if line else None

    @property
    def ended(self) -> list[Claim]:
        """Ranks whose processes are known to have ended, be it well or not."""
        return [self._table[rank] for rank in sorted(self._ended)]

    def wait_until_connected(self, deadline: Deadline) -> None:
        """On rank 0: wait until every other rank has connected, or until there is news that one of them is gone."""
        if not self._settled.wait(deadline.remaining):
            absent = [claim for claim in self._table.claims[1:] if claim.rank not in self._lines]
            raise StoreError(
                f"{', '.join(map(str, absent))} answered the roll call, but did not reach rank 0 at any of "
                f"{', '.join(self._table.lifeline[0])} port {self._table.lifeline[1]} within {deadline.seconds:g} s; "
                "look at its output, or open the way between the hosts"
            )

    def tell(self, news: News) -> None:
        """Send news to every rank that is connected; never blocks for long, never raises."""
        message = _message_of(news)
        is_known_there = news.kind in ("died", "failed", "left")
        with self._lock:
            for rank, line in self._lines.items():
                if rank != news.rank or not is_known_there:
                    line.send(message)

    def send(self, subject: str, message: Message) -> None:
        """Send a message to rank 0, or from rank 0 to all that are connected; never blocks for long, never raises."""
        with self._lock:
            for line in self._lines.values():
                line.send({"subject": subject, "message": message})

    def close(self) -> None:
        """Say goodbye and stop the thread."""
        mine = self._table[self._rank]
        self.tell(News("left", self._rank, mine.host, mine.pid))
        self._closing = True
        with suppress(OSError):
            self._wake_writer.send(b".")
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)

    def let_go(self) -> None:
        """Close this process's copies of the sockets, without a word to anybody."""
        sockets = [line.socket for line in (*self._lines.values(), *self._strangers)]
        for open_socket in (*sockets, self._listener, self._wake_reader, self._wake_writer):
            if open_socket is not None:
                open_socket.close()

    # Everything below runs in the thread, but for the first line or two of a connection.

    def _serve(self) -> None:
        while not self._closing:
            for key, _ in self._selector.select():
                if self._selector.get_map().get(key.fd) is key:  # else closed by an event of the same round
                    key.data()
        self._let_goodbye_arrive()
        self.let_go()
        self._selector.close()

    def _let_goodbye_arrive(self) -> None:
        """Wait until the others hang up, too: where news is left unread, closing drops what was not delivered yet."""
        deadline = Deadline(SEND_WITHIN)
        lines = list(self._lines.values())
        for line in lines:
            with suppress(OSError):
                line.socket.shutdown(socket.SHUT_WR)
        for line in lines:
            with suppress(OSError):
                line.socket.settimeout(max(0.001, deadline.remaining))
                while line.socket.recv(1 << 16):
                    pass

    def _drain_wakes(self) -> None:
        with suppress(OSError):
            self._wake_reader.recv(64)

    def _accept(self) -> None:
        assert self._listener is not None
        with suppress(OSError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            line = Line(connection, longest=_LONGEST_HELLO)
            self._strangers[line] = None
            self._selector.register(connection, selectors.EVENT_READ, lambda: self._greet(line))
            if len(self._strangers) > _MOST_STRANGERS + len(self._table.claims):
                self._turn_away(next(iter(self._strangers)))

    def _greet(self, line: Line) -> None:
        messages = line.receive()
        if not messages and line.is_open:
            return
        hello = messages[0] if messages and line.is_open else {}
        if hello.get("attempt") != self._table.attempt:
            self._turn_away(line)
        elif hello.get("rank") in set(range(1, len(self._table.claims))) - self._lines.keys():
            self._welcome(hello["rank"], line)
        else:
            line.send({"welcome": self._table.attempt})
            self._turn_away(line)

    def _welcome(self, rank: int, line: Line) -> None:
        del self._strangers[line]
        self._selector.unregister(line.socket)
        line.longest = LONGEST_LINE
        with self._lock:  # what is told from now on must not come before the welcome, nor be missed after it
            line.send({"welcome": self._table.attempt})
            self._add(rank, line)
            for news in self._gone.values():
                line.send(_message_of(news))
        self._note_whether_settled()

    def _turn_away(self, line: Line) -> None:
        del self._strangers[line]
        self._selector.unregister(line.socket)
        line.socket.close()

    def _add(self, rank: int, line: Line) -> None:
        line.socket.setblocking(False)
        prepare(line.socket)
        self._lines[rank] = line
        self._selector.register(line.socket, selectors.EVENT_READ, lambda: self._hear(rank, line))

    def _note_whether_settled(self) -> None:
        if self._rank != 0 or self._gone or len(self._lines) == len(self._table.claims) - 1:
            self._settled.set()

    def _hear(self, rank: int, line: Line) -> None:
        for message in line.receive():
            if "news" in message:
                self._take(News(**message["news"]))
            elif "subject" in message:
                self._on_message(message["subject"], message["message"])
        if not line.is_open:
            self._selector.unregister(line.socket)
            with self._lock:
                self._lines.pop(rank, None)
            line.socket.close()
            self._ended.add(rank)
            if rank not in self._gone and not self._closing:
                self._take(death_of(self._table[rank], line.end))

    def _take(self, news: News) -> None:
        if news.kind in ("died", "left"):
            self._ended.add(news.rank)
        if news.rank in self._gone:
            return
        self._gone[news.rank] = news
        if self._rank == 0:
            self.tell(news)
        self._on_news(news)
        self._note_whether_settled()


def _message_of(news: News) -> Message:
    short = replace(news, reason=news.reason[:_LONGEST_TEXT], traceback_text=news.traceback_text[-_LONGEST_TEXT:])
    return {"news": asdict(short)}


def _reach_rank_zero(table: Table, rank: int, preferred: str | None, deadline: Deadline) -> Line:
    addresses = list(table.lifeline[0])
    if table[rank].network == table[0].network:
        addresses.insert(0, "127.0.0.1")
    elif preferred is not None:
        addresses.insert(0, preferred)
    for _ in deadline.ticks(longest=0.25):
        for address in dict.fromkeys(addresses):
            with suppress(OSError, ValueError):
                seconds = max(0.1, min(_CONNECT_WITHIN, deadline.remaining))
                return Line(_connected(address, table, {"rank": rank}, seconds))
    raise StoreError(
        f"{table[rank]} cannot reach {table[0]} at any of {', '.join(addresses)} port {table.lifeline[1]} within "
        f"{deadline.seconds:g} s; look at the output of rank 0, or open the way between the hosts"
    )


def _connected(address: str, table: Table, hello: Message, seconds: float = _CONNECT_WITHIN) -> socket.socket:
    """A connection to rank 0 that has answered with the attempt's nonce."""
    connection = socket.create_connection((address, table.lifeline[1]), timeout=seconds)
    try:
        connection.sendall(json.dumps({"attempt": table.attempt, **hello}).encode() + b"\n")
        welcome = json.dumps({"welcome": table.attempt}).encode() + b"\n"
        if _receive_exactly(connection, len(welcome)) != welcome:
            raise ConnectionError("somebody else answers there")
    except BaseException:
        connection.close()
        raise
    return connection


def _receive_exactly(connection: socket.socket, length: int) -> bytes:
    received = b""
    while len(received) < length:
        piece = connection.recv(length - len(received))
        if not piece:
            break
        received += piece
    return received
