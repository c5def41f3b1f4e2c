"""A file is copied to those ranks that do not see it, whatever goes wrong on one of them."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_ddp_ext.checkpoint import broadcast as module
from lightning_ddp_ext.checkpoint.broadcast import send
from lightning_ddp_ext.checkpoint.collectives import Ranks


class Wire(Ranks):
    """Carries what rank 0 has broadcast to another rank of the same process."""

    def __init__(self, rank: int, sent: list[Tensor]) -> None:
        super().__init__(rank, 2)
        object.__setattr__(self, "sent", sent)

    def broadcast(self, data: Tensor) -> None:
        sent: list[Tensor] = self.sent  # type: ignore[attr-defined]
        if self.rank == 0:
            sent.append(data.clone())
        else:
            data.copy_(sent.pop(0))


class Full(io.BytesIO):
    """Has room for nothing."""

    def write(self, data: Any) -> int:
        raise OSError(28, "No space left on device")


@given(st.binary(max_size=200), st.integers(1, 60))
def test_every_byte_arrives(content: bytes, piece: int) -> None:
    """In pieces; a rank without a file, or with a full disk, goes on."""
    sent = list[Tensor]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE", piece)
        assert send(io.BytesIO(content), len(content), Wire(0, sent)) is None
        copy = io.BytesIO()
        assert send(copy, len(content), Wire(1, list(sent))) is None
        assert copy.getvalue() == content
        assert send(None, len(content), Wire(1, list(sent))) is None
        error = send(Full(), len(content), Wire(1, sent))
    assert sent == []
    assert error is None if not content else str(error) == "[Errno 28] No space left on device"
