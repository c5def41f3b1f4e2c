"""Exchange scalars between the ranks, and reduce as many as all of them have sent.

In an **exchange**, each rank sends its values in one message, receives the messages of
all ranks, and computes the results itself. Messages have the same length on all ranks,
whatever they contain, since gloo aborts a process that receives another length.

A rank may send more values than another one. Only the first values are reduced, as many
as every rank has sent, and the ranks then exchange again. A rank that sends no values has
none left, so the others must not have any either.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.errors import DivergenceError
from lightning_ddp_ext.rank_lists import grouped, listed, ranks_in_words
from lightning_ddp_ext.ranks import is_gloo
from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.supervision.stacks import call_site

from .strategy_ranks import check_received

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


class Value(NamedTuple):
    """A scalar to reduce, and one of the names in ``_OPS``."""

    name: str
    op: str
    tensor: Tensor

    def __str__(self) -> str:
        return f"{self.name} ({self.op})"


class Exchanged(NamedTuple):
    """The outcome of an exchange, which has the same length on every rank.

    Attributes:
        results: the reduced values, in the order of the values. They are bit-identical on
            every rank if the values have the same dtype.
        needs_another: whether every rank must exchange again, because some have more values.
    """

    results: list[Tensor]
    needs_another: bool


def exchange(
    values: Sequence[Value],
    *,
    device: torch.device,
    idle_ranks: Collection[int] = (),
    is_expected: bool = False,
) -> Exchanged:
    """Reduce the first values, as many as all ranks have and a message can hold.

    Collective: every rank must call it, without values if it has no further ones. Unless
    all ranks expect the exchange, they first wait for each other, so that a rank that does
    not make it can be named.

    Args:
        values: this rank's values, in the same order on every rank; some ranks may have
            more.
        device: the rank's device.
        idle_ranks: ranks whose values do not count.
        is_expected: whether every rank certainly makes this exchange.

    Raises:
        DivergenceError: values at the same position differ in name or op, or a rank has
            no values and another one does; raised on every rank.
        RankAbsentError: a rank does not make this exchange.
    """
    context = current()
    if context is not None and not is_expected:
        context.barriers.enter(
            f"the reduction of {_names_of(values)}",
            call_site(),
            name="a reduction of logged values",
        )
    group = None
    if is_gloo(device):
        device = torch.device("cpu")  # that of the message
        if context is not None:  # other code's collectives must not mix with these
            group = context.new_group(backend="gloo", purpose="logged values")
    message = _message_of(values[:_PER_MESSAGE], device)
    received = message.new_empty(dist.get_world_size(group), *message.shape)
    _all_gather(received.view(-1), message.view(-1), group=group)
    exchanged = _reduce_first(values, received, group, idle_ranks)
    check_received()
    return exchanged


def _message_of(values: Sequence[Value], device: torch.device) -> Tensor:
    """Return a row of digests and a row of values; a digest of 0 stands for no value.

    Digests and integers up to 2**53 are exact.
    """
    message = torch.zeros(2, _PER_MESSAGE, dtype=torch.float64, device=device)
    if values:
        digests = [1 + zlib.crc32(str(value).encode()) for value in values]
        message[0, : len(values)] = message.new_tensor(digests)
        message[1, : len(values)] = torch.stack([value.tensor.to(message) for value in values])
    return message


def _reduce_first(
    values: Sequence[Value],
    received: Tensor,
    group: dist.ProcessGroup | None,
    idle_ranks: Collection[int],
) -> Exchanged:
    """Reduce the values that every rank has sent. ``received`` has a message for each rank."""
    digests, rows = received.unbind(1)
    sent_by_all = int((digests != 0).sum(1).min())
    differs = (digests != digests[0]).any(0).tolist()  # at each position of a message
    # If a rank has sent nothing, the first position must be empty on all ranks.
    if any(differs[: max(sent_by_all, 1)]):
        raise _mismatch(values[differs.index(True) :], group)
    if idle_ranks:
        rows = rows[[rank for rank in range(len(rows)) if rank not in idle_ranks]]
    # After the values that all ranks have sent, only a rank that has more sends digests.
    needs_another = any(differs) or sent_by_all == _PER_MESSAGE
    return Exchanged(_results(values[:sent_by_all], rows), needs_another)


def _results(values: Sequence[Value], rows: Tensor) -> list[Tensor]:
    """Return the results; ``rows`` has a row for each rank, a column for each value."""
    by_op = {op: _OPS[op](rows) for op in {value.op for value in values}}
    return [
        by_op[value.op][column].to(value.tensor.device, result_dtype(value.op, value.tensor))
        for column, value in enumerate(values)
    ]


def result_dtype(op: str, tensor: Tensor) -> torch.dtype:
    """Return the dtype of a result: the tensor's, but float for a mean of integers."""
    is_mean_of_integers = op == "mean" and not tensor.is_floating_point()
    return torch.get_default_dtype() if is_mean_of_integers else tensor.dtype


def _mismatch(values: Sequence[Value], group: dist.ProcessGroup | None) -> DivergenceError:
    """Return an error that lists each rank's values. Collective."""
    by_rank: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, _names_of(values) or "no further value", group=group)
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


def _names_of(values: Sequence[Value]) -> str:
    """Return the values in words, each name and op once."""
    return listed(dict.fromkeys(map(str, values)))
