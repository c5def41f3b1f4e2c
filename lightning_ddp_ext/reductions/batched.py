"""Reduce many scalars over the ranks in one all-gather.

Each rank receives the values of all ranks, and computes the results itself. A message
also contains a digest of each value's name and op, so ranks detect that they logged
different values. Messages have the same length on all ranks, whatever they logged,
since gloo aborts a process that receives another length.
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

_DTYPES = (torch.float32, torch.float64, torch.int64)
_OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda rows: rows.mean(0),
    "sum": lambda rows: rows.sum(0),
    # amin keeps a NaN of any rank; gloo's result would depend on the order.
    "min": lambda rows: rows.amin(0),
    "max": lambda rows: rows.amax(0),
}

PER_MESSAGE = 127
"""The number of values in a message, which has 128 columns with its header."""

# Its name before torch 2.13 was all_gather_into_tensor.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Value:
    """A scalar to reduce, for which ``can_batch`` is true."""

    name: str
    op: str
    tensor: Tensor

    def __str__(self) -> str:
        return f"{self.name} ({self.op})"


@dataclass(frozen=True)
class Exchange:
    """The outcome of an exchange, which is the same on every rank.

    Attributes:
        results: the results of the first values, as many as all ranks have sent.
        needs_another: whether every rank must exchange again, because one has sent more
            values than another, or its last ones before another.
    """

    results: list[Tensor]
    needs_another: bool


def can_batch(tensor: Tensor, op: Any) -> bool:
    """Whether a tensor can be reduced together with others."""
    return tensor.ndim == 0 and tensor.dtype in _DTYPES and op in _OPS


def reduce_common(
    values: Sequence[Value],
    *,
    is_last: bool,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    idle_ranks: Collection[int] = (),
) -> Exchange:
    """Reduce the first values, as many as all ranks have.

    The results are bit-identical on every rank, if the values have the same dtype.

    Collective: every rank must call it, including a rank that has no values.

    Args:
        values: up to ``PER_MESSAGE`` values, in the same order on every rank; some
            ranks may have more.
        is_last: whether this rank has no further values.
        device: the device for messages, from which the group can send.
        group: the ranks; ``None`` for the default group.
        idle_ranks: ranks whose values do not count.

    Raises:
        DivergenceError: values at the same position differ in name or op, or a rank whose
            values are its last has fewer than another one; raised on every rank.
    """
    message = _message(values, is_last=is_last, device=device)
    received = message.new_empty(dist.get_world_size(group) * message.numel())
    _all_gather(received, message.flatten(), group=group)
    headers, rows = received.view(-1, *message.shape).unbind(1)
    are_last = headers[:, 0].bool()
    digests = headers[:, 1:]
    counts = (digests != 0).sum(1)
    common = int(counts.min())
    is_incomplete = bool((are_last & (counts < counts.max())).any())
    is_different = bool((digests[:, :common] != digests[0, :common]).any())
    if is_incomplete or is_different:
        raise _mismatch(values, group)
    needs_another = bool((counts != common).any() or (are_last != are_last[0]).any())
    return Exchange(_results(values[:common], rows[:, 1:], idle_ranks), needs_another)


def _message(values: Sequence[Value], *, is_last: bool, device: torch.device) -> Tensor:
    """Return a row that begins with ``is_last`` and has digests, and a row of values.

    A digest of 0 stands for no value. Digests and integers up to 2**53 are exact.
    """
    message = torch.zeros(2, 1 + PER_MESSAGE, dtype=torch.float64, device=device)
    message[0, 0] = float(is_last)
    if values:
        end = 1 + len(values)
        message[0, 1:end] = message.new_tensor([_digest(value) for value in values])
        message[1, 1:end] = torch.stack([value.tensor.to(message) for value in values])
    return message


def _results(values: Sequence[Value], rows: Tensor, idle_ranks: Collection[int]) -> list[Tensor]:
    """Return the results; ``rows`` has a row for each rank, a column for each value."""
    active_ranks = [rank for rank in range(len(rows)) if rank not in idle_ranks]
    rows = rows[active_ranks] if idle_ranks else rows
    by_op = {op: _OPS[op](rows) for op in {value.op for value in values}}
    return [
        by_op[value.op][column].to(value.tensor.device, _dtype_of(value))
        for column, value in enumerate(values)
    ]


def _dtype_of(value: Value) -> torch.dtype:
    """Return the dtype of a result: the value's, but float for a mean of integers."""
    is_mean_of_integers = value.op == "mean" and not value.tensor.is_floating_point()
    return torch.get_default_dtype() if is_mean_of_integers else value.tensor.dtype


def _digest(value: Value) -> int:
    """Return a positive number that differs if values must not be reduced together."""
    return 1 + zlib.crc32(str(value).encode())


def _mismatch(values: Sequence[Value], group: dist.ProcessGroup | None) -> DivergenceError:
    """Return an error that describes how the ranks differ. Collective."""
    by_rank: list[tuple[str, ...]] = [()] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, tuple(map(str, values)), group=group)
    with suppress(RuntimeError):
        # Keep the group open until all ranks have received. This rank raises the error
        # even if another one has closed its group.
        dist.barrier(group)
    return DivergenceError(
        f"ranks logged different values with sync_dist=True: {_difference(by_rank)}; every rank"
        " must log the same names in the same order, so log them outside of code that only some"
        " ranks run, or omit sync_dist"
    )


def _difference(by_rank: Sequence[tuple[str, ...]]) -> str:
    """Compare the values of each rank with those that most ranks logged."""
    usual, _ = Counter(by_rank).most_common(1)[0]
    usual_ranks = [rank for rank, names in enumerate(by_rank) if names == usual]
    deviations = {
        rank: _deviation(names, usual) for rank, names in enumerate(by_rank) if names != usual
    }
    texts = [f"{ranks_in_words(ranks)} {deviation}" for deviation, ranks in grouped(deviations)]
    return f"{listed(texts)} (compared with {ranks_in_words(usual_ranks)})"


def _deviation(names: tuple[str, ...], usual: tuple[str, ...]) -> str:
    more = Counter(names) - Counter(usual)
    less = Counter(usual) - Counter(names)
    parts = []
    if more:
        parts.append(f"logged {listed(more)}")
    if less:
        parts.append(f"did not log {listed(less)}")
    return " and ".join(parts) or f"logged in a different order: {listed(dict.fromkeys(names))}"
