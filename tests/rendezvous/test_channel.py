"""The control channel between rank 0 and others, and what its connections take from strangers."""

from __future__ import annotations

import logging
import queue
import resource
import socket
import threading
from contextlib import suppress

import pytest

from lightning_ddp_ext.rendezvous.channel import Channel
from lightning_ddp_ext.rendezvous.sockets import listen
from lightning_ddp_ext.rendezvous.wire import CLOSED, MAX_MESSAGE, MAX_UNSENT, NOT_READING, Connection, Message, encode
from tests.harness.ranks import RankProcesses

WITHIN = 10.0


class RankZero:
    """Rank 0's channel, and the ranks that it has admitted: those that say their rank."""

    def __init__(self) -> None:
        self.channel = Channel(heartbeat=30.0)
        self.admitted: queue.Queue[int] = queue.Queue()
        listener = listen("127.0.0.1", 0)
        self.address = listener.getsockname()[:2]
        self.closed: queue.Queue[tuple[int, str]] = queue.Queue()
        self.channel.accept(listener, self._admit)
        self.channel.start(lambda rank, reason: self.closed.put((rank, reason)))

    def _admit(self, connection: Connection, topic: str, body: Message) -> None:
        self.channel.adopt(body["rank"], connection)
        self.admitted.put(body["rank"])

    def join(self, rank: int) -> Channel:
        """The channel of another rank."""
        connected = socket.create_connection(self.address, timeout=WITHIN)
        connected.sendall(encode("hello", {"rank": rank}))
        channel = Channel(heartbeat=30.0)
        channel.connect(0, connected)
        channel.start(lambda rank, reason: None)
        assert self.admitted.get(timeout=WITHIN) == rank
        return channel


def fail(body: Message) -> None:
    raise ValueError("rain")


def test_messages_go_to_rank_0_and_from_it_to_all(caplog: pytest.LogCaptureFixture) -> None:
    """With the sender and in their order, those first that came before anybody listened; leaving is no death.

    A listener that raises is reported, and so is a message that is too long; neither ends anything.
    """
    zero, heard = RankZero(), [queue.Queue[Message]() for _ in range(3)]
    first, second = (zero.join(rank) for rank in (1, 2))
    zero.channel.listen("bad weather", fail)
    first.send("bad weather", {})
    first.send("weather", {"text": "x" * MAX_MESSAGE})
    for number in range(50):
        first.send("weather", {"number": number})
    first.send("arrived", {})
    zero.channel.listen("arrived", heard[0].put)
    assert heard[0].get(timeout=WITHIN) == {"from": 1}
    assert "the control channel goes on after an error" in caplog.text
    assert "a message on 'weather' is not sent, as it has 1048602 bytes" in caplog.text
    zero.channel.listen("weather", heard[0].put)
    for number in range(50, 100):
        first.send("weather", {"number": number})
    numbers = [heard[0].get(timeout=WITHIN) for _ in range(100)]
    assert numbers == [{"number": number, "from": 1} for number in range(100)]
    zero.channel.send("weather", {"sun": True})
    for rank, channel in ((1, first), (2, second)):
        channel.listen("weather", heard[rank].put)
        assert heard[rank].get(timeout=WITHIN) == {"sun": True, "from": 0}

    first.close()
    assert zero.closed.get(timeout=WITHIN) == (1, "")
    second.close(in_order=False)
    assert zero.closed.get(timeout=WITHIN) == (2, CLOSED)
    assert zero.channel.ended == {1: "", 2: CLOSED}
    zero.channel.close()


def run_out_of_descriptors(rank: int, world_size: int) -> int:
    """Connect where no descriptor is left, until one is given back; the rank that has been admitted."""
    zero, given_back, late = RankZero(), socket.socket(), socket.socket()
    resource.setrlimit(resource.RLIMIT_NOFILE, (late.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    held = []
    with suppress(OSError):
        while True:
            held.append(socket.socket())
    has_warned = threading.Event()
    logging.getLogger("lightning_ddp_ext.rendezvous.channel").addFilter(lambda _: has_warned.set() or True)
    late.connect(zero.address)
    late.sendall(encode("hello", {"rank": 3}))
    assert has_warned.wait(WITHIN), "no descriptor was missing"
    given_back.close()
    return zero.admitted.get(timeout=WITHIN)


def test_without_descriptors_rank_0_waits_for_some_and_says_so() -> None:
    """It takes ranks again as soon as it can."""
    with RankProcesses(run_out_of_descriptors, 1) as ranks:
        (outcome,) = ranks.wait()
    assert outcome.result == 3, outcome.story()
    assert "rank 0 has no file descriptors left for more ranks; raise the limit (ulimit -n)" in outcome.output


def test_sending_never_waits() -> None:
    """What the kernel does not take is sent once there is room, up to a limit: then the peer is given up."""
    here, there = socket.socketpair()
    with here, there:
        connection, line = Connection(here), encode("a", {"text": "x" * 300_000})
        connection.send(line)
        assert connection.unsent
        received = b""
        while len(received) < len(line):
            received += there.recv(1 << 16)
            connection.flush()
        assert received == line
        assert not connection.unsent
        line = encode("a", {"text": "x" * (MAX_UNSENT // 4)})
        for _ in range(6):
            connection.send(line)
        assert connection.close_reason == NOT_READING
