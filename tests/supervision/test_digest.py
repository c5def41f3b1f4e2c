"""Digests of tensors: they tell any two contents apart, and nothing but the content counts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_ddp_ext.supervision.digest import digests

NAMES = (
    "uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128 "
    "float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
)
DTYPES = [getattr(torch, name) for name in NAMES.split() if hasattr(torch, name)]
ROW, PAGE = 1024, 32 * 1024  # words of 32 bits
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def content(dtype: torch.dtype, size: int, seed: int = 0) -> Tensor:
    """Random bits."""
    data = random.Random(seed).randbytes(size * torch.empty(0, dtype=dtype).element_size())
    return torch.frombuffer(bytearray(data), dtype=dtype) if size else torch.empty(0, dtype=dtype)


def digest(tensor: Tensor) -> int:
    (found,) = digests([tensor])
    return found


@given(st.sampled_from(DTYPES), st.integers(1, 3 * ROW), st.data())
def test_one_bit_changes_it(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    """Whichever it is, of tensors of any dtype and size."""
    tensor = content(dtype, size)
    before = digest(tensor)
    bits = tensor.view(torch.uint8)
    place = data.draw(st.integers(0, len(bits) - 1))
    bits[place] ^= 1 << data.draw(st.integers(0, 7))
    assert digest(tensor) != before


@given(st.sampled_from(DTYPES), st.integers(2, 3 * ROW), st.data())
def test_two_elements_that_change_places_change_it(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    """Unless they are the same."""
    elements = content(dtype, size).view(torch.uint8).view(size, -1)
    one, other = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    swapped = elements.clone()
    swapped[[one, other]] = elements[[other, one]]
    assert (digest(swapped) == digest(elements)) == torch.equal(swapped, elements)


def test_rows_that_change_places_change_it() -> None:
    """The same words under the same constants."""
    rows = content(torch.int32, 3 * ROW).view(3, ROW)
    assert len({digest(rows[order]) for order in ([0, 1, 2], [1, 0, 2], [2, 1, 0], [0, 2, 1])}) == 4


def test_numbers_are_compared_by_their_bits() -> None:
    """A NaN equals itself, and not one with another payload."""
    nan, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert digest(nan) == digest(nan.clone())
    assert digest(nan) != digest(other)


@given(st.sampled_from([*DTYPES, torch.bool]), st.integers(1, 40), st.integers(1, 40), st.integers(0, 5))
def test_the_way_it_lies_in_memory_makes_no_difference(
    dtype: torch.dtype, height: int, width: int, offset: int
) -> None:
    """Transposed, spread out, or beginning at any address: the same as a contiguous copy."""
    size = height * width
    memory = content(torch.uint8, size) % 2 == 1 if dtype is torch.bool else content(dtype, size)
    expected = digest(memory)
    block = memory.view(height, width)
    assert digest(block.t().contiguous().t()) == expected
    wide = torch.zeros(height, 2 * width, dtype=dtype)
    wide[:, ::2] = block
    assert digest(wide[:, ::2]) == expected
    longer = torch.zeros(offset + size, dtype=dtype)
    longer[offset:] = memory
    assert digest(longer[offset:]) == expected


def test_conjugates_are_read_as_they_would_be_written() -> None:
    """Torch only notes that such a view is to be conjugated or negated."""
    values = torch.tensor([1 + 2j, 3 - 1j])
    assert digest(values.conj()) == digest(values.conj().resolve_conj()) != digest(values)
    assert digest(values.conj().imag) == digest(values.conj().imag.resolve_neg())


@pytest.mark.parametrize("device", DEVICES)
def test_together_they_have_the_same_as_alone(device: str) -> None:
    """On every device, with sizes around those of rows and pages; an empty one has none."""
    sizes = [0, 1, ROW - 1, ROW, ROW + 1, PAGE - 1, PAGE, 0, PAGE + 1, 3, 2 * PAGE + ROW, 7]
    tensors = [content(torch.int32, size, seed) for seed, size in enumerate(sizes)] + [torch.tensor(3.0)]
    together = digests([tensor.to(device) for tensor in tensors])
    assert together == [digest(tensor) for tensor in tensors]
    assert [found == 0 for found in together] == [size == 0 for size in sizes] + [False]
    assert len(set(together)) == len(tensors) - 1
    assert digests([]) == []


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def test_the_number_of_threads_makes_no_difference() -> None:
    """Sums of integers are the same in any order."""
    tensor = content(torch.int32, 3 * PAGE)
    found = set()
    for count in (1, 2, 5):
        with threads(count):
            found.add(digest(tensor))
    assert len(found) == 1
