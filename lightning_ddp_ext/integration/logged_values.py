"""Reduce values of ``self.log(..., sync_dist=True)`` across ranks.

Lightning calls ``Strategy.reduce`` for each value. When its ranks communicate depends on
the place of the call:

=====================  ================================================================
a step                 together with the step's other values in one collective: at the
                       end of the step, before the strategy communicates for another
                       reason, or when code reads one of them
the end of an epoch    together with all values of the epoch, at the first call
anywhere else          immediately
=====================  ================================================================
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.rank_lists import listed
from lightning_ddp_ext.ranks import is_gloo
from lightning_ddp_ext.reductions.all_reduce import all_reduce
from lightning_ddp_ext.reductions.batched import (
    DTYPES,
    OPS,
    PER_MESSAGE,
    Reduced,
    Value,
    reduce_common,
)
from lightning_ddp_ext.reductions.pending import PendingTensor
from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.supervision.stacks import call_site

from .checkpoints.collective import Checkpoints
from .data.evaluation import Evaluation
from .named_calls import report_step
from .private.compat import (
    is_computed,
    is_computing_epoch,
    result_reduced_by,
    results_of,
    trainer_of,
)
from .start.devices import RankDevicesStrategy


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

    # Lightning compares the arguments with which a name is logged.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reduction) and self._values is other._values

    __hash__ = None  # type: ignore[assignment]


@dataclass
class _Step:
    """The values of the running step, or of the last one.

    Attributes:
        is_running: whether the step is running.
        has_logged: whether it has logged values.
        is_expected: whether all ranks exchange after the step, even without values.
        is_open: whether another rank waits for this rank's further values.
    """

    is_running: bool = False
    has_logged: bool = False
    is_expected: bool = False
    is_open: bool = False


class _EpochNumber(NamedTuple):
    """A reduced number of an epoch's result, and the result's own value to identify it."""

    value: Tensor
    reduced: Tensor


class LoggedValues:
    """Reduces the values that a strategy's ranks log with ``sync_dist=True``.

    Values logged in a step are queued. A read reduces those logged so far, so that no
    code sees this rank's own value. If only some ranks read, the others join that
    exchange at their next one.

    If ranks log different values, all ranks raise. After a training step with values,
    all ranks also exchange after the next one. In all other cases they first wait for
    each other, so that a rank without values can be named.
    """

    def __init__(
        self, strategy: RankDevicesStrategy, checkpoints: Checkpoints, evaluation: Evaluation
    ) -> None:
        self._strategy = strategy
        self._checkpoints = checkpoints
        self._evaluation = evaluation
        self.start_run()

    def start_run(self) -> None:
        """Reset the state, because an earlier run may have stopped anywhere."""
        self._step = _Step()
        self._queue: list[tuple[Value, PendingTensor]] = []
        self._epoch_numbers: deque[_EpochNumber] = deque()

    @contextmanager
    def step(self, *, is_training: bool) -> Iterator[None]:
        """After the block, reduce the values that it logged.

        Collective if it logged any.
        """
        if is_training:
            report_step()
        is_expected = is_training and self._step.has_logged and self._strategy.world_size > 1
        self._step = _Step(is_running=True, is_expected=is_expected)
        try:
            yield
            self._end_step()
        finally:
            self._step = _Step(has_logged=self._step.has_logged)
            self._abandon()
        if is_training:
            report_step()  # so that a rank without values is named when the others reduce theirs

    def _end_step(self) -> None:
        is_over = not (self._queue or self._step.is_expected or self._step.is_open)
        while not is_over:
            is_over = self._exchange(is_last=len(self._queue) <= PER_MESSAGE).is_over

    def _abandon(self) -> None:
        """Leave values without a result as NaN.

        Only an exception, in the step or in the reduction, leaves such values.
        """
        for value, pending in self._queue:
            if value.tensor.is_floating_point():
                _fill(value.tensor, math.nan)
            pending.settle()
        self._queue = []

    def flush(self) -> None:
        """Reduce the values that are queued. Collective if there are any."""
        while self._queue:
            self._exchange(is_last=False)

    def reduce(self, tensor: Any, group: Any, reduce_op: Any, reduction: Reduction) -> Any:
        """Reduce a tensor for :meth:`Reduction.__call__`."""
        is_alone = not dist.is_initialized() or self._checkpoints.is_handling_exception
        if is_alone or not isinstance(tensor, Tensor):
            return tensor
        result = self._result_of(reduction)
        if result is None or not self._can_batch(tensor, group, reduce_op):
            self.flush()
            return all_reduce(tensor, group, reduce_op, idle_ranks=self._evaluation.idle_ranks)
        if is_computing_epoch(self._strategy.current_trainer):
            return self._reduce_epoch_number(result)
        value = Value(_name_of(result), reduce_op, tensor)
        if not self._step.is_running:
            return self._reduce([value], is_last=True).results[0]
        pending = self._enqueue(value)
        if result.meta.enable_graph:  # Lightning shows this value itself, and not a detached one
            self.flush()
        return pending

    def _enqueue(self, value: Value) -> PendingTensor:
        self._step.has_logged = True
        pending = PendingTensor.of(value.tensor, self.flush)
        self._queue.append((value, pending))
        return pending

    def _result_of(self, reduction: Reduction) -> Any:
        """Return the logged value that calls a reduction; ``None`` for other code."""
        trainer = trainer_of(self._strategy.lightning_module)
        if reduction.result is None and trainer is not None:
            reduction.result = result_reduced_by(trainer, reduction)
        return reduction.result

    def _exchange(self, *, is_last: bool) -> Reduced:
        """Reduce the first queued values, as many as all ranks have. Collective."""
        sent = self._queue[:PER_MESSAGE]
        reduced = self._reduce([value for value, _ in sent], is_last=is_last)
        # Another rank may have queued fewer values.
        for (value, pending), result in zip(sent, reduced.results, strict=False):
            _fill(value.tensor, result)
            pending.settle()
        del self._queue[: len(reduced.results)]
        self._step.is_open = not (reduced.is_over or reduced.is_even)
        if reduced.is_even:
            # All ranks have logged; none waits for the end of the step.
            self._step.is_expected = False
        return reduced

    def _reduce_epoch_number(self, result: Any) -> Tensor:
        """Reduce the next number of an epoch's result.

        All numbers that Lightning requests next are reduced together with it.
        """
        is_known = bool(self._epoch_numbers) and self._epoch_numbers[0].value is result.value
        if not is_known:
            self._epoch_numbers = self._reduce_epoch(result)
        return self._epoch_numbers.popleft().reduced

    def _reduce_epoch(self, first: Any) -> deque[_EpochNumber]:
        """Reduce the numbers of a result, and those of the ones that are computed next."""
        logged = results_of(self._strategy.current_trainer).values()
        due = [result for result in logged if self._is_due(result)]
        if not due or due[0] is not first:
            due = [first]
        sources: list[Any] = []
        values: list[Value] = []
        for result in due[: PER_MESSAGE // 2]:  # a result has up to two numbers
            for number in _numbers_of(result):
                sources.append(result.value)
                values.append(Value(_name_of(result), result.meta.sync.op, number))
        reduced = self._reduce(values, is_last=False).results
        # Another rank may compute fewer results.
        return deque(map(_EpochNumber, sources, reduced))

    def _is_due(self, result: Any) -> bool:
        """Whether Lightning will reduce this result when it computes the epoch's results."""
        meta = result.meta
        is_of_epoch = result.is_tensor and meta.on_epoch and not result.has_reset
        is_reduced = meta.sync.should and not meta.sync.rank_zero_only
        if not (is_of_epoch and is_reduced) or is_computed(result):
            return False
        return all(
            self._can_batch(number, meta.sync.group, meta.sync.op) for number in _numbers_of(result)
        )

    def _reduce(self, values: list[Value], *, is_last: bool) -> Reduced:
        """Reduce logged values, after waiting until all ranks do.

        The wait is skipped if the reduction is expected. Collective.
        """
        context = current()
        device = self._strategy.root_device
        message_device = torch.device("cpu") if is_gloo(device) else device
        group = None
        if context is not None:
            if not self._step.is_expected:
                what = f"the reduction of {listed(dict.fromkeys(map(str, values)))}"
                context.barriers.enter(what, call_site(), name="a reduction of logged values")
            if is_gloo(device):  # other code's collectives must not mix with these
                group = context.new_group(backend="gloo", purpose="logged values")
        idle_ranks = self._evaluation.idle_ranks
        reduced = reduce_common(
            values, is_last=is_last, device=message_device, group=group, idle_ranks=idle_ranks
        )
        if context is not None:
            context.peers.check()  # an aborted collective of NCCL returns arbitrary numbers
        return reduced

    def _can_batch(self, tensor: Tensor, group: Any, op: Any) -> bool:
        is_scalar = tensor.ndim == 0 and tensor.dtype in DTYPES
        return is_scalar and op in OPS and group is None and self._strategy.world_size > 1


def _fill(tensor: Tensor, value: Tensor | float) -> None:
    with torch.inference_mode(tensor.is_inference()):  # the mode in which it was logged
        tensor.fill_(value)


def _name_of(logged: Any) -> str:
    return f"{logged.meta.fx}.{logged.meta.name}"


def _numbers_of(logged: Any) -> list[Tensor]:
    """Return the numbers of an epoch's result that Lightning reduces, in its order."""
    return (
        [logged.value, logged.cumulated_batch_size]
        if logged.meta.is_mean_reduction
        else [logged.value]
    )
