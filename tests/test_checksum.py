"""Checksums of tensors change with their contents, and are compared by name."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_ddp_ext.checksum import checksum, raise_if_different
from lightning_ddp_ext.errors import DivergenceError
from lightning_ddp_ext.ranks import Ranks
from tests.harness.ranks import run_ranks
from tests.harness.training import stock_group

DTYPES = [
    torch.uint8,
    torch.int16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex128,
    torch.float8_e5m2,
]
# Elements after which the hash's weights repeat; for those of more than 32 bits, a
# multiple of that number.
CHUNK = 32 * 1024


def content(dtype: torch.dtype, size: int) -> Tensor:
    """Random bits, NaN among them."""
    data = random.Random(0).randbytes(size * torch.empty(0, dtype=dtype).element_size())
    return torch.frombuffer(bytearray(data), dtype=dtype)


@given(st.sampled_from(DTYPES), st.integers(2, 3000) | st.integers(CHUNK - 2, CHUNK + 2), st.data())
def test_every_change_changes_it(dtype: torch.dtype, size: int, data: st.DataObject) -> None:
    """A flipped bit changes the checksum, and so do two different elements that swap
    places.
    """
    elements = content(dtype, size).view(torch.uint8).view(size, -1)
    before = checksum(elements.view(dtype))
    flipped = elements.clone()
    byte = data.draw(st.integers(0, flipped.numel() - 1))
    flipped.view(-1)[byte] ^= 1 << data.draw(st.integers(0, 7))
    assert checksum(flipped.view(dtype)) != before
    one, other = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    swapped = elements.clone()
    swapped[[one, other]] = elements[[other, one]]
    is_same = torch.equal(swapped, elements)
    assert (checksum(swapped.view(dtype)) == before) == is_same


def compare_other_names(rank: int, world_size: int, directory: Path) -> str:
    """Compare equal tensors with other names on each rank; return the error."""
    named = {f"layer{rank}": torch.ones(1)}
    with stock_group(rank, world_size, directory), pytest.raises(DivergenceError) as caught:
        raise_if_different(named, Ranks(rank, world_size), when="in a test")
    return str(caught.value)


def test_equal_tensors_with_other_names_differ(tmp_path: Path) -> None:
    """Every rank raises the same error."""
    [error] = set(run_ranks(compare_other_names, 2, tmp_path))
    assert error.startswith("the ranks differ in a test: rank 1 in layer0 (differing tensors: 2)")
