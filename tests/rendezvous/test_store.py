"""A client of the store that rank 0 hosts."""

from __future__ import annotations

import pytest

from lightning_ddp_ext.errors import RendezvousError
from lightning_ddp_ext.rendezvous.deadline import Deadline
from lightning_ddp_ext.rendezvous.store import connect_store
from tests.rendezvous.rooms import Answer, server, silent, web


@pytest.mark.parametrize("answer", [silent, web])
def test_a_server_that_is_no_store_is_given_up(answer: Answer) -> None:
    """Soon after the deadline, also where torch's client would wait for ever."""
    with (
        server(answer) as where,
        pytest.raises(RendezvousError, match=f"the store at 127.0.0.1:{where.port} cannot be used"),
    ):
        connect_store(where.host, where.port, Deadline(0.5))
