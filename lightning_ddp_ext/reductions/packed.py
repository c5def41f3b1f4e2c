"""Many single values reduced over the ranks together: one all-gather, and each rank does the arithmetic by itself.

A message has a length that all ranks know beforehand, whatever they have to send: how many values a rank has, and a
digest of each one's name. So ranks that have logged different values find that out from what they receive, where
messages of different lengths would end in an abort or a wait without end.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.errors import LogMismatchError

OPS = ("mean", "sum", "min", "max")
DTYPES = (torch.float32, torch.float64, torch.int64)

_NAMED = 8
_CAPACITY = 16  # values in a message, until some rank has more


@dataclass
class Value:
    """A scalar that is to be reduced; its tensor gets the result, or is replaced where that is of another type."""

    name: str
    op: str
    """One of ``OPS``."""
    tensor: Tensor
    """Of one of ``DTYPES``. float64 carries each of them, counts up to 2 ** 53."""

    @property
    def digest(self) -> int:
        """A number that tells values apart which must not be reduced together."""
        return _crc(f"{self.name} {self.op} {self.tensor.dtype}")

    def settle(self, result: Tensor) -> None:
        """Take the result."""
        if result.dtype == self.tensor.dtype:
            self.tensor.copy_(result)
        else:
            self.tensor = result


class _Header(NamedTuple):
    where: int
    values: int
    """How many wait."""
    is_end: int


class _Logged(NamedTuple):
    where: str
    names: tuple[str, ...]
    waiting: tuple[str, ...]
    """Those of them that are not reduced yet."""


class Packed:
    """The values of this rank that wait for those of the others.

    A rank that must know its values now exchanges what it has; the others may have more by then, or less. Each goes on
    until its own are done, and at the end of a step until all ranks are at its end.

    Attributes:
        where: what this rank is doing, for errors.
        names: of all values since it began that.
    """

    def __init__(self) -> None:
        self.where = ""
        self.names: list[str] = []
        self._waiting: list[Value] = []
        self._has_any = False
        self._capacity = _CAPACITY

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, where: str) -> None:
        """This rank begins something whose values belong together; what an error has left behind is dropped."""
        self.where = where
        self.names.clear()
        self._waiting.clear()
        self._has_any = False

    def add(self, value: Value) -> None:
        """Keep a value for the next exchange."""
        self._waiting.append(value)
        self.names.append(f"{value.name} ({value.op})")

    def reduce(self, *, is_end: bool, device: torch.device, group: Any = None, absent: tuple[int, ...] = ()) -> bool:
        """Give all values that wait their results. Collective: every rank of the group must call it.

        Args:
            is_end: whether this rank adds no more before it begins something else; then all ranks must be there.
            device: of all values.
            group: the ranks; ``None`` for all.
            absent: those whose values do not count.

        Returns:
            Whether any rank has had a value since it began this.

        Raises:
            LogMismatchError: ranks have different values; on every rank.
        """
        while True:
            headers, digests, values = self._exchange(is_end, device, group)
            counts = [header.values for header in headers]
            shared = min(*counts, self._capacity)
            if not _agree(headers) or not _is_same_on_all(digests[:, :shared]):
                raise self._mismatch(group)
            self._has_any |= max(counts) > 0
            self._settle(values[:, :shared], absent)
            self._capacity = max(self._capacity, 1 << (max(counts) - 1).bit_length())
            is_over = max(counts) == shared and all(header.is_end for header in headers)
            if not self._waiting and (is_over or not is_end):
                return self._has_any

    def _exchange(self, is_end: bool, device: torch.device, group: Any) -> tuple[list[_Header], Tensor, Tensor]:
        """Headers, digests and values of all ranks, by rank: (ranks, capacity) each of the latter two."""
        sent = self._waiting[: self._capacity]
        width = len(_Header._fields)
        first = width + self._capacity
        message = torch.zeros(first + self._capacity, dtype=torch.float64, device=device)
        header = _Header(_crc(self.where), len(self._waiting), is_end)
        numbers = [*header, *(value.digest for value in sent)]
        message[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64, device=device)
        if sent:
            message[first : first + len(sent)] = torch.stack([value.tensor.double() for value in sent])
        received = _all_gather(message, group)
        told = received[:, :first].cpu()
        return [_Header(*header) for header in told[:, :width].long().tolist()], told[:, width:], received[:, first:]

    def _settle(self, rows: Tensor, absent: tuple[int, ...]) -> None:
        """Reduce the first values that wait, and let them go: (ranks, values)."""
        settled = self._waiting[: rows.shape[1]]
        del self._waiting[: rows.shape[1]]
        if absent:
            rows = rows[[rank for rank in range(len(rows)) if rank not in absent]]
        alike: dict[tuple[str, torch.dtype], list[int]] = {}
        for index, value in enumerate(settled):
            alike.setdefault((value.op, value.tensor.dtype), []).append(index)
        for (op, dtype), indices in alike.items():
            columns = rows if len(indices) == len(settled) else rows[:, indices]
            for index, result in zip(indices, reduce_rows(columns.to(dtype), op).unbind(), strict=True):
                settled[index].settle(result)

    def _mismatch(self, group: Any) -> LogMismatchError:
        found: list[Any] = [None] * dist.get_world_size(group)
        waiting = tuple(value.name for value in self._waiting)
        dist.all_gather_object(found, _Logged(self.where, tuple(self.names), waiting), group=group)
        with suppress(RuntimeError):  # a rank that closes its group must not keep this one from knowing
            dist.barrier(group=group)
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        return LogMismatchError(
            f"ranks have logged different values with sync_dist=True: {_difference(ranks, found)}; every rank must log "
            "the same names in the same order, so log them outside of what only some ranks do, or leave sync_dist out"
        )


def reduce_rows(rows: Tensor, op: str) -> Tensor:
    """Reduce the values of all ranks, (ranks, values), to (values); the same on every rank to the last bit.

    The order of a sum is that in which gloo's all-reduce adds single values up. NaN on any rank is the result's, where
    a minimum or maximum of gloo keeps it or not, as the ranks happen to be ordered. A mean of integers is a float.
    """
    if op == "min":
        return rows.amin(0)
    if op == "max":
        return rows.amax(0)
    total = rows[-1].clone()
    for row in reversed(rows[:-1].unbind()):
        total += row
    return total if op == "sum" else total / len(rows)


def _all_gather(message: Tensor, group: Any) -> Tensor:
    """The messages of all ranks, by rank."""
    world_size = dist.get_world_size(group)
    if message.device.type == "cpu" or "nccl" in str(dist.get_backend(group)):
        received = message.new_empty(world_size * len(message))
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before torch 2.13
        gather(received, message, group=group)
        return received.view(world_size, -1)
    pieces = [torch.empty_like(message) for _ in range(world_size)]
    dist.all_gather(pieces, message, group=group)
    return torch.stack(pieces)


def _agree(headers: list[_Header]) -> bool:
    """Whether ranks are in the same place, and none of them is at its end with fewer values than another one."""
    most = max(header.values for header in headers)
    return all(header.where == headers[0].where and (header.values == most or not header.is_end) for header in headers)


def _is_same_on_all(digests: Tensor) -> bool:
    return bool((digests == digests[0]).all())


@cache
def _crc(text: str) -> int:
    return zlib.crc32(text.encode())


def _difference(ranks: list[int], found: list[_Logged]) -> str:
    """What sets ranks apart from what most of them do, or from the first one where there is no majority."""
    usual, _ = Counter(found).most_common(1)[0]
    usual_ranks = [rank for rank, own in zip(ranks, found, strict=True) if own == usual]
    told = [_deviation(rank, own, usual) for rank, own in zip(ranks, found, strict=True) if own != usual]
    return f"{_listed(told)} (as compared with rank{'s' * (len(usual_ranks) > 1)} {_listed(map(str, usual_ranks))})"


def _deviation(rank: int, own: _Logged, usual: _Logged) -> str:
    if own.where != usual.where:
        return (
            f"rank {rank} has {_listed(own.waiting) or 'nothing'} to reduce in {own.where}, and not "
            f"{_listed(usual.waiting) or 'nothing'} in {usual.where}"
        )
    more, less = Counter(own.names) - Counter(usual.names), Counter(usual.names) - Counter(own.names)
    told = [f"logged {_listed(more)}"] * bool(more) + [f"did not log {_listed(less)}"] * bool(less)
    return f"rank {rank} {' and '.join(told) or f'logged in another order: {_listed(own.names)}'}"


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:_NAMED]) + (", ..." if len(names) > _NAMED else "")
