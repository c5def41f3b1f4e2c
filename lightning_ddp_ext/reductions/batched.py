"""Reduce many scalars over the ranks in one all-gather; each rank computes the results itself.

All messages have the same length, since a process would otherwise abort, and contain a digest of each value's name, op
and dtype, so ranks can detect that they logged different values.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.errors import DivergenceError
from lightning_ddp_ext.rank_lists import grouped, listed, ranks_in_words

DTYPES = (torch.float32, torch.float64, torch.int64)
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda rows: rows.mean(0),
    "sum": lambda rows: rows.sum(0),
    "min": lambda rows: rows.amin(0),  # keeps a NaN of any rank; gloo's result would depend on the order
    "max": lambda rows: rows.amax(0),
}

PER_MESSAGE = 128
"""The number of values in a message."""


@dataclass(frozen=True)
class Value:
    """A scalar to reduce: its op is one of ``OPS``, and its dtype one of ``DTYPES``."""

    name: str
    op: str
    tensor: Tensor

    def __str__(self) -> str:
        return f"{self.name} ({self.op})"


def reduce_batch(values: Sequence[Value], *, device: torch.device, idle_ranks: Collection[int] = ()) -> list[Tensor]:
    """Reduce values over all ranks; the results are bit-identical on every rank.

    Collective: every rank must call it, including a rank that has no values.

    Args:
        values: values with the same names, ops and dtypes on every rank, in the same order.
        device: the device for messages, from which the default group can send.
        idle_ranks: ranks whose values do not count.

    Raises:
        DivergenceError: the ranks' values differ in name, op, dtype or order; raised on every rank.
    """
    results: list[Tensor] = []
    for start in range(0, len(values) + 1, PER_MESSAGE):  # the last message has free places, to detect further values
        sent = values[start : start + PER_MESSAGE]
        digests, rows = _exchange(sent, device)
        if bool((digests != digests[0]).any()):
            raise _mismatch(values)
        results += _results(sent, rows, idle_ranks)
    return results


def reduce_common(values: Sequence[Value], *, device: torch.device, idle_ranks: Collection[int] = ()) -> list[Tensor]:
    """Reduce the first values, as many as all ranks have, and return their results. Collective.

    Args:
        values: 1 to ``PER_MESSAGE`` values, in the same order on every rank; some ranks may have more than others.
        device: see :func:`reduce_batch`.
        idle_ranks: see :func:`reduce_batch`.

    Raises:
        DivergenceError: values at the same position differ in name, op or dtype; raised on every rank.
    """
    digests, rows = _exchange(values, device)
    common = int((digests != 0).all(0).sum())
    if not common or bool((digests[:, :common] != digests[0, :common]).any()):
        raise _mismatch(values[: max(1, common)])
    return _results(values[:common], rows, idle_ranks)


def _results(values: Sequence[Value], rows: Tensor, idle_ranks: Collection[int]) -> list[Tensor]:
    """Return the results; ``rows`` has a row for each rank and a column for each value."""
    if idle_ranks:
        rows = rows[[rank for rank in range(len(rows)) if rank not in idle_ranks]]
    by_op = {op: OPS[op](rows) for op in {value.op for value in values}}
    return [by_op[value.op][column].to(value.tensor.device, _dtype_of(value)) for column, value in enumerate(values)]


def _dtype_of(value: Value) -> torch.dtype:
    """Return the dtype of a result: the value's dtype, but float for a mean of integers, as in ``all_reduce``."""
    is_float = value.op == "mean" and not value.tensor.is_floating_point()
    return torch.get_default_dtype() if is_float else value.tensor.dtype


def _exchange(values: Sequence[Value], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the digests and values of all ranks, a row for each rank; digests of missing values are 0. Collective."""
    own = torch.zeros(2, PER_MESSAGE, dtype=torch.float64, device=device)
    if values:
        own[0, : len(values)] = own.new_tensor([_digest(value) for value in values])
        own[1, : len(values)] = torch.stack([value.tensor.to(own) for value in values])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    received = own.new_empty(dist.get_world_size() * own.numel())
    gather(received, own.flatten())
    digests, rows = received.view(-1, 2, PER_MESSAGE).unbind(1)
    return digests, rows


def _digest(value: Value) -> int:
    """Return a positive number that differs between values that must not be reduced together."""
    return 1 + zlib.crc32(f"{value} {value.tensor.dtype}".encode())


def _mismatch(values: Sequence[Value]) -> DivergenceError:
    """Return an error that describes how the ranks differ. Collective."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, tuple(map(str, values)))
    with suppress(RuntimeError):  # this rank raises the error even if another one has closed its group
        dist.barrier()
    usual, _ = Counter(by_rank).most_common(1)[0]
    usual_ranks = [rank for rank, names in enumerate(by_rank) if names == usual]
    deviations = {rank: _deviation(names, usual) for rank, names in enumerate(by_rank) if names != usual}
    return DivergenceError(
        "ranks logged different values with sync_dist=True: "
        f"{listed(f'{ranks_in_words(who)} {deviation}' for deviation, who in grouped(deviations))} (compared with "
        f"{ranks_in_words(usual_ranks)}); every rank must log the same names in the same "
        "order, so log them outside of code that only some ranks run, or omit sync_dist"
    )


def _deviation(names: tuple[str, ...], usual: tuple[str, ...]) -> str:
    more, less = Counter(names) - Counter(usual), Counter(usual) - Counter(names)
    parts = [f"logged {listed(more)}"] * bool(more) + [f"did not log {listed(less)}"] * bool(less)
    return " and ".join(parts) or f"logged in a different order: {listed(dict.fromkeys(names))}"
