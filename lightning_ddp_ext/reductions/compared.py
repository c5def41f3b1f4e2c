"""Exchange named numbers between ranks without waiting, and detect that ranks exchange different ones.

All messages have the same length, since a process would otherwise abort, and contain the name of the number.
"""

from __future__ import annotations

import struct
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_ddp_ext.errors import DivergenceError
from lightning_ddp_ext.rank_lists import grouped, listed, ranks_in_words

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "min": torch.amin,  # keeps a NaN of any rank; gloo's result would depend on the order
    "max": torch.amax,
}

_LONGEST_NAME = 120  # bytes
_MESSAGE = struct.Struct(f"d{_LONGEST_NAME}s")


class Exchange:
    """The exchange of a number between all ranks, which starts with the object. Collective.

    Args:
        name: the name of the number, the same on every rank; empty if this rank has no further number.
        number: this rank's number.
        group: a group of all ranks for CPU tensors, which is used for nothing else.
    """

    def __init__(self, name: str, number: float, group: dist.ProcessGroup) -> None:
        rank = dist.get_rank(group)
        message = bytearray(_MESSAGE.pack(number, _shortened(name)))
        # The sum has a row for each rank: gloo gathers more slowly than it reduces.
        self._rows = torch.zeros(dist.get_world_size(group), len(message), dtype=torch.uint8, device="cpu")
        self._rows[rank] = torch.frombuffer(message, dtype=torch.uint8)
        self._work = dist.all_reduce(self._rows, group=group, async_op=True)

    def is_completed(self) -> bool:
        """Whether :meth:`numbers` does not have to wait."""
        return bool(self._work.is_completed())

    def numbers(self) -> list[float]:
        """Wait for the numbers of all ranks, and return them in rank order.

        Raises:
            DivergenceError: the ranks' names differ; every rank raises it for this exchange.
        """
        self._work.wait()
        numbers, names = zip(*_MESSAGE.iter_unpack(self._rows.numpy().tobytes()), strict=True)
        if len(set(names)) > 1:
            raise _mismatch([name.rstrip(b"\0").decode(errors="replace") for name in names])
        return list(numbers)


def _shortened(name: str) -> bytes:
    """Return the bytes of a name, or the first of them and a digest."""
    whole = name.encode()
    if len(whole) <= _LONGEST_NAME:
        return whole
    digest = f"~{zlib.crc32(whole):08x}".encode()
    return whole[: _LONGEST_NAME - len(digest)] + digest


def reduced(numbers: Sequence[float], op: str, idle_ranks: Collection[int] = ()) -> float:
    """Return the result of an op in ``OPS``, without the numbers of idle ranks unless all are idle.

    >>> reduced([1.0, 2.0, 6.0], "mean", idle_ranks=[2])
    1.5
    """
    counted = [number for rank, number in enumerate(numbers) if rank not in idle_ranks]
    return OPS[op](torch.tensor(counted or numbers, dtype=torch.float64, device="cpu")).item()


class PendingTensor(Tensor):
    """A scalar on CPU that is computed with other ranks' numbers, and an ordinary tensor from its first use on."""

    compute: Callable[[], float]

    @staticmethod
    def of(compute: Callable[[], float], dtype: torch.dtype) -> Tensor:
        """Return a tensor of which ``compute`` returns the value."""
        with torch.inference_mode(False):  # the tensor may be filled after such a block
            pending = torch.zeros((), dtype=dtype, device="cpu").as_subclass(PendingTensor)
        pending.compute = compute
        return pending

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tree_leaves((args, kwargs)):
            resolve(each)
        return func(*args, **(kwargs or {}))


def resolve(tensor: object) -> None:
    """Wait for the value of a tensor, if it is a pending one."""
    if isinstance(tensor, PendingTensor):
        value = tensor.compute()
        del tensor.compute
        tensor.__class__ = Tensor  # type: ignore[assignment] # as torch's uninitialised parameters do
        tensor.fill_(value)


def _mismatch(names: Sequence[str]) -> DivergenceError:
    """Return an error that describes how the ranks' names differ."""
    usual, _ = Counter(names).most_common(1)[0]
    usual_ranks = [rank for rank, name in enumerate(names) if name == usual]
    deviations = {rank: _deviation(name, usual) for rank, name in enumerate(names) if name != usual}
    return DivergenceError(
        "ranks logged different values with sync_dist=True: "
        f"{listed(f'{ranks_in_words(who)} {deviation}' for deviation, who in grouped(deviations))} (compared with "
        f"{ranks_in_words(usual_ranks)}); every rank must log the same names in the same "
        "order, so log them outside of code that only some ranks run, or omit sync_dist"
    )


def _deviation(name: str, usual: str) -> str:
    parts = [f"logged {name}"] * bool(name) + [f"did not log {usual}"] * bool(usual)
    return " and ".join(parts)
