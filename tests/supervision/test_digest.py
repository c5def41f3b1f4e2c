"""Digests of tensors: they tell any two contents apart, and nothing but the content counts."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_ddp_ext.supervision.digest import digests

DTYPES = [torch.uint8, torch.int16, torch.bfloat16, torch.float32, torch.float64, torch.complex128, torch.float8_e5m2]
ROW, PAGE = 1024, 32 * 1024  # words of 32 bits


def content(dtype: torch.dtype, size: int, seed: int = 0) -> Tensor:
    """Random bits."""
    data = random.Random(seed).randbytes(size * torch.empty(0, dtype=dtype).element_size())
    return torch.frombuffer(bytearray(data), dtype=dtype) if size else torch.empty(0, dtype=dtype)


def digest(tensor: Tensor) -> int:
    (found,) = digests([tensor])
    return found


@settings(deadline=None)
@given(st.sampled_from(DTYPES), st.integers(1, 3 * ROW), st.data())
def test_one_bit_changes_it(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    """Whichever it is, of tensors of any dtype and size; a NaN's are compared like any others."""
    tensor = content(dtype, size)
    before = digest(tensor)
    bits = tensor.view(torch.uint8)
    place = data.draw(st.integers(0, len(bits) - 1))
    bits[place] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(tensor) != before


@settings(deadline=None)
@given(st.sampled_from(DTYPES), st.integers(2, 3 * ROW), st.data())
def test_two_elements_that_change_places_change_it(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    """Unless they are the same."""
    elements = content(dtype, size).view(torch.uint8).view(size, -1)
    one, other = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    swapped = elements.clone()
    swapped[[one, other]] = elements[[other, one]]
    assert (digest(swapped) == digest(elements)) == torch.equal(swapped, elements)


@settings(deadline=None)
@given(st.sampled_from([*DTYPES, torch.bool]), st.integers(1, 40), st.integers(1, 40), st.integers(0, 5))
def test_the_way_it_lies_in_memory_makes_no_difference(
    dtype: torch.dtype, height: int, width: int, offset: int
) -> None:
    """Transposed, spread out, or beginning at any address: the same as a contiguous copy."""
    size = height * width
    memory = content(torch.uint8, size) % 2 == 1 if dtype is torch.bool else content(dtype, size)
    block = memory.view(height, width)
    wide = torch.zeros(height, 2 * width, dtype=dtype)
    wide[:, ::2] = block
    longer = torch.zeros(offset + size, dtype=dtype)
    longer[offset:] = memory
    same = [block.t().contiguous().t(), wide[:, ::2], longer[offset:], block.conj().resolve_conj().conj()]
    assert digests(same) == [digest(memory)] * 4


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_together_they_have_the_same_as_alone(device: str) -> None:
    """On every device, with sizes around those of rows and pages; an empty one has none."""
    sizes = [0, 1, ROW - 1, ROW, ROW + 1, PAGE - 1, PAGE, 0, PAGE + 1, 3, 2 * PAGE + ROW, 7]
    tensors = [content(torch.int32, size, seed) for seed, size in enumerate(sizes)]
    together = digests([tensor.to(device) for tensor in tensors])
    assert together == [digest(tensor) for tensor in tensors]
    assert [found == 0 for found in together] == [size == 0 for size in sizes]
    assert len(set(together)) == len(tensors) - 1
