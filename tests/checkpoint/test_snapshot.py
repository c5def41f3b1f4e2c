"""A snapshot is the checkpoint as it was at one moment, in memory that is used again."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_ddp_ext.checkpoint.snapshot import Buffer, aligned
from tests.checkpoint.content import kinds, numbers, same, unusual

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")


def inside(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner) | st.tuples(inner, inner)


@st.composite
def checkpoints(draw: st.DrawFn) -> Any:
    """Nested content with tensors, some of which are the same object, and some views of the same memory."""
    bases = [numbers(length) for length in draw(st.lists(st.integers(0, 20), max_size=4))]
    views = [base[draw(st.integers(0, len(base))) :] for base in bases]
    leaves = st.none() | st.integers() | st.text(max_size=3)
    if bases:
        leaves = leaves | st.sampled_from(bases) | st.sampled_from(views)
    return draw(st.recursive(leaves, inside, max_leaves=12))


def tensors_of(content: Any) -> list[Tensor]:
    if isinstance(content, Tensor):
        return [content]
    parts = content.values() if isinstance(content, dict) else content if isinstance(content, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def sharing(content: Any) -> list[tuple[bool, int | None]]:
    """For each pair of tensors: whether they are one object, and how far apart they are in one memory, if they are."""
    return [(one is other, distance(one, other)) for one, other in itertools.combinations(tensors_of(content), 2)]


def distance(one: Tensor, other: Tensor) -> int | None:
    share = one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    return one.data_ptr() - other.data_ptr() if share and one.numel() * other.numel() > 0 else None


@settings(max_examples=20, deadline=None)
@given(checkpoints(), checkpoints())
def test_a_snapshot_is_a_copy_of_its_moment(first: Any, second: Any) -> None:
    """The copy is equal for any checkpoint and any earlier buffer, and tensors that shared memory still do."""
    buffer = Buffer()
    for content in (first, second):
        expected, taken = copy.deepcopy(content), buffer.snapshot(content)
        for tensor in tensors_of(content):
            tensor.fill_(-1)
        if isinstance(content, (list, dict)):
            content.clear()
        result = taken()
        assert same(result, expected)
        assert sharing(result) == sharing(expected)


def test_every_kind_of_tensor_is_taken() -> None:
    """The snapshot accepts what a save in the foreground accepts, and torch saves it exactly like the original."""
    original, expected = kinds() | unusual(), kinds() | unusual()
    taken = Buffer().snapshot(original)
    for name, tensor in kinds().items():
        if tensor.layout == torch.strided and name != "expanded":
            original[name].detach().zero_()
    found, wanted = as_saved(taken()), as_saved(expected)
    assert [name for name in wanted if not same(found[name], wanted[name])] == []


def as_saved(content: Any) -> Any:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def test_the_buffer_is_used_again() -> None:
    """New memory is allocated only for a snapshot that is larger than all before; views share one piece of it."""
    buffer, sizes = Buffer(), list[int]()
    for length in (1000, 1000, 10, 999, 2000, 1000, 0):
        base = numbers(length)
        content = {"a": base, "again": base, "part": base[length // 2 :], "b": numbers(length // 2)}
        assert same(buffer.snapshot(content)(), content)
        sizes.append(buffer.size)
    small, large = aligned(4000) + aligned(2000), aligned(8000) + aligned(4000)
    assert sizes == [small] * 4 + [large] * 3
