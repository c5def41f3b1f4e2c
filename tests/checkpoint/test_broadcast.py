"""How the bytes that rank 0 sends travel."""

from __future__ import annotations

import pytest
import torch
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


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 60))
def test_small_pieces_travel_together(sizes: list[int], together: int) -> None:
    """However they are grouped, each arrives in its place, and no group is too large."""
    memory = [torch.arange(size, dtype=torch.uint8) + index for index, size in enumerate(sizes)]
    arrived = [torch.zeros_like(content) for content in memory]
    sent = list[Tensor]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TOGETHER", together)
        send(memory, Wire(0, sent))
        assert all(data.numel() <= max(together, 40) for data in sent)
        send(arrived, Wire(1, sent))
    assert sent == []
    assert all(torch.equal(one, other) for one, other in zip(arrived, memory, strict=True))
