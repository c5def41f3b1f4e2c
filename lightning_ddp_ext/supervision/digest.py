"""Which bits are in these tensors, in eight bytes each?

Tensors are read where they are, as 32-bit words. Rows of 1,024 words are multiplied by odd 64-bit constants, one for
each column, and added up with wraparound: multilinear hashing (Lemire and Kaser, "Strongly universal string hashing is
fast", 2014). What comes out is mixed with the row's number and added up for each tensor. Integers alone are added, so
neither the number of threads nor the device makes a difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

_COLUMNS = 1024
_ROWS = {"cpu": 256}  # a page of these fits into a CPU's cache
_ROWS_ELSEWHERE = 4096
_GOLDEN = 0x9E3779B97F4A7C15  # the increment of SplitMix64
_FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))  # its finaliser: shift, multiply


def digests(tensors: Sequence[Tensor]) -> list[int]:
    """Fingerprints of the elements' bits, of any dtype, in whatever way they lie in memory.

    One bit that flips, or two elements that change places, change it; all bits equal, NaN or not, are the same one on
    every device. Two tensors that differ otherwise have the same one by a chance of about 1 in 2**32. Neither dtype nor
    shape is in it. Memory: a page of 2 MiB on CPU, of 32 MiB elsewhere, and a copy of one tensor at a time if it is not
    contiguous.

    Returns:
        for each tensor a number from -2**63 to 2**63 - 1; 0 for an empty one.

    >>> one, other, empty = digests([torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0]), torch.tensor([])])
    >>> one == other, empty
    (False, 0)
    >>> digests([torch.tensor(0.0)]) == digests([torch.tensor(-0.0)])
    False
    """
    found = [0] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        places = [place for place, tensor in enumerate(tensors) if tensor.device == device]
        for place, digest in zip(places, _digests_on(device, [tensors[place] for place in places]), strict=True):
            found[place] = digest
    return found


def bytes_of(tensor: Tensor) -> Tensor:
    """The elements as bytes, flat; the tensor's own memory if it is contiguous."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A view would keep the stride of a single element, and then has no bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


@torch.no_grad()
def _digests_on(device: torch.device, tensors: list[Tensor]) -> list[int]:
    rows = [_rows_of(tensor) for tensor in tensors]
    if not sum(rows):
        return [0] * len(tensors)
    sums = torch.cat([_row_sums(page) for page in _pages(device, tensors, sum(rows))])
    counts = torch.tensor(rows)
    owners = torch.arange(len(rows)).repeat_interleave(counts)
    numbers = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners] + 1
    mixed = _mix(sums + numbers.to(device) * _signed(_GOLDEN))
    return sums.new_zeros(len(rows)).index_add_(0, owners.to(device), mixed).tolist()


def _rows_of(tensor: Tensor) -> int:
    return math.ceil(tensor.numel() * tensor.element_size() / (4 * _COLUMNS))


def _pages(device: torch.device, tensors: list[Tensor], rows: int) -> Iterator[Tensor]:
    """The words of all tensors, each from a new row on; the same memory every time."""
    page = torch.empty(min(rows, _ROWS.get(device.type, _ROWS_ELSEWHERE)), _COLUMNS, dtype=torch.int64, device=device)
    flat, used = page.view(-1), 0
    for tensor in tensors:
        words, done = _words_of(tensor), 0
        while done < len(words):
            end = min(used + len(words) - done, len(flat))
            flat[used:end].copy_(words[done : done + end - used])
            done += end - used
            used = math.ceil(end / _COLUMNS) * _COLUMNS
            flat[end:used].zero_()
            if used == len(flat):
                yield page
                used = 0
    if used:
        yield page[: used // _COLUMNS]


def _words_of(tensor: Tensor) -> Tensor:
    data = bytes_of(tensor)
    if len(data) % 4 or data.storage_offset() % 4:
        padded = data.new_zeros(math.ceil(len(data) / 4) * 4)
        padded[: len(data)] = data
        data = padded
    return data.view(torch.int32)


def _row_sums(page: Tensor) -> Tensor:
    return page.mul_(_constants(page.device)).sum(1)


@cache
def _constants(device: torch.device) -> Tensor:
    return (_mix(torch.arange(1, _COLUMNS + 1) * _signed(_GOLDEN)) | 1).to(device)


def _mix(values: Tensor) -> Tensor:
    """The finaliser of SplitMix64: every bit of a value depends on all of them, and no two become the same."""
    for shift, factor in _FACTORS:
        values = (values ^ ((values >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return values


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number
