"""Every tensor of a checkpoint is found, wherever it is, and has a name that a user understands."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ddp_ext.cli.tensors import (
    has_storage,
    named_tensors,
    payload_bytes,
)
from tests.checkpoint.content import Owner, model, numbers


@dataclasses.dataclass
class Plain:
    tensor: Tensor


@dataclasses.dataclass
class Slotted:
    __slots__ = ("tensor", "unset")
    tensor: Tensor


class Both(Owner):
    """Has an attribute beside its base's slot."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor)
        self.other = tensor


def names(content: Any) -> list[str]:
    return [name for name, _ in named_tensors(content)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (numbers(1), [""]),
        ({"a": numbers(1), "b": {3: [numbers(1), "x", (numbers(1),)]}}, ["a", "b.3.0", "b.3.2.0"]),
        ([Plain(numbers(1)), Slotted(numbers(1)), Owner(numbers(1))], ["0.tensor", "1.tensor", "2.tensor"]),
        ([Both(numbers(1))], ["0.other", "0.tensor"]),
        ({"s": numbers(3, 3).to_sparse()}, ["s", "s"]),
        ({"s": numbers(3, 3).to_sparse_csr()}, ["s", "s", "s"]),
        ({"set": frozenset([1, 2]), "bytes": b"x", "class": Plain, "none": None}, []),
    ],
)  # fmt: skip
def test_names_are_paths(content: Any, expected: list[str]) -> None:
    """Keys, numbers and attributes lead to each tensor."""
    assert names(content) == expected


def test_a_module_has_all_its_tensors() -> None:
    """Of a whole module, the parameters themselves are found, and also a buffer that is not part of its state."""
    module = model()
    found = dict(named_tensors({"model": module}))
    assert found["model.0.weight"] is module[0].weight  # type: ignore[index]
    assert found["model.scratch"] is module.scratch
    expected = {*(f"model.{name}" for name in module.state_dict()), "model.scratch"}
    assert set(found) == expected


def test_a_circle_ends() -> None:
    """What contains itself is walked once."""
    circle: dict[str, Any] = {"x": numbers(1)}
    circle["again"] = [circle]
    assert names(circle) == ["x"]


def test_memory_that_is_shared_counts_once() -> None:
    """The payload is what is in memory, not what the views add up to."""
    base = numbers(10)
    assert payload_bytes({"a": base, "b": base[3:], "c": [base.reshape(2, 5)], "d": numbers(2)}) == 48
    assert payload_bytes({"s": torch.eye(4).to_sparse()}) == 2 * 4 * 8 + 4 * 4
    assert payload_bytes({"empty": torch.empty(0), "meta": torch.empty(9, device="meta")}) == 0


def test_who_has_memory() -> None:
    """A dense tensor does, an empty one too; one on the meta device and one made of others do not."""
    assert has_storage(numbers(2))
    assert has_storage(torch.empty(0))
    assert has_storage(nn.Parameter(numbers(2)))
    assert not has_storage(torch.empty(2, device="meta"))
    assert not has_storage(torch.eye(2).to_sparse())
    assert not has_storage(torch.eye(2).to_sparse_csr())
