"""The control channel between a rank 0 and others, all in one process."""

from __future__ import annotations

import logging
import queue
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from lightning_ddp_ext.rendezvous.channel import Channel
from lightning_ddp_ext.rendezvous.sockets import listen
from lightning_ddp_ext.rendezvous.wire import CLOSED, MALFORMED, Connection, Message, encode
from tests.harness.ranks import RankProcesses

WITHIN = 10.0


class End:
    """A rank's channel, what it hears of a topic, and which connections have ended."""

    def __init__(self) -> None:
        self.channel = Channel(heartbeat=30.0)
        self.heard: queue.Queue[Message] = queue.Queue()
        self.closed: queue.Queue[tuple[int, str]] = queue.Queue()
        self.channel.listen("weather", self.heard.put)
        self.channel.on_closed(lambda rank, reason: self.closed.put((rank, reason)))


class Star:
    """Rank 0 and some others, which say their rank first."""

    def __init__(self, world_size: int) -> None:
        self.zero = End()
        self.listener = listen("127.0.0.1", 0)
        self.admitted: queue.Queue[int] = queue.Queue()
        self.zero.channel.accept(self.listener, self._admit)
        self.others = [self.join(rank) for rank in range(1, world_size)]

    def _admit(self, connection: Connection, message: Message) -> None:
        self.zero.channel.adopt(message["rank"], connection)
        self.admitted.put(message["rank"])

    def connect(self) -> socket.socket:
        return socket.create_connection(self.listener.getsockname()[:2], timeout=WITHIN)

    def join(self, rank: int) -> End:
        connected = self.connect()
        connected.sendall(encode({"rank": rank}))
        end = End()
        end.channel.connect(0, connected)
        assert self.admitted.get(timeout=WITHIN) == rank
        return end


@pytest.fixture
def star() -> Iterator[Star]:
    star = Star(3)
    yield star
    for end in (*star.others, star.zero):
        end.channel.close()


def test_messages_go_to_rank_0_and_from_it_to_all(star: Star) -> None:
    """With the sender, and in their order."""
    for number in range(100):
        star.others[0].channel.send("weather", {"number": number})
    assert [star.zero.heard.get(timeout=WITHIN) for _ in range(100)] == [
        {"number": number, "from": 1} for number in range(100)
    ]
    star.zero.channel.send("weather", {"sun": True})
    for end in star.others:
        assert end.heard.get(timeout=WITHIN) == {"sun": True, "from": 0}


def test_messages_that_come_before_a_listener_are_kept(star: Star) -> None:
    """They reach it first."""
    found: queue.Queue[int] = queue.Queue()
    for number in range(3):
        star.others[0].channel.send("news", {"number": number})
    star.others[0].channel.send("weather", {})
    star.zero.heard.get(timeout=WITHIN)
    star.zero.channel.listen("news", lambda body: found.put(body["number"]))
    star.others[0].channel.send("news", {"number": 3})
    assert [found.get(timeout=WITHIN) for _ in range(4)] == [0, 1, 2, 3]


def test_leaving_is_no_death(star: Star) -> None:
    """The reason is empty; of a channel that ends otherwise it is not, also for whoever asks later."""
    star.others[0].channel.close()
    assert star.zero.closed.get(timeout=WITHIN) == (1, "")
    star.others[1].channel.close(in_order=False)
    assert star.zero.closed.get(timeout=WITHIN) == (2, CLOSED)
    late: list[tuple[int, str]] = []
    star.zero.channel.on_closed(lambda rank, reason: late.append((rank, reason)))
    assert late == [(1, ""), (2, CLOSED)]


def test_what_goes_wrong_with_one_message_ends_nothing_else(star: Star, caplog: pytest.LogCaptureFixture) -> None:
    """A malformed one ends its own connection, and a listener that raises is reported."""

    def fail(body: Message) -> None:
        raise ValueError("rain")

    with star.connect() as connected:
        connected.sendall(encode({"rank": 3}) + b"garbage\n")
        assert star.admitted.get(timeout=WITHIN) == 3
        assert star.zero.closed.get(timeout=WITHIN) == (3, MALFORMED)
    star.zero.channel.listen("bad weather", fail)
    star.others[0].channel.send("bad weather", {})
    star.others[0].channel.send("weather", {})
    star.zero.heard.get(timeout=WITHIN)
    assert "the control channel goes on after an error" in caplog.text


def test_strangers_keep_no_rank_out(star: Star) -> None:
    """However many connect and say nothing."""
    strangers = [star.connect() for _ in range(300)]
    star.others.append(star.join(3))
    star.others[-1].channel.send("weather", {})
    assert star.zero.heard.get(timeout=WITHIN)["from"] == 3
    for stranger in strangers:
        stranger.close()


def run_out_of_descriptors(rank: int, world_size: int) -> int:
    """Connect where no descriptor is left, until one is given back; the rank that has been admitted."""
    star = Star(1)
    given_back = socket.socket()
    late = socket.socket()
    resource.setrlimit(resource.RLIMIT_NOFILE, (late.fileno() + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    held = []
    with suppress(OSError):
        while True:
            held.append(socket.socket())
    has_warned = threading.Event()
    logging.getLogger("lightning_ddp_ext.rendezvous.channel").addFilter(lambda _: has_warned.set() or True)
    late.connect(star.listener.getsockname()[:2])
    late.sendall(encode({"rank": 3}))
    assert has_warned.wait(WITHIN), "no descriptor was missing"
    given_back.close()
    return star.admitted.get(timeout=WITHIN)


def test_without_descriptors_rank_0_waits_for_some_and_says_so() -> None:
    """It takes ranks again as soon as it can."""
    with RankProcesses(run_out_of_descriptors, 1) as ranks:
        (outcome,) = ranks.wait()
    assert outcome.result == 3, outcome.story()
    assert "rank 0 has no file descriptors left for more ranks; raise the limit (ulimit -n)" in outcome.output
