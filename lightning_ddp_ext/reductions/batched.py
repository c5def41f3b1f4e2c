"""Reduce many scalars over the ranks in one all-gather; each rank computes the results itself.

The messages of all ranks have the same length and begin with a digest of the names. So ranks
that logged different values detect that, while messages of different lengths would abort a process.
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
    "min": lambda rows: rows.amin(0),  # keeps a NaN of any rank; gloo's depends on the order of the ranks
    "max": lambda rows: rows.amax(0),
}

_LENGTH = 256  # numbers in a message
MOST_COMMON = _LENGTH // 2
"""How many values ``reduce_common`` takes."""


@dataclass(frozen=True)
class Value:
    """A scalar that is to be reduced: its op is one of ``OPS``, and its dtype one of ``DTYPES``."""

    name: str
    op: str
    tensor: Tensor

    def __str__(self) -> str:
        return f"{self.name} ({self.op})"


def reduce_batch(values: Sequence[Value], *, device: torch.device, idle_ranks: Collection[int] = ()) -> list[Tensor]:
    """Reduce values over all ranks, to results that are the same on every rank to the last bit.

    Collective: every rank must call it, including ranks without any value.

    Args:
        values: the same on every rank, in the same order.
        device: for the messages, one that the default group can send from.
        idle_ranks: ranks whose values do not count.

    Raises:
        DivergenceError: ranks have different values; on every rank.
    """
    numbers = [torch.tensor(_digest(values)), *(value.tensor for value in values)]
    own = torch.zeros(max(_LENGTH, len(numbers)), dtype=torch.float64, device=device)
    own[: len(numbers)] = torch.stack([number.to(own) for number in numbers])
    received = _all_gather(own[:_LENGTH])
    if bool((received[:, 0] != received[0, 0]).any()):
        raise _mismatch(values)
    if len(own) > _LENGTH:
        received = torch.cat([received, _all_gather(own[_LENGTH:])], dim=1)
    return _results(values, received[:, 1:], idle_ranks)


def reduce_common(values: Sequence[Value], *, device: torch.device, idle_ranks: Collection[int] = ()) -> list[Tensor]:
    """Reduce the first values, as many as every rank has, and return their results.

    Args:
        values: 1 to ``MOST_COMMON``, in the same order on every rank; some ranks may have more than others.
        device: see :func:`reduce_batch`.
        idle_ranks: see :func:`reduce_batch`.

    Raises:
        DivergenceError: ranks have different values in one place; on every rank.
    """
    own = torch.zeros(2, MOST_COMMON, dtype=torch.float64, device=device)
    own[0, : len(values)] = own.new_tensor([1 + _digest([value]) for value in values])  # 0: no value
    own[1, : len(values)] = torch.stack([value.tensor.to(own) for value in values])
    digests, rows = _all_gather(own.flatten()).view(-1, 2, MOST_COMMON).unbind(1)
    common = int((digests != 0).all(0).sum())
    if not common or bool((digests[:, :common] != digests[0, :common]).any()):
        raise _mismatch(values[: max(1, common)])
    return _results(values[:common], rows, idle_ranks)


def _results(values: Sequence[Value], rows: Tensor, idle_ranks: Collection[int]) -> list[Tensor]:
    """Return the results of values; ``rows`` has a row for each rank and a column for each value."""
    if idle_ranks:
        rows = rows[[rank for rank in range(len(rows)) if rank not in idle_ranks]]
    by_op = {op: OPS[op](rows) for op in {value.op for value in values}}
    return [by_op[value.op][column].to(value.tensor.device, _dtype_of(value)) for column, value in enumerate(values)]


def _dtype_of(value: Value) -> torch.dtype:
    """Return the type of a result: the value's, but float for a mean of integers, as in ``all_reduce``."""
    is_float = value.op == "mean" and not value.tensor.is_floating_point()
    return torch.get_default_dtype() if is_float else value.tensor.dtype


def _digest(values: Sequence[Value]) -> int:
    """Return a digest that differs if values must not be reduced together."""
    return zlib.crc32("\n".join(f"{value} {value.tensor.dtype}" for value in values).encode())


def _all_gather(message: Tensor) -> Tensor:
    """Return the messages of all ranks, by rank."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
    received = message.new_empty(dist.get_world_size() * len(message))
    gather(received, message)
    return received.view(-1, len(message))


def _mismatch(values: Sequence[Value]) -> DivergenceError:
    """Return an error that describes how the ranks differ. Collective."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, tuple(map(str, values)))
    with suppress(RuntimeError):  # this rank also raises the error if another one closed its group
        dist.barrier()
    usual, _ = Counter(by_rank).most_common(1)[0]
    usual_ranks = [rank for rank, names in enumerate(by_rank) if names == usual]
    deviations = {rank: _deviation(names, usual) for rank, names in enumerate(by_rank) if names != usual}
    return DivergenceError(
        "ranks logged different values with sync_dist=True: "
        f"{listed(f'{ranks_in_words(who)} {deviation}' for deviation, who in grouped(deviations))} (compared with "
        f"{ranks_in_words(usual_ranks)}); every rank must log the same names in the same "
        "order, so log them outside of code that only some ranks run, or leave sync_dist out"
    )


def _deviation(names: tuple[str, ...], usual: tuple[str, ...]) -> str:
    more, less = Counter(names) - Counter(usual), Counter(usual) - Counter(names)
    parts = [f"logged {listed(more)}"] * bool(more) + [f"did not log {listed(less)}"] * bool(less)
    return " and ".join(parts) or f"logged in a different order: {listed(dict.fromkeys(names))}"
