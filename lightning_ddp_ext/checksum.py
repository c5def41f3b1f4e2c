"""Compare tensors between ranks by checksums, computed on each tensor's device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from statistics import mode
from zlib import crc32

import torch
from torch import Tensor

from lightning_ddp_ext.errors import DivergenceError
from lightning_ddp_ext.rank_lists import ranks_in_words
from lightning_ddp_ext.ranks import Ranks

# multiplier of Knuth's MMIX generator; odd, so no bit of an earlier chunk is lost
_FACTOR = 0x5851F42D4C957F2D
# By element size in bytes; wider elements consist of 32-bit words.
_WORDS = {
    1: torch.uint8,
    2: torch.int16,
}


def raise_if_different(tensors: Mapping[str, Tensor], ranks: Ranks, *, when: str) -> None:
    """Compare the tensors of all ranks by checksums of their bits.

    Names are compared, but not shapes: ``zeros(4)`` equals ``zeros(2, 2)``. The tensors of
    all ranks must be on the same type of device. Collective: every rank must call it.

    The ranks first exchange one number. They exchange all checksums only if this number
    differs.

    Raises:
        DivergenceError: tensors differ; the message names the first of them.
        RankFailedError: another rank failed.
    """
    sums = {name: checksum(tensor) for name, tensor in tensors.items()}
    numbers = {name: int(each) for name, each in sums.items()}  # int() waits for the device
    names = sorted(numbers)
    hash_of_names = crc32("\n".join(names).encode())
    summary = int(checksum(torch.tensor([hash_of_names, *(numbers[name] for name in names)])))
    if len(set(ranks.gather(summary))) > 1:
        raise _difference(ranks.gather(numbers), when)


def _difference(by_rank: Sequence[Mapping[str, int]], when: str) -> DivergenceError:
    """Return an error that names the first tensor whose checksums differ.

    See :class:`DivergenceError` for the ranks that it blames.
    """
    every_name = dict.fromkeys(name for numbers in by_rank for name in numbers)
    by_name = {name: [numbers.get(name) for numbers in by_rank] for name in every_name}
    names = tuple(name for name, numbers in by_name.items() if len(set(numbers)) > 1)
    numbers_of_first = by_name[names[0]]
    usual = mode(numbers_of_first)
    ranks = tuple(rank for rank, number in enumerate(numbers_of_first) if number != usual)
    return DivergenceError(
        f"the ranks differ {when}: {ranks_in_words(ranks)} in {names[0]} (differing tensors:"
        f" {len(names)}); look for code that only some ranks run, or that depends on a rank's own"
        " data or random numbers",
        ranks=ranks,
        names=names,
    )


def checksum(tensor: Tensor) -> Tensor:
    """Return a checksum of a dense tensor's bits, independent of its memory layout.

    This is a multilinear hash (Lemire and Kaser, 2014): the sum of words times random
    odd weights, modulo 2**64. A word has 32 bits, or those of a smaller element. The
    weights repeat in each chunk, and the sums of the chunks are the coefficients of a
    polynomial in ``_FACTOR``.
    """
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # flatten() may leave a stride that view(dtype) refuses.
    elements = plain.as_strided((plain.numel(),), (1,))
    weights = _weights(tensor.device)
    words_per_element = max(1, tensor.element_size() // 4)
    result = torch.full((), tensor.numel(), dtype=torch.int64, device=tensor.device)
    for chunk in elements.split(len(weights) // words_per_element):
        words = chunk.view(_WORDS.get(chunk.element_size(), torch.int32))
        result = result * _FACTOR + (words * weights[: len(words)]).sum()
    return result


@cache
def _weights(device: torch.device) -> Tensor:
    # On a CPU, 0.5 MiB of weights and products fit into the cache.
    size = 1 << 15 if device.type == "cpu" else 1 << 20
    generator = torch.Generator().manual_seed(0)  # the same weights on all ranks
    return (torch.randint(-(1 << 63), (1 << 63) - 1, (size,), generator=generator) | 1).to(device)
