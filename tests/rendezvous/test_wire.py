"""JSON objects over a connection, whatever the other end does."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_ddp_ext.rendezvous.wire import (
    CLOSED,
    MALFORMED,
    MAX_UNSENT,
    NOT_READING,
    Connection,
    decode,
    encode,
)

Ends = tuple[Connection, socket.socket]
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A connection, and the socket at its other end."""
    here, there = socket.socketpair()
    with here, there:
        yield Connection(here, longest=100), there


@given(st.dictionaries(st.text(), JSON))
def test_what_is_encoded_can_be_decoded(message: dict[str, Any]) -> None:
    """Any JSON object, as one line."""
    line = encode(message)
    assert line.count(b"\n") == 1
    assert decode(line) == message


def test_messages_arrive_however_they_are_cut_up_to_the_end(ends: Ends) -> None:
    """A message is received when its line is whole; after the end nothing is sent any more."""
    connection, there = ends
    found = []
    for byte in encode({"a": 1}) + encode({"b": [2]}):
        there.send(bytes([byte]))
        found += connection.receive()
    assert found == [{"a": 1}, {"b": [2]}]
    assert connection.receive() == []
    there.send(encode({"last": 1}))
    there.close()
    assert not connection.close_reason
    assert connection.receive() == [{"last": 1}]
    assert connection.receive() == []
    assert connection.close_reason == CLOSED
    assert not connection.send(encode({"late": 1}))


@pytest.mark.parametrize(
    "sent",
    [b"HTTP/1.1 200 OK\n", b"[]\n", b"\xff\xfe\n", b'{"a": 1\n', b"[" * 99 + b"\n", b"x" * 101],
    ids=["web", "list", "bytes", "half", "deep", "endless"],
)
def test_what_is_no_message_ends_the_connection(sent: bytes, ends: Ends) -> None:
    """Messages before it count."""
    connection, there = ends
    there.send(encode({"good": 1}) + sent)
    assert connection.receive() == [{"good": 1}]
    assert connection.close_reason == MALFORMED


def test_sending_never_waits(ends: Ends) -> None:
    """What the kernel does not take is sent once there is room, up to a limit: then the peer is given up."""
    connection, there = ends
    line = encode({"text": "x" * 300_000})
    assert connection.send(line)
    received = b""
    while len(received) < len(line):
        received += there.recv(1 << 16)
        connection.flush()
    assert received == line
    assert not connection.flush()
    line = encode({"text": "x" * (MAX_UNSENT // 4)})
    assert connection.send(line), "something is left"
    for _ in range(5):
        connection.send(line)
    assert connection.close_reason == NOT_READING
