"""A snapshot is the checkpoint as it was at one moment, in memory that is used again."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_ddp_ext.checkpoint.skeleton import split
from lightning_ddp_ext.checkpoint.snapshot import Buffer, aligned
from tests.checkpoint.content import as_bytes, from_bytes, kinds, model, numbers, same

pytestmark = pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")

BASE = st.lists(st.integers(0, 20), max_size=4)


def inside(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner) | st.tuples(inner, inner)


@st.composite
def checkpoints(draw: st.DrawFn) -> Any:
    """Nested content with tensors, some of which are the same object, and some views of the same memory."""
    bases = [numbers(length) for length in draw(BASE)]
    views = [base[draw(st.integers(0, len(base))) :] for base in bases]
    leaves = st.none() | st.integers() | st.text(max_size=3)
    if bases:
        leaves = leaves | st.sampled_from(bases) | st.sampled_from(views)
    nested = st.recursive(leaves, inside, max_leaves=12)
    return draw(nested)


class Tagged(Tensor):
    """A subclass of tensors."""


def unusual() -> dict[str, Tensor]:
    leaf = numbers(100, 8).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantisation is deprecated, and strided nested tensors are in beta
        scales, zeros = torch.linspace(0.1, 1, 100).double(), torch.zeros(100, dtype=torch.long)
        return {
            "subclass": numbers(9).as_subclass(Tagged),
            "subclass with a history": (leaf * 2).as_subclass(Tagged),
            "with a history": leaf * 2,
            "nested": torch.nested.nested_tensor([numbers(3), numbers(5)]),
            "jagged": torch.nested.nested_tensor([numbers(3), numbers(5)], layout=torch.jagged),
            "quantized": torch.quantize_per_tensor(numbers(80, 100), 40.0, 3, torch.quint8),
            "per channel": torch.quantize_per_channel(leaf.detach(), scales, zeros, 0, torch.qint8),
        }


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


@settings(max_examples=50, deadline=None)
@given(checkpoints(), checkpoints())
def test_a_snapshot_is_a_copy_of_its_moment(first: Any, second: Any) -> None:
    """Whatever is in the checkpoint and the buffer, it is equal, and shares what was shared."""
    buffer = Buffer()
    for content in (first, second):
        expected, taken = copy.deepcopy(content), buffer.take(content)
        for tensor in tensors_of(content):
            tensor.fill_(-1)
        if isinstance(content, (list, dict)):
            content.clear()
        result = taken()
        assert same(result, expected)
        assert sharing(result) == sharing(expected)


@pytest.mark.parametrize("kind", list(kinds()))
def test_a_tensor_of_each_kind(kind: str) -> None:
    """It is what it was, whatever becomes of the original, and torch saves it as it would have saved that."""
    original = kinds()[kind]
    taken = Buffer().take({"x": original})
    if original.layout == torch.strided and kind != "expanded":
        original.detach().zero_()
    result, expected = taken()["x"], kinds()[kind]
    assert same(result, expected)
    assert same(from_bytes(as_bytes(result)), expected)


@pytest.mark.parametrize("kind", list(unusual()))
def test_an_unusual_tensor_is_taken_as_torch_saves_it(kind: str) -> None:
    """Subclasses, tensors with a history, nested and quantised ones: whatever a save in the foreground takes."""
    taken = from_bytes(as_bytes(Buffer().take({"x": unusual()[kind]})()))["x"]
    saved = from_bytes(as_bytes({"x": unusual()[kind]}))["x"]
    assert type(taken) is type(saved)
    assert (taken.requires_grad, taken.is_leaf, taken.layout) == (saved.requires_grad, saved.is_leaf, saved.layout)
    assert same(plain(taken), plain(saved))


def plain(tensor: Tensor) -> list[Tensor]:
    if tensor.is_nested:
        return [part.detach() for part in tensor.unbind()]
    return [(tensor.dequantize() if tensor.is_quantized else tensor).detach().as_subclass(Tensor)]


def test_what_hangs_on_a_tensor_is_kept() -> None:
    """Attributes of tensors and parameters are as in any save."""
    tagged, parameter = numbers(3), nn.Parameter(numbers(3))
    for tensor in (tagged, parameter):
        tensor.tag, tensor.other = "mine", numbers(2)  # type: ignore[attr-defined]
    taken = Buffer().take([tagged, parameter])
    tagged.other.zero_()  # type: ignore[attr-defined]
    result = taken()
    assert [(value.tag, value.other.tolist()) for value in result[:2]] == [("mine", [0.0, 1.0])] * 2
    assert type(result[1]) is nn.Parameter


@pytest.mark.parametrize("order", [1, -1])
def test_arrays_that_begin_at_one_place(order: int) -> None:
    """Tensors made from an array and from parts of it, of whatever length, are each taken whole."""
    array = np.arange(100.0)
    content = [torch.from_numpy(array), torch.from_numpy(array[:5]), torch.from_numpy(array[3:])][::order]
    expected = copy.deepcopy(content)
    taken = Buffer().take(content)
    array[:] = -1
    assert same(taken(), expected)


def test_a_module_and_an_optimizer() -> None:
    """Whole objects are taken with their tensors, and the result is of the same classes and tied as before."""
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), model())
    network[1].weight = network[0].weight
    optimizer = torch.optim.Adam(network[:2].parameters())
    network[:2](numbers(2, 3)).sum().backward()
    optimizer.step()
    expected = copy.deepcopy([network.state_dict(), optimizer.state_dict()])
    taken = Buffer().take([network, optimizer])
    for parameter in network.parameters():
        parameter.detach().zero_()
    twin, state = taken()
    assert same([twin.state_dict(), state.state_dict()], expected)
    assert twin[1].weight is twin[0].weight
    assert state.param_groups[0]["params"][0] is twin[0].weight


def test_other_objects_are_those_of_the_moment() -> None:
    """Counters and lists are pickled when the snapshot is taken, not when it is written."""
    content = {"epoch": 1, "history": [1, 2], "x": numbers(2)}
    taken = Buffer().take(content)
    content["epoch"] = 2
    content["history"].append(3)  # type: ignore[attr-defined]
    first, second = taken(), taken()
    assert same(first, {"epoch": 1, "history": [1, 2], "x": numbers(2)})
    assert first["history"] is not second["history"]


def test_what_cannot_be_pickled_raises_at_once() -> None:
    """The error comes from the snapshot, and the buffer serves the next one."""
    buffer = Buffer()
    with pytest.raises(AttributeError, match="lambda"):
        buffer.take({"x": numbers(3), "f": lambda: None})
    assert same(buffer.take(numbers(3))(), numbers(3))


def test_empty_tensors_of_any_type_are_saved() -> None:
    """Beside one another and before others: they have no memory that could be taken for another's."""
    content = [torch.empty(0, dtype=torch.uint8), numbers(3), torch.empty(0), torch.empty(0, 4, dtype=torch.int16)]
    assert same(from_bytes(as_bytes(Buffer().take(content)())), content)


def test_the_buffer_is_used_again() -> None:
    """New memory is asked for only for a snapshot that is larger than all before."""
    buffer, sizes = Buffer(), list[int]()
    for length in (1000, 1000, 10, 999, 2000, 1000, 0):
        content = {"a": numbers(length), "b": numbers(length // 2)}
        assert same(buffer.take(content)(), content)
        sizes.append(buffer.size)
    small, large = aligned(4000) + aligned(2000), aligned(8000) + aligned(4000)
    assert sizes == [small] * 4 + [large] * 3


def test_memory_is_taken_once() -> None:
    """Views and one tensor under two names share one piece."""
    base = numbers(9)
    _, storages = split({"a": base, "again": base, "part": base[3:], "other": numbers(2)})
    assert [storage.nbytes() for storage in storages] == [36, 8]


def test_nothing_of_a_sparse_tensor_is_kept() -> None:
    """Torch remembers sparse tensors until it has checked them, and forgets them afterwards."""
    Buffer().take([kinds()["coo"], kinds()["csr"]])()
    assert torch._utils._sparse_tensors_to_validate == []
