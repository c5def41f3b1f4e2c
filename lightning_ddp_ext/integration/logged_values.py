"""Reduce values of ``self.log(..., sync_dist=True)`` across ranks.

Lightning calls ``Strategy.reduce`` for each value. A value that is logged in a step is
queued, and the call returns a tensor that is reduced before its first use, so no reader
sees a value of one rank alone. All other values, and tensors that are not logged, are
reduced in the call; the first call at the end of an epoch also reduces the values of the
epoch that Lightning reads next.

A rank sends its queue to the others in an **exchange**, a collective call. It makes one
when its step ends, and earlier if it reads a queued value, or before the strategy
communicates for another reason.

Ranks may read at different times, so one may send more values than another. An exchange
reduces the first values, as many as every rank has sent. The ranks then exchange again:
a rank that has sent more waits for the others, which join it at the latest when their
step ends. A rank that sends no values has therefore logged none that are left.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_ddp_ext.errors import DivergenceError
from lightning_ddp_ext.nested import values_of
from lightning_ddp_ext.rank_lists import grouped, listed, ranks_in_words
from lightning_ddp_ext.ranks import is_gloo
from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.supervision.stacks import call_site

from .cooperation import CooperatingRanks
from .data.evaluation import Evaluation
from .named_calls import report_step
from .private.compat import (
    is_computing_epoch,
    result_reduced_by,
    results_to_compute,
    trainer_of,
)
from .private.lightning_tree import pl
from .start.devices import RankDevicesStrategy
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


class Reduction:
    """``Strategy.reduce`` as an object; each access to the attribute returns another.

    Lightning keeps the object with which a name was first logged and calls it for all
    values of this name, so the object identifies the name. Other code gets objects that
    belong to no name.
    """

    def __init__(self, values: LoggedValues) -> None:
        self._values = values
        self.result: Any = None  # Lightning's result for the name, once it is known

    def __call__(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor and return it, or another object unchanged. Collective."""
        return self._values.reduce(tensor, group, reduce_op, self)

    # Lightning compares the arguments with which a name is logged, and refuses another
    # object for the same name.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reduction) and self._values is other._values


class LoggedValues:
    """Reduces the values that a strategy's ranks log with ``sync_dist=True``.

    If ranks log different values, all ranks raise. If a training step logged values, the
    next one is expected to, so all ranks exchange at its end, even if they have none.
    Before any other exchange they first wait for each other, so that a rank without values
    can be named.
    """

    def __init__(
        self, strategy: RankDevicesStrategy, ranks: CooperatingRanks, evaluation: Evaluation
    ) -> None:
        self._strategy = strategy
        self._ranks = ranks
        self._evaluation = evaluation
        self.start_run()

    def start_run(self) -> None:
        """Reset the state, because an earlier run may have stopped anywhere."""
        self._queue: list[PendingTensor] = []  # the values that this rank has logged
        self._is_in_step = False
        # Whether every rank makes another exchange in this step, even without values.
        self._needs_another = False
        # What Lightning has not read yet, by the tensor that it reduces. A result gets other
        # tensors when its name is logged again.
        self._numbers_of_epoch: dict[Tensor, Tensor] = {}
        # Evaluation does not change this, since some ranks may have no evaluation step.
        self._is_logged_in_training = False

    @contextmanager
    def step(self, *, is_training: bool) -> Iterator[None]:
        """Run a step in the block, and reduce the values that it has logged.

        Collective if it logged any, and in a training step if the one before did.
        """
        if is_training:
            report_step()
            self._needs_another = self._is_logged_in_training
            self._is_logged_in_training = False
        self._is_in_step = True
        try:
            yield
            while self._needs_another or self._queue:
                self._exchange_queue()
        finally:
            self._is_in_step = False
            for pending in self._queue:  # only after an exception
                pending.settle(math.nan)
            self._queue = []
        if is_training:
            report_step()  # so that a rank without values is named when the others reduce theirs

    def flush(self) -> None:
        """Reduce the values that are queued. Collective if there are any."""
        while self._queue:
            self._exchange_queue()

    def reduce(self, tensor: Any, group: Any, reduce_op: Any, reduction: Reduction) -> Any:
        """Reduce a tensor for :meth:`Reduction.__call__`. Collective.

        Args:
            tensor: the value; what is not a tensor is returned unchanged.
            group: the ranks; ``None`` for all.
            reduce_op: a ``ReduceOp`` or its name.
            reduction: the object that was called, which identifies the logged name.
        """
        if (
            not dist.is_initialized()
            or self._strategy.world_size == 1
            or self._ranks.is_handling_exception
            or not isinstance(tensor, Tensor)
        ):
            return tensor
        trainer = trainer_of(self._strategy.lightning_module)
        if reduction.result is None and trainer is not None:
            reduction.result = result_reduced_by(trainer, reduction)
        if reduction.result is None or group is not None:
            self.flush()
            if reduction.result is not None:  # Lightning would round a mean of integers down
                tensor = tensor.to(_dtype_of(reduce_op, tensor))
            return pl.strategies.DDPStrategy.reduce(self._strategy, tensor, group, reduce_op)
        if is_computing_epoch(trainer, reduction.result):
            return self._reduce_of_epoch(tensor, reduction.result, trainer)
        meta = reduction.result.meta
        value = Value(f"{meta.fx}.{meta.forked_name(on_step=True)}", reduce_op, tensor)
        if not self._is_in_step:
            [result], _ = self._exchange([value])
            return result
        pending = PendingTensor.of(value, self.flush)
        self._queue.append(pending)
        self._is_logged_in_training = self._is_logged_in_training or trainer.training
        return pending

    def _reduce_of_epoch(self, tensor: Tensor, result: Any, trainer: Any) -> Tensor:
        """Reduce a number of a result, and with the first one those of all results.

        Lightning reads them one after another. Collective.
        """
        # Lightning passes a copy of a result's value, but not of a mean's number of samples.
        is_value = tensor is not getattr(result, "cumulated_batch_size", None)
        number = result.value if is_value else tensor
        if number not in self._numbers_of_epoch:
            values = [value for each in results_to_compute(trainer) for value in _numbers_of(each)]
            results, _ = self._exchange(values)
            self._numbers_of_epoch = {
                value.tensor: reduced
                for value, reduced in zip(values, results, strict=False)  # as in _exchange_queue
            }
        return self._numbers_of_epoch.pop(number)

    def _exchange_queue(self) -> None:
        """Reduce the first queued values, as many as all ranks have sent. Collective."""
        values = [pending.value for pending in self._queue]
        results, self._needs_another = self._exchange(values, is_expected=self._needs_another)
        # Another rank may have sent fewer values.
        for pending, result in zip(self._queue, results, strict=False):
            pending.settle(result)
        del self._queue[: len(results)]

    def _exchange(
        self, values: Sequence[Value], *, is_expected: bool = False
    ) -> tuple[list[Tensor], bool]:
        """Reduce the first values, after waiting until all ranks do.

        The wait is skipped if the exchange is expected. See ``reduce_common``. Collective.
        """
        context = current()
        device = self._strategy.root_device
        uses_gloo = is_gloo(device)
        message_device = torch.device("cpu") if uses_gloo else device
        group = None
        if context is not None:
            if not is_expected:
                what = f"the reduction of {listed(dict.fromkeys(map(str, values)))}"
                context.barriers.enter(what, call_site(), name="a reduction of logged values")
            if uses_gloo:  # other code's collectives must not mix with these
                group = context.new_group(backend="gloo", purpose="logged values")
        idle_ranks = self._evaluation.idle_ranks
        reduced = reduce_common(values, device=message_device, group=group, idle_ranks=idle_ranks)
        check_received()
        return reduced


# The message of an exchange. Each rank receives the values of all ranks, and computes the
# results itself. Messages have the same length on all ranks, whatever they logged, since
# gloo aborts a process that receives another length.


class Value(NamedTuple):
    """A scalar to reduce, and one of the names in ``_OPS``."""

    name: str
    op: str
    tensor: Tensor

    def __str__(self) -> str:
        return f"{self.name} ({self.op})"


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
        by_op[value.op][column].to(value.tensor.device, _dtype_of(value.op, value.tensor))
        for column, value in enumerate(values)
    ]


def _numbers_of(result: Any) -> list[Value]:
    """Return the numbers from which Lightning computes a result of an epoch.

    A mean has two: a sum and the number of samples.
    """
    name = f"{result.meta.fx}.{result.meta.forked_name(on_step=False)}"
    samples = [result.cumulated_batch_size] if result.meta.is_mean_reduction else []
    return [Value(name, result.meta.sync.op, number) for number in (result.value, *samples)]


def _dtype_of(op: str, tensor: Tensor) -> torch.dtype:
    """Return the dtype of a result: the tensor's, but float for a mean of integers."""
    is_mean_of_integers = op == "mean" and not tensor.is_floating_point()
    return torch.get_default_dtype() if is_mean_of_integers else tensor.dtype


def _mismatch(values: Sequence[Value], group: dist.ProcessGroup | None) -> DivergenceError:
    """Return an error that lists each rank's values. Collective."""
    by_rank: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(
        by_rank, listed(dict.fromkeys(map(str, values))) or "no further value", group=group
    )
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
