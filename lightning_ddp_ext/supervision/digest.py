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
    found = [0] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        indices = [index for index, tensor in enumerate(tensors) if tensor.device == device]
        row_sums = [_row_sums(_words(tensors[index])) for index in indices]
        for index, digest in zip(indices, _combine(row_sums), strict=True):
            found[index] = digest
    return found


def _words(tensor: Tensor) -> Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A flattened view would keep the stride of a single element, and then cannot be viewed as bytes.
    data = _padded(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8), 4)
    return (data.clone() if data.storage_offset() % 4 else data).view(torch.int32)


def _row_sums(words: Tensor) -> Tensor:
    page_size = _PAGE_ON_CPU if words.device.type == "cpu" else _PAGE_ELSEWHERE
    rows = [_padded(page, _COLUMNS).view(-1, _COLUMNS) for page in words.split(page_size)]
    return torch.cat([each.to(torch.int64).mul_(_constants(words.device)).sum(1) for each in rows])


def _combine(row_sums: Sequence[Tensor]) -> list[int]:
    counts = [len(sums) for sums in row_sums]
    sums = torch.cat(list(row_sums))
    numbers = torch.cat([torch.arange(1, count + 1) for count in counts])
    owners = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    mixed = _mix(sums + numbers.to(sums.device) * _GOLDEN)
    return sums.new_zeros(len(counts)).index_add_(0, owners.to(sums.device), mixed).tolist()


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
