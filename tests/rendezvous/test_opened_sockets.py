"""A broken group's connections are aborted, and no others of the process."""

import socket
from datetime import timedelta

import pytest
import torch.distributed as dist

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
