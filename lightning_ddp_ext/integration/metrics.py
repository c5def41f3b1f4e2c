"""Reduce values of ``self.log(..., sync_dist=True)`` across ranks, all values of a step in one collective."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.rank_lists import listed
from lightning_ddp_ext.ranks import is_gloo
from lightning_ddp_ext.reductions.all_reduce import all_reduce
from lightning_ddp_ext.reductions.batched import DTYPES, OPS, PER_MESSAGE, Value, reduce_batch, reduce_common
from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.supervision.call_site import call_site
from lightning_ddp_ext.supervision.survey import Survey

from .compat import calling_result, results_of
from .named_calls import report_step


class BatchedMetrics:
    """Implements ``Strategy.reduce``, which Lightning calls for each value that is logged with ``sync_dist=True``.

    Values logged in a step are queued and reduced at the end of the step; until then readers get this rank's own value.
    The values of an epoch are reduced together at its end. Everything else is reduced immediately.

    If ranks log different values, all ranks raise. After a training step with values, all ranks also reduce after the
    next one. In all other cases they first wait for each other, so that a rank without values can be named.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.start()

    def start(self) -> None:
        """Reset the state, because an earlier run may have stopped anywhere."""
        self._queue: list[Value] | None = None  # a list during a step
        self._is_expected = False  # whether all ranks reduce after the next training step, even without logged values
        self._ahead: deque[tuple[Tensor, Tensor]] = deque()  # the results requested next, each with its source

    @contextmanager
    def step(self, *, is_training: bool) -> Iterator[None]:
        """After the block, reduce the values that it logged. Collective if it logged any."""
        if is_training:
            report_step()
        queue: list[Value] = []
        self._queue = queue
        try:
            yield
        finally:
            self._queue = None
        is_expected = is_training and self._is_expected and self._strategy.world_size > 1
        if queue or is_expected:
            for value, result in zip(queue, self._reduce(queue, is_expected=is_expected), strict=True):
                value.tensor.copy_(result)
            self._is_expected = bool(queue)
        if is_training:
            report_step()  # so that a rank without values is named when the others reduce theirs

    def reduce(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        """Reduce a tensor now or, for a step's value, in place later; return other objects unchanged. Collective."""
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        logged, is_update = calling_result()
        if logged is None or not self._can_batch(tensor, group, reduce_op):
            return all_reduce(tensor, group, reduce_op, idle_ranks=self._strategy.data.idle_ranks)
        if not is_update:
            return self._reduce_epoch(logged)
        value = Value(_name_of(logged), reduce_op, tensor)
        if self._queue is not None:
            self._queue.append(value)
            return tensor
        return self._reduce([value], is_expected=False)[0]

    def _reduce_epoch(self, logged: Any) -> Tensor:
        """Reduce a number of an epoch's result together with those of all results that Lightning computes next."""
        if not (self._ahead and self._ahead[0][0] is logged.value):
            due = [each for each in results_of(self._strategy.current_trainer).values() if self._is_due(each)]
            due = due if due and due[0] is logged else [logged]
            numbers = [(each, number) for each in due[: PER_MESSAGE // 2] for number in _numbers_of(each)]
            values = [Value(_name_of(each), each.meta.sync.op, number) for each, number in numbers]
            self._enter(values)
            results = reduce_common(values, device=self._device, idle_ranks=self._strategy.data.idle_ranks)
            self._ahead = deque((each.value, result) for (each, _), result in zip(numbers, results, strict=False))
        return self._ahead.popleft()[1]

    def _is_due(self, result: Any) -> bool:
        """Whether Lightning will compute this result of the epoch next, and reduce it across all ranks."""
        meta, sync = result.meta, result.meta.sync
        is_computed = result.has_reset or result._computed is not None or not (result.is_tensor and meta.on_epoch)
        if is_computed or not sync.should or sync.rank_zero_only:
            return False
        return all(self._can_batch(number, sync.group, sync.op) for number in _numbers_of(result))

    def _reduce(self, values: list[Value], *, is_expected: bool) -> list[Tensor]:
        if not is_expected:
            self._enter(values)
        return reduce_batch(values, device=self._device, idle_ranks=self._strategy.data.idle_ranks)

    def _enter(self, values: list[Value]) -> None:
        """Wait until all ranks reduce logged values; the reduction itself compares the names."""
        context = current()
        if context is not None:
            what, name = f"the reduction of {listed(dict.fromkeys(map(str, values)))}", "a reduction of logged values"
            check = context.component(Survey).check_that_all_answer  # detects a stopped process before the timeout
            context.barriers.enter(what, call_site(), name=name, check=check)

    @property
    def _device(self) -> torch.device:
        """The device of the tensors that are sent."""
        device: torch.device = self._strategy.root_device
        return torch.device("cpu") if is_gloo(device) else device

    def _can_batch(self, tensor: Tensor, group: Any, op: Any) -> bool:
        is_scalar = tensor.ndim == 0 and tensor.dtype in DTYPES
        return is_scalar and op in OPS and group is None and self._strategy.world_size > 1


def _name_of(logged: Any) -> str:
    return f"{logged.meta.fx}.{logged.meta.name}"


def _numbers_of(logged: Any) -> list[Tensor]:
    """Return the numbers of an epoch's result that Lightning reduces, in Lightning's order."""
    return [logged.value, logged.cumulated_batch_size] if logged.meta.is_mean_reduction else [logged.value]
