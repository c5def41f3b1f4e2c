"""Fingerprints of batches."""

from __future__ import annotations

import copy
from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ddp_ext.data.digest import digest, same_on

Pair = namedtuple("Pair", "x y")


@dataclass
class Graph:
    x: torch.Tensor
    names: list[str]


class Hostile:
    """Raises whenever it is looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


def cyclic() -> dict[str, Any]:
    node: dict[str, Any] = {"x": torch.ones(1)}
    node["self"] = [node] * 9
    return node


BATCHES: list[Any] = [
    torch.zeros(2, 3),
    torch.zeros(3, 2),
    torch.zeros(2, 3, dtype=torch.int64),
    torch.zeros(2, 3, dtype=torch.bfloat16),
    torch.zeros(2, 3).to_sparse() + torch.eye(2, 3).to_sparse(),
    torch.ones(2, 3).t(),
    torch.tensor(True),
    np.zeros((2, 3), dtype=np.int16),
    np.array(["a", "b"]),
    np.array(["a", 1], dtype=object),
    np.float32(1),
    [torch.zeros(1), torch.ones(1)],
    [torch.ones(1), torch.zeros(1)],
    (torch.ones(1), torch.zeros(1)),
    {"x": torch.ones(1), "y": 0},
    {"y": torch.ones(1), "x": 0},
    Pair(torch.ones(1), "text"),
    Graph(torch.ones(2), ["a"]),
    Graph(torch.ones(2), ["b"]),
    "text",
    b"text",
    "",
    1,
    1.0,
    True,
    [[1], 2],
    [1, [2]],
    [None, 1],
    cyclic(),
    torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)]),
]


def test_batches_that_differ_have_other_fingerprints() -> None:
    """In content, type, shape, order or structure; equal ones have the same."""
    digests = [digest(batch) for batch in BATCHES]
    assert None not in digests
    assert len(set(digests)) == len(BATCHES)
    assert [digest(copy.deepcopy(batch)) for batch in BATCHES] == digests


@pytest.mark.parametrize(
    "batch", [None, [], {}, object(), int, torch.zeros(0), torch.ones(2, device="meta"), iter([1])]
)
def test_what_cannot_be_told_apart_has_none(batch: Any) -> None:
    """And nothing is raised, whatever it is."""
    assert digest(batch) is None


def test_what_cannot_be_read_is_left_out() -> None:
    """The rest counts."""
    assert digest(Hostile()) is None
    assert digest([Hostile(), 1]) is not None
    assert digest([Hostile(), 1]) != digest([Hostile(), 2])


def test_ranks_with_the_same() -> None:
    """Only those of which there are several; nothing equals what could not be read."""
    assert same_on(["a", "b", "b", None, None, "c", "b"]) == [[1, 2, 6]]
    assert same_on([None, None]) == []
