"""What rank 0 sends, and how its bytes travel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_ddp_ext.checkpoint import broadcast as module
from lightning_ddp_ext.checkpoint.broadcast import _taken_apart, send
from lightning_ddp_ext.checkpoint.collectives import Ranks
from tests.checkpoint.content import numbers, saved


def test_a_manifest_has_no_memory_of_tensors(tmp_path: Path) -> None:
    """It is small, however large the tensors are, and lists each piece of memory."""
    content = {"x": numbers(100_000), "e": torch.empty(0), "y": numbers(3)}
    for options in ({}, {"_use_new_zipfile_serialization": False}):
        manifest, storages = _taken_apart(saved(tmp_path / "it.ckpt", content, **options), None, verify=True)
        assert manifest.sizes == [400_000, 0, 12] == [storage.nbytes() for storage in storages]
        assert manifest.devices == ["cpu"] * 3
        assert len(manifest.skeleton) < 2000


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


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 60), st.integers(1, 30))
def test_bytes_travel_together_and_in_pieces(sizes: list[int], together: int, most: int) -> None:
    """However small and large ones are grouped and cut, each arrives in its place."""
    memory = [torch.arange(size, dtype=torch.uint8) + index for index, size in enumerate(sizes)]
    arrived = [torch.zeros_like(content) for content in memory]
    sent = list[Tensor]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TOGETHER", together)
        patch.setattr(module, "_PIECE", most)
        send(memory, Wire(0, sent))
        assert all(data.numel() <= max(together, most) for data in sent)
        send(arrived, Wire(1, sent))
    assert sent == []
    assert all(torch.equal(one, other) for one, other in zip(arrived, memory, strict=True))
