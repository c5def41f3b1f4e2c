"""A broken group's connections are aborted, and no others of the process."""

import fcntl
import os
import socket
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_ddp_ext.rendezvous import opened_sockets
from lightning_ddp_ext.rendezvous.opened_sockets import OpenedSockets

pytestmark = pytest.mark.unit


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

    monkeypatch.setattr(opened_sockets, "_descriptors_of_python", reuse_meanwhile)
    opened.abort()
    os.close(connection)
    with path.open() as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
