"""The control channel between rank 0 and others, what its connections take from
strangers, and sockets in general.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import resource
import select
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from lightning_ddp_ext.rendezvous.channel import Channel
from lightning_ddp_ext.rendezvous.sockets import OpenedSockets, is_loopback, listen
from lightning_ddp_ext.rendezvous.wire import MAX_MESSAGE, NOT_READING, Message, encode
from tests.harness.environment import loopback
from tests.harness.ranks import RankProcesses

WITHIN = 10.0


def fail(body: Message) -> None:
    raise ValueError("rain")


def test_messages_are_passed_on_in_their_order_whatever_is_wrong_with_some(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Earlier ones arrive first; a listener that raises, and a long message, do not
    close the channel.
    """
    with listen("127.0.0.1", 0) as listener:
        sockets = socket.create_connection(listener.getsockname()[:2]), listener.accept()[0]
    zero = Channel(heartbeat=30.0)
    other = Channel(heartbeat=30.0)
    for rank, channel in enumerate((other, zero)):
        channel.connect(rank, sockets[rank])
    zero.listen("bad weather", fail)
    for topic, body in (
        ("weather", {"number": 0}),
        ("bad weather", {}),
        ("weather", {"text": "x" * MAX_MESSAGE}),
    ):
        other.send(topic, body)
    received = queue.SimpleQueue[Message]()
    zero.listen("weather", received.put)
    other.send("weather", {"number": 1})
    assert [received.get(timeout=WITHIN) for _ in range(2)] == [
        {"number": number, "from": 1} for number in range(2)
    ]
    assert "the control channel continues after an error" in caplog.text
    assert "a message on 'weather' was not sent: it has 1048602 bytes" in caplog.text
    other.close()
    zero.close()


def run_out_of_descriptors(rank: int, world_size: int) -> int:
    """Connect where no descriptor is left, until one is given back; the rank that has
    been admitted.
    """
    zero = Channel(heartbeat=30.0)
    listener = listen("127.0.0.1", 0)
    admitted = queue.SimpleQueue[int]()
    zero.accept(listener, lambda connection, topic, body: admitted.put(body["rank"]))
    given_back = socket.socket()
    late = socket.socket()
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (late.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    held = []
    with suppress(OSError):
        while True:
            held.append(socket.socket())
    has_warned = threading.Event()
    logging.getLogger("lightning_ddp_ext.rendezvous.channel").addFilter(
        lambda _: has_warned.set() or True
    )
    late.connect(listener.getsockname()[:2])
    late.sendall(encode("hello", {"rank": 3}))
    assert has_warned.wait(WITHIN), "no descriptor was missing"
    given_back.close()
    return admitted.get(timeout=WITHIN)


def test_without_descriptors_rank_0_logs_and_waits() -> None:
    """It takes ranks again as soon as it can."""
    with RankProcesses(run_out_of_descriptors, 1) as ranks:
        (outcome,) = ranks.wait()
    assert outcome.result == 3, outcome.story()
    assert (
        "rank 0 has no file descriptors left for more ranks; raise the limit (ulimit -n)"
        in outcome.output
    )


def test_sending_never_waits() -> None:
    """Data that the kernel does not accept are sent later, up to a limit: beyond it the
    peer is dropped.
    """
    text = "x" * (MAX_MESSAGE // 2)
    with listen("127.0.0.1", 0) as listener:
        there = socket.create_connection(listener.getsockname()[:2])
        here = listener.accept()[0]
    there.settimeout(WITHIN)
    zero = Channel(heartbeat=30.0)
    ended = queue.SimpleQueue[tuple[int, str]]()
    zero.connect(1, here)
    zero.on_closed(lambda rank, reason: ended.put((rank, reason)))
    with there, there.makefile("rb") as stream:
        for number in range(12):
            zero.send("a", {"text": text, "number": number})
        assert [json.loads(stream.readline())[1]["number"] for _ in range(12)] == list(range(12))
        while ended.empty():
            zero.send("a", {"text": text})
        assert ended.get() == (1, NOT_READING)
    zero.close()


def test_the_last_messages_arrive_even_if_sending_fails_first() -> None:
    """A rank that fails sends the cause and exits; a message to it may then fail before
    the cause is read.
    """
    with listen("127.0.0.1", 0) as listener:
        there = socket.create_connection(listener.getsockname()[:2])
        here = listener.accept()[0]
    zero = Channel(heartbeat=30.0)
    received = queue.SimpleQueue[Message]()
    is_busy = threading.Event()
    is_closed = threading.Event()

    def send_to_closed(body: Message) -> None:
        is_busy.set()
        assert is_closed.wait(WITHIN)
        zero.send("unread", {})

    zero.listen("first", send_to_closed)
    zero.listen("cause", received.put)
    zero.connect(1, here)
    zero.send("unread", {})
    assert select.select([there], [], [], WITHIN)[0]
    there.sendall(encode("first", {}))
    assert is_busy.wait(WITHIN)
    there.sendall(encode("cause", {"text": "rain"}))
    there.close()  # a reset, since it has not read everything
    is_closed.set()
    assert received.get(timeout=WITHIN) == {"text": "rain", "from": 1}
    zero.close()


class RawConnection:
    """Open a connection, both ends, without Python's socket objects, as C++ code does."""

    def __init__(self, listener: socket.socket) -> None:
        ours = socket.create_connection(listener.getsockname()[:2])
        self.ends = ours.detach(), listener.accept()[0].detach()

    def is_severed(self) -> bool:
        """Whether a connection's other end is closed."""
        is_readable = bool(select.select([self.ends[1]], [], [], 0.0)[0])
        return is_readable and os.read(self.ends[1], 1) == b""

    def close(self) -> None:
        for end in self.ends:
            os.close(end)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with listen("127.0.0.1", 0) as listener:
        yield listener


def test_a_descriptor_that_means_something_else_by_now_is_left_alone(
    listener: socket.socket,
) -> None:
    """The inode shows that another connection has the number now."""
    with OpenedSockets() as opened:
        first = RawConnection(listener)
    first.close()
    with closing(RawConnection(listener)) as second:
        assert set(second.ends) == set(first.ends)
        opened.abort()
        assert not second.is_severed()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::"])
def test_ranks_reach_rank_0_by_either_family_or_on_this_host_only(host: str) -> None:
    """A run on one machine is not reachable from the network; gloo's listeners stay
    open, since gloo needs them.
    """
    with OpenedSockets() as opened:
        listener = listen(host, 0)
    opened.abort()
    address, port = listener.getsockname()[:2]
    assert is_loopback(address) == (host != "::")
    with listener:
        for reached in loopback() if host == "::" else (host,):
            socket.create_connection((reached, port)).close()
