"""Reduce values of ``self.log(..., sync_dist=True)`` over the ranks, all values of a step in one collective."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.rank_lists import listed
from lightning_ddp_ext.ranks import is_gloo
from lightning_ddp_ext.reductions.all_reduce import all_reduce
from lightning_ddp_ext.reductions.batched import DTYPES, OPS, Value, reduce_batch
from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.supervision.call_site import call_site
from lightning_ddp_ext.supervision.survey import Survey

from .compat import calling_result


class BatchedMetrics:
    """Implements ``Strategy.reduce``, which Lightning calls for each value that is logged with ``sync_dist=True``.

    In a step such values are queued, and the queue is reduced at the step's end; until then readers get this rank's
    own value. Everything else, such as the values of an epoch, is reduced immediately.

    If ranks log different values, all raise. After a first training step, and after one that follows a step
    with values, all ranks reduce. Elsewhere they wait for each other first, to name a rank without values.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.start()

    def start(self) -> None:
        """Reset the state after an earlier run, which may have stopped anywhere."""
        self._queue: list[Value] | None = None  # a list within a step
        self._is_expected = True  # all ranks reduce after the next training step, even those without logged values

    @contextmanager
    def step(self, *, is_training: bool) -> Iterator[None]:
        """Reduce the values that the block logs at its end. Collective, if it logs any."""
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

    def reduce(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        """Reduce immediately; values of a step later and in place. Collective."""
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        logged, is_update = calling_result()
        if logged is None or not self._can_batch(tensor, group, reduce_op):
            return all_reduce(tensor, group, reduce_op, idle_ranks=self._strategy.data.idle_ranks)
        value = Value(f"{logged.meta.fx}.{logged.meta.name}", reduce_op, tensor)
        if is_update and self._queue is not None:
            self._queue.append(value)
            return tensor
        return self._reduce([value], is_expected=False)[0]

    def _reduce(self, values: list[Value], *, is_expected: bool) -> list[Tensor]:
        context = current()
        if not is_expected and context is not None:
            name = "a reduction of logged values"  # the reduction itself compares the names
            check = context.component(Survey).check_that_all_answer  # finds a stopped process before the timeout
            context.barriers.enter(f"the reduction of {listed(values)}", call_site(), name=name, check=check)
        root_device = self._strategy.root_device
        device = torch.device("cpu") if is_gloo(root_device) else root_device
        return reduce_batch(values, device=device, idle_ranks=self._strategy.data.idle_ranks)

    def _can_batch(self, tensor: Tensor, group: Any, op: Any) -> bool:
        is_scalar = tensor.ndim == 0 and tensor.dtype in DTYPES
        return is_scalar and op in OPS and group is None and self._strategy.world_size > 1
