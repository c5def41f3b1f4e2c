"""Compute an eight-byte digest of the bits of each tensor, on the tensor's own device.

Rows of 1,024 32-bit words are multiplied by odd 64-bit constants, one for each column, and added up with wraparound:
multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is fast", 2014). Each sum is mixed with the
row's number, and a tensor's sums are added up. Integer sums do not depend on the number of threads or the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

_COLUMNS = 1024
_PAGE_ON_CPU = 1 << 15  # words that are multiplied at a time: so few that the allocator reuses their memory
_PAGE_ELSEWHERE = 1 << 22
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # the increment of SplitMix64
_FINALISER = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1))  # shift, factor


def digests(tensors: Sequence[Tensor]) -> list[int]:
    """Return a digest of each tensor's elements, whatever their dtype and layout in memory.

    A flipped bit or two swapped elements change it; equal bits, NaN or not, have equal digests on every device. Two
    tensors that differ otherwise share a digest with a probability of about 1 in 2**32. An empty tensor's digest is 0.
    Memory: a page of 256 KiB on CPU, of 32 MiB elsewhere, and a copy of a tensor that is not contiguous.

    >>> one, other, empty = digests([torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0]), torch.tensor([])])
    >>> one == other, empty
    (False, 0)
    """
    found = [_digest(_words(tensor)) for tensor in tensors]
    return [int(digest) for digest in found]  # a device has computed all by then


def _words(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A flattened view would keep the stride of a single element, and then cannot be viewed as bytes.
    data = _padded(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8), 4)
    return (data.clone() if data.storage_offset() % 4 else data).view(torch.int32)


def _digest(words: Tensor) -> Tensor:
    page_size = _PAGE_ON_CPU if words.device.type == "cpu" else _PAGE_ELSEWHERE
    pages = [_padded(page, _COLUMNS).view(-1, _COLUMNS) for page in words.split(page_size)]
    row_sums = torch.cat([page.to(torch.int64).mul_(_constants(words.device)).sum(1) for page in pages])
    return _mix(row_sums + torch.arange(1, len(row_sums) + 1, device=words.device) * _GOLDEN).sum()


@cache
def _constants(device: torch.device) -> Tensor:
    return (_mix(torch.arange(1, _COLUMNS + 1) * _GOLDEN) | 1).to(device)


def _mix(values: Tensor) -> Tensor:
    """SplitMix64's finaliser: each bit depends on all bits of the value, and no two values become the same."""
    for shift, factor in _FINALISER:
        values = (values ^ ((values >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return values


def _padded(values: Tensor, multiple: int) -> Tensor:
    missing = -len(values) % multiple
    return pad(values, (0, missing)) if missing else values
