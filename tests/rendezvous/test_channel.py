"""The control channel sends without waiting, and reports closed connections."""

import json
import socket
from contextlib import closing

from lightning_ddp_ext.rendezvous.channel import (
    Channel,
)
from lightning_ddp_ext.rendezvous.endpoint import listen

LONG_TEXT = "x" * (1 << 19)
MESSAGES = 12  # 6 MiB, beyond a socket's buffer


def test_sending_never_waits_for_a_rank_that_does_not_read() -> None:
    """Messages that the kernel does not accept are sent later, in order."""
    with listen("127.0.0.1", 0) as listener:
        rank_one = socket.create_connection(listener.getsockname()[:2])
        accepted = listener.accept()[0]
    rank_one.settimeout(10.0)
    with rank_one, closing(Channel(heartbeat=30.0)) as rank_zero:
        rank_zero.connect(1, accepted)
        for number in range(MESSAGES):
            rank_zero.send("a", {"text": LONG_TEXT, "number": number})
        with rank_one.makefile("rb") as lines:
            numbers = [json.loads(lines.readline())[1]["number"] for _ in range(MESSAGES)]
        assert numbers == list(range(MESSAGES))
