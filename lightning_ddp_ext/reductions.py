"""Reduce tensors over the ranks: one now, or many scalars in one all-gather before their first use.

:func:`all_reduce` reduces one tensor. Lightning's own reduction runs a barrier first,
which this one does not need.

:func:`reduce_common` reduces many scalars. Each rank receives the values of all ranks,
and computes the results itself. A message also contains a digest of each value's name
and op, so ranks detect that they logged different values. Messages have the same length
on all ranks, whatever they logged, since gloo aborts a process that receives another
length.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from typing_extensions import override

from lightning_ddp_ext.errors import DivergenceError
from lightning_ddp_ext.nested import values_of
from lightning_ddp_ext.rank_lists import grouped, listed, ranks_in_words
from lightning_ddp_ext.ranks import is_gloo

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64)
_OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda rows: rows.mean(0),
    "sum": lambda rows: rows.sum(0),
    # amin keeps a NaN of any rank; gloo's result would depend on the order.
    "min": lambda rows: rows.amin(0),
    "max": lambda rows: rows.amax(0),
}
_PER_MESSAGE = 128  # values in a message

# Its name before torch 2.13 was all_gather_into_tensor.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def all_reduce(tensor: Tensor, group: Any = None, reduce_op: Any = "mean") -> Tensor:
    """Reduce a tensor in place, and return it.

    A mean of integers is a new tensor of floats.

    Collective: every rank of the group must call it.

    Args:
        tensor: this rank's values.
        group: the ranks; ``None`` for all.
        reduce_op: a ``ReduceOp`` or its name; "mean" is the same as "avg".
    """
    op = reduce_op
    if isinstance(reduce_op, str):
        op = getattr(ReduceOp, reduce_op.upper().replace("MEAN", "AVG"))
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    # Gloo has no AVG, and NCCL's would round integers.
    if op != ReduceOp.AVG or not (is_integer or is_gloo(tensor.device, group)):
        dist.all_reduce(tensor, op=op, group=group)
        return tensor
    if is_integer:
        tensor = tensor.to(torch.int64, copy=True)
    dist.all_reduce(tensor, group=group)
    count = dist.get_world_size(group)
    return tensor / count if is_integer else tensor.div_(count)


class Value(NamedTuple):
    """A scalar to reduce, for which ``can_batch`` is true."""

    name: str
    op: str
    tensor: Tensor

    def __str__(self) -> str:
        return f"{self.name} ({self.op})"


def can_batch(tensor: Tensor, op: Any) -> bool:
    """Whether a tensor can be reduced together with others."""
    return tensor.ndim == 0 and tensor.dtype in _DTYPES and op in _OPS


def reduce_common(
    values: Sequence[Value],
    *,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    idle_ranks: Collection[int] = (),
) -> tuple[list[Tensor], bool]:
    """Reduce the first values, as many as all ranks have and a message can hold.

    Return their results, which are bit-identical on every rank if the values have the
    same dtype, and whether every rank must call this again, because some have more
    values.

    Collective: every rank must call it, without values if it has no further ones.

    Args:
        values: this rank's values, in the same order on every rank; some ranks may have
            more.
        device: the device for messages, from which the group can send.
        group: the ranks; ``None`` for the default group.
        idle_ranks: ranks whose values do not count.

    Raises:
        DivergenceError: values at the same position differ in name or op, or a rank has
            no values and another one does; raised on every rank.
    """
    message = _message(values[:_PER_MESSAGE], device)
    received = message.new_empty(dist.get_world_size(group) * message.numel())
    _all_gather(received, message.flatten(), group=group)
    digests, rows = received.view(-1, *message.shape).unbind(1)
    common = int((digests != 0).sum(1).min())
    differ = (digests != digests[0]).any(0).tolist()
    if any(differ[: max(common, 1)]):
        raise _mismatch(values[differ.index(True) :], group)
    if idle_ranks:
        rows = rows[[rank for rank in range(len(rows)) if rank not in idle_ranks]]
    results = _results(values[:common], rows)
    return results, any(differ) or common == _PER_MESSAGE


def _message(values: Sequence[Value], device: torch.device) -> Tensor:
    """Return a row of digests and a row of values; a digest of 0 stands for no value.

    Digests and integers up to 2**53 are exact.
    """
    message = torch.zeros(2, _PER_MESSAGE, dtype=torch.float64, device=device)
    if values:
        digests = [1 + zlib.crc32(str(value).encode()) for value in values]
        message[0, : len(values)] = message.new_tensor(digests)
        message[1, : len(values)] = torch.stack([value.tensor.to(message) for value in values])
    return message


def _results(values: Sequence[Value], rows: Tensor) -> list[Tensor]:
    """Return the results; ``rows`` has a row for each rank, a column for each value."""
    by_op = {op: _OPS[op](rows) for op in {value.op for value in values}}
    return [
        by_op[value.op][column].to(value.tensor.device, _dtype_of(value))
        for column, value in enumerate(values)
    ]


def _dtype_of(value: Value) -> torch.dtype:
    """Return the dtype of a result: the value's, but float for a mean of integers."""
    is_mean_of_integers = value.op == "mean" and not value.tensor.is_floating_point()
    return torch.get_default_dtype() if is_mean_of_integers else value.tensor.dtype


def _mismatch(values: Sequence[Value], group: dist.ProcessGroup | None) -> DivergenceError:
    """Return an error that lists each rank's values. Collective."""
    by_rank: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, listed(values) or "no further value", group=group)
    with suppress(RuntimeError):
        # Keep the group open until all ranks have received. This rank raises the error
        # even if another one has closed its group.
        dist.barrier(group)
    logged = [
        f"{ranks_in_words(ranks)} logged {names}"
        for names, ranks in grouped(dict(enumerate(by_rank)))
    ]
    return DivergenceError(
        f"ranks logged different values with sync_dist=True: {listed(logged, '; ')}; every rank"
        " must log the same names in the same order, so log them outside of code that only some"
        " ranks run, or omit sync_dist"
    )


class PendingTensor(Tensor):
    """A view of a value's tensor, which is not reduced yet.

    Any operation on it first calls ``reduce_now``, which must call :meth:`settle`. From
    then on it is an ordinary tensor.
    """

    value: Value
    reduce_now: Callable[[], object]

    @staticmethod
    def of(value: Value, reduce_now: Callable[[], object]) -> PendingTensor:
        """Return a view for the readers of a value."""
        pending = value.tensor.as_subclass(PendingTensor)
        pending.value = value
        pending.reduce_now = reduce_now
        return pending

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in values_of((args, kwargs)):
            if isinstance(value, PendingTensor):
                value.reduce_now()
        return func(*args, **(kwargs or {}))

    def settle(self, result: Tensor | float) -> None:
        """Make this an ordinary tensor with the result."""
        with torch.inference_mode():  # as the value may have been logged in it
            self.value.tensor.fill_(result)
        vars(self).clear()
        self.__class__ = Tensor  # type: ignore[assignment] # as torch's uninitialised parameters do
