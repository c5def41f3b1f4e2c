"""A checkpoint that is taken apart and put together again is the same, whatever kinds of tensors it holds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from lightning_ddp_ext.checkpoint.skeleton import join, split
from tests.checkpoint.content import kinds, model, numbers, same


def copied(content: Any) -> Any:
    pickled, storages = split(content)
    return join(pickled, [storage.clone() for storage in storages])


@pytest.mark.parametrize("kind", list(kinds()))
def test_a_tensor_of_each_kind(kind: str) -> None:
    """It is equal, and in other memory."""
    original = kinds()[kind]
    result = copied({"x": original})["x"]
    if original.layout == torch.strided and kind != "expanded":
        original.detach().zero_()
    assert same(result, kinds()[kind])


def test_memory_is_taken_once() -> None:
    """Views and one tensor under two names share one piece, empty ones have none."""
    base = numbers(9)
    pickled, storages = split({"a": base, "again": base, "part": base[3:], "other": numbers(2)})
    assert [storage.nbytes() for storage in storages] == [36, 8]
    result = join(pickled, [storage.clone() for storage in storages])
    assert result["again"] is result["a"]
    result["a"][3] = -1
    assert result["part"][0] == -1


def test_a_module_is_taken() -> None:
    """With parameters and buffers, which are the same tensors in its optimiser."""
    network = model()
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    twin, other = copied([network, optimizer])
    assert same(dict(twin.state_dict()), dict(network.state_dict()))
    pairs = itertools.zip_longest(twin.parameters(), other.param_groups[0]["params"])
    assert all(mine is its for mine, its in pairs)


def test_nothing_of_a_sparse_tensor_is_kept() -> None:
    """Torch remembers sparse tensors until it has checked them, and forgets them afterwards."""
    copied([kinds()["coo"], kinds()["csr"]])
    assert torch._utils._sparse_tensors_to_validate == []
