"""What rank 0 sends: which tensors may be received in place, and how their bytes travel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_ddp_ext.checkpoint import broadcast as module
from lightning_ddp_ext.checkpoint.broadcast import Weight, _read, send
from lightning_ddp_ext.checkpoint.collectives import Ranks
from tests.checkpoint.content import numbers, saved


def weights_of(path: Path, content: Any) -> list[str]:
    manifest, _ = _read(saved(path, content), None, verify=True)
    return sorted(weight.name for weight in manifest.weights.values())


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"a": numbers(3), "b": numbers(6000)}, ["a", "b"]),
        ({"state_dict": {"a": numbers(3)}, "other": {"b": numbers(3)}}, ["a"]),
        ({"state_dict": {"part": numbers(9)[3:], "turned": numbers(3, 4).T, "empty": torch.empty(0)}}, []),
        ({"state_dict": {"conj": torch.ones(3, dtype=torch.complex64).conj(), "sparse": torch.eye(3).to_sparse()}}, []),
        ({"other": {"a": numbers(3)}}, []),
    ],
)
def test_which_weights_may_be_received_in_place(content: Any, expected: list[str], tmp_path: Path) -> None:
    """Those of the ``state_dict`` that are a record from beginning to end."""
    assert weights_of(tmp_path / "it.ckpt", content) == expected


def test_memory_with_another_use_is_not_received_in_place(tmp_path: Path) -> None:
    """A weight that something else in the checkpoint looks at is not, two tied ones are, by the first one's name."""
    one = numbers(12)
    assert weights_of(tmp_path / "it.ckpt", {"state_dict": {"a": one, "tied": one}}) == ["a"]
    assert weights_of(tmp_path / "it.ckpt", {"state_dict": {"a": one}, "ema": [one]}) == []
    assert weights_of(tmp_path / "it.ckpt", {"state_dict": (weights := {"a": one}), "copy": weights}) == []
    assert weights_of(tmp_path / "it.ckpt", {"state_dict": {"a": one, "view": one.reshape(3, 4)}}) == []
    assert weights_of(tmp_path / "it.ckpt", {"state_dict": {"a": one, "part": one[2:]}}) == []


@pytest.mark.parametrize(
    ("own", "fits"),
    [
        (numbers(2, 3), True),
        (nn.Parameter(numbers(2, 3)), True),
        (numbers(12).view(2, 6)[1:].view(2, 3), True),
        (None, False),
        (numbers(3, 2), False),
        (numbers(6), False),
        (numbers(2, 3).double(), False),
        (numbers(3, 2).T, False),
        (numbers(3).expand(2, 3), False),
        (torch._neg_view(numbers(2, 3)), False),
        (torch.empty(2, 3, device="meta"), False),
    ],
)
def test_where_a_weight_fits(own: Tensor | None, fits: bool) -> None:
    """Into CPU memory of the same type, shape and order, whose bytes are its values."""
    assert Weight("a", torch.float32, torch.Size([2, 3])).fits(own) is fits


def test_a_manifest_has_no_memory_of_tensors(tmp_path: Path) -> None:
    """It is small, however large the tensors are, and lists each piece of memory."""
    content = {"x": numbers(100_000), "e": torch.empty(0), "y": numbers(3)}
    for options in ({}, {"_use_new_zipfile_serialization": False}):
        manifest, storages = _read(saved(tmp_path / "it.ckpt", content, **options), None, verify=True)
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
    """However small and large ones are grouped and cut, each arrives in its place, and the progress ends at the sum."""
    memory = [torch.arange(size, dtype=torch.uint8) + index for index, size in enumerate(sizes)]
    arrived = [torch.zeros_like(content) for content in memory]
    sent, seen = list[Tensor](), list[int]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_TOGETHER", together)
        patch.setattr(module, "_PIECE", most)
        send(memory, Wire(0, sent), seen.append)
        assert all(data.numel() <= max(together, most) for data in sent)
        ignore: Callable[[int], None] = lambda done: None  # noqa: E731
        send(arrived, Wire(1, sent), ignore)
    assert sent == []
    assert all(torch.equal(one, other) for one, other in zip(arrived, memory, strict=True))
    assert seen == sorted(seen)
    assert seen[-1:] == ([sum(sizes)] if sizes else [])
