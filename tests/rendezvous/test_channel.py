"""The control channel sends without waiting, and drops a rank that does not read."""

import json
import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

import pytest

from lightning_ddp_ext.rendezvous.channel import (
    ENDED,
    MAX_MESSAGE,
    NOT_READING,
    Channel,
    Message,
    encode,
)
from lightning_ddp_ext.rendezvous.endpoint import listen

LONG_TEXT = "x" * (MAX_MESSAGE // 2)
MESSAGES = 12  # 6 times the longest message, beyond a socket's buffer


class Ends(NamedTuple):
    """Rank 0's channel, and the socket of a rank 1 that reads only if the test does."""

    rank_zero: Channel
    rank_one: socket.socket


@pytest.fixture
def ends() -> Iterator[Ends]:
    with listen("127.0.0.1", 0) as listener:
        rank_one = socket.create_connection(listener.getsockname()[:2])
        accepted = listener.accept()[0]
    rank_one.settimeout(10.0)
    with rank_one, closing(Channel(heartbeat=30.0)) as rank_zero:
        rank_zero.connect(1, accepted)
        yield Ends(rank_zero, rank_one)


def test_sending_never_waits(ends: Ends) -> None:
    """Messages that the kernel does not accept are sent later, in order."""
    for number in range(MESSAGES):
        ends.rank_zero.send("a", {"text": LONG_TEXT, "number": number})
    with ends.rank_one.makefile("rb") as lines:
        numbers = [json.loads(lines.readline())[1]["number"] for _ in range(MESSAGES)]
    assert numbers == list(range(MESSAGES))


def test_a_rank_that_does_not_read_is_dropped(ends: Ends) -> None:
    """Unsent messages have a limit, so that rank 0 does not run out of memory."""
    closed = queue.SimpleQueue[Message]()
    ends.rank_zero.on_message(ENDED, closed.put)
    while closed.empty():
        ends.rank_zero.send("a", {"text": LONG_TEXT})
    assert closed.get() == {"from": 1, "reason": NOT_READING}


def test_a_rank_that_leaves_is_reported_when_its_connection_closes(ends: Ends) -> None:
    """The announcement of an orderly exit is not reported as the exit itself."""
    is_announced = threading.Event()
    ends.rank_zero.on_message("after", lambda _: is_announced.set())
    ends.rank_one.sendall(encode("leaving", {}) + encode("after", {}))
    assert is_announced.wait(10.0)
    closed = queue.SimpleQueue[Message]()
    ends.rank_zero.on_message(ENDED, closed.put)
    assert closed.empty()
    ends.rank_one.close()
    assert closed.get(timeout=10.0) == {"from": 1, "reason": ""}
