"""The control channel between a rank 0 and others, all in one process, and one that forks."""

from __future__ import annotations

import logging
import os
import queue
import resource
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lightning_ddp_ext.rendezvous.channel import Channel
from lightning_ddp_ext.rendezvous.sockets import listen
from lightning_ddp_ext.rendezvous.wire import CLOSED, MALFORMED, Connection, Message, encode
from tests.harness.ranks import RankProcesses, announce, hold

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

    def close(self) -> None:
        for end in (*self.others, self.zero):
            end.channel.close()


@pytest.fixture
def star() -> Iterator[Star]:
    star = Star(3)
    yield star
    star.close()


def test_messages_go_to_rank_0_and_from_it_to_all(star: Star) -> None:
    """With the sender, and in their order."""
    first, second = star.others
    for number in range(100):
        first.channel.send("weather", {"number": number})
    assert [star.zero.heard.get(timeout=WITHIN) for _ in range(100)] == [
        {"number": number, "from": 1} for number in range(100)
    ]
    star.zero.channel.send("weather", {"sun": True})
    for end in (first, second):
        assert end.heard.get(timeout=WITHIN) == {"sun": True, "from": 0}


def test_messages_that_come_before_a_listener_are_kept(star: Star) -> None:
    """They reach it first."""
    found: queue.Queue[Any] = queue.Queue()
    for number in range(3):
        star.others[0].channel.send("news", {"number": number})
    star.others[0].channel.send("weather", {})
    star.zero.heard.get(timeout=WITHIN)
    star.zero.channel.listen("news", lambda body: found.put(body["number"]))
    star.others[0].channel.send("news", {"number": 3})
    assert [found.get(timeout=WITHIN) for _ in range(4)] == [0, 1, 2, 3]


def test_leaving_is_no_death(star: Star) -> None:
    """The reason is empty; of a channel that ends otherwise it is not."""
    first, second = star.others
    first.channel.close()
    assert star.zero.closed.get(timeout=WITHIN) == (1, "")
    second.channel.close(in_order=False)
    assert star.zero.closed.get(timeout=WITHIN) == (2, CLOSED)


def test_an_end_that_came_early_is_reported_late(star: Star) -> None:
    """Who asks later hears of it, too."""
    star.others[1].channel.close(in_order=False)
    star.zero.closed.get(timeout=WITHIN)
    late: list[tuple[int, str]] = []
    star.zero.channel.on_closed(lambda rank, reason: late.append((rank, reason)))
    assert late == [(2, CLOSED)]


def test_a_malformed_message_ends_one_connection(star: Star) -> None:
    """The others go on."""
    connected = star.connect()
    connected.sendall(encode({"rank": 3}) + b"garbage\n")
    assert star.admitted.get(timeout=WITHIN) == 3
    assert star.zero.closed.get(timeout=WITHIN) == (3, MALFORMED)
    connected.close()
    star.others[0].channel.send("weather", {})
    star.zero.heard.get(timeout=WITHIN)


def test_a_listener_that_raises_ends_nothing(star: Star, caplog: pytest.LogCaptureFixture) -> None:
    """It is reported."""

    def fail(body: Message) -> None:
        raise ValueError("rain")

    star.zero.channel.listen("bad weather", fail)
    star.others[0].channel.send("bad weather", {})
    star.others[0].channel.send("weather", {})
    star.zero.heard.get(timeout=WITHIN)
    assert "the control channel goes on after an error" in caplog.text


def test_strangers_keep_no_rank_out(star: Star) -> None:
    """However many connect and say nothing."""
    strangers = [star.connect() for _ in range(300)]
    late = star.join(3)
    late.channel.send("weather", {})
    assert star.zero.heard.get(timeout=WITHIN)["from"] == 3
    for stranger in strangers:
        stranger.close()
    late.channel.close()


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


def fork_and_die(rank: int, world_size: int, directory: Path) -> None:
    """Rank 1 forks a child that lives on, and is killed by the test."""
    address = directory / "port"
    if rank == 0:
        star = Star(1)
        (directory / "port.tmp").write_text(str(star.listener.getsockname()[1]))
        os.replace(directory / "port.tmp", address)
        hold("listens")
        assert star.zero.closed.get(timeout=WITHIN) == (1, CLOSED)
        return
    hold("begins")
    connected = socket.create_connection(("127.0.0.1", int(address.read_text())))
    connected.sendall(encode({"rank": 1}))
    Channel(heartbeat=30.0).connect(0, connected)
    child = os.fork()
    if child == 0:
        threading.Event().wait(3 * WITHIN)
        os._exit(0)
    announce("forked", child)
    threading.Event().wait(3 * WITHIN)


def test_a_forked_child_does_not_keep_its_parent_alive(tmp_path: Path) -> None:
    """Its copies of the sockets are closed."""
    with RankProcesses(fork_and_die, 2, tmp_path) as ranks:
        ranks.wait_for("listens", 0)
        ranks.release(1)
        child = ranks.wait_for("forked", 1)
        ranks.kill(1)
        ranks.release(0)
        (outcome,) = ranks.wait(0)
        os.kill(child, signal.SIGKILL)
    assert outcome.exit_code == 0, outcome.story()
