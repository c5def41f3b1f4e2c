"""Checksums of tensors distinguish any two contents."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_ddp_ext.checksum import checksum

DTYPES = [
    torch.uint8,
    torch.int16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex128,
    torch.float8_e5m2,
]
CHUNK = 32 * 1024  # words


def content(dtype: torch.dtype, size: int) -> Tensor:
    """Random bits, NaN among them."""
    data = random.Random(0).randbytes(size * torch.empty(0, dtype=dtype).element_size())
    return torch.frombuffer(bytearray(data), dtype=dtype)


@settings(deadline=None)
@given(st.sampled_from(DTYPES), st.integers(2, 3000) | st.integers(CHUNK - 2, CHUNK + 2), st.data())
def test_every_change_changes_it(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    """A flipped bit of any element changes the checksum, and so do two different
    elements that swap places.
    """
    elements = content(dtype, size).view(torch.uint8).view(size, -1)
    before = checksum(elements.view(dtype))
    one, other = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    swapped = elements.clone()
    flipped = elements.clone()
    swapped[[one, other]] = elements[[other, one]]
    flipped[one, -1] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(flipped.view(dtype)) != before
    assert (checksum(swapped.view(dtype)) == before) == torch.equal(swapped, elements)
