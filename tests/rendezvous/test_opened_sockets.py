"""A broken group's connections are aborted, and no others of the process; the control
channel sends without waiting.
"""

import fcntl
import json
import os
import socket
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_ddp_ext.rendezvous import opened_sockets
from lightning_ddp_ext.rendezvous.channel import Channel
from lightning_ddp_ext.rendezvous.network import listen
from lightning_ddp_ext.rendezvous.opened_sockets import OpenedSockets


def test_only_torchs_connections_are_aborted() -> None:
    """A logger may connect to its server while a group forms."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with OpenedSockets() as opened:
            client = dist.TCPStore(
                "127.0.0.1", server.port, wait_for_workers=False, timeout=timedelta(seconds=30)
            )
            upload = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    with upload, accepted:
        opened.abort()
        upload.sendall(b"metrics")
        assert accepted.recv(7) == b"metrics"
        with pytest.raises(dist.DistError):
            client.get("key")


def test_a_file_that_has_reused_a_descriptor_keeps_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch may close a connection while the others are aborted, and the lock of a save may
    get its descriptor. Once the file is closed, another process can lock it.
    """
    path = tmp_path / "lock"
    with OpenedSockets() as opened:
        connection = socket.socket().detach()
    search = opened_sockets._descriptors_of_python

    def reuse_meanwhile() -> set[int]:
        with path.open("wb") as file:
            os.dup2(file.fileno(), connection)  # closes the socket
        fcntl.flock(connection, fcntl.LOCK_EX)
        return search()

    # No call of a user reaches this moment of the abort.
    monkeypatch.setattr(opened_sockets, "_descriptors_of_python", reuse_meanwhile)
    opened.abort()
    os.close(connection)
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


# The control channel.


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
