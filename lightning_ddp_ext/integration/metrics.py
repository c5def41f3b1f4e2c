"""Reduce what ``self.log(..., sync_dist=True)`` logs over the ranks, a step's values in one collective."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.integration.lightning_tree import ResultMetric
from lightning_ddp_ext.reductions.all_reduce import all_reduce
from lightning_ddp_ext.reductions.batched import DTYPES, OPS, Value, reduce_batch
from lightning_ddp_ext.rendezvous.process_group import current
from lightning_ddp_ext.supervision.places import calling_place


class BatchedMetrics:
    """Answers ``Strategy.reduce``, which Lightning calls for each value that is logged with ``sync_dist=True``.

    In a step such values are queued, and the queue is reduced at the step's end, which all ranks reach; until then
    the value that a reader sees is this rank's own. Everything else, an epoch's values too, is reduced at once.

    Ranks that have logged different values all raise. A rank that logs nothing in a step where others do is found out
    in a first training step, and in one after a step in which something was logged; else the others wait for it.

    Args:
        strategy: whose ranks.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.start()

    def start(self) -> None:
        """Forget an earlier run, which may have ended anywhere."""
        self._queue: list[Value] | None = None  # there is one within a step
        self._is_expected = True  # all ranks reduce after the next training step, even those that have logged nothing
        self._is_first_of_epoch = True  # no value of an epoch has been reduced

    @contextmanager
    def step(self, *, is_training: bool) -> Iterator[None]:
        """Reduce what is logged in the block at its end. Collective, if there is anything."""
        queue: list[Value] = []
        self._queue = queue
        try:
            yield
        finally:
            self._queue = None
        is_expected = is_training and self._is_expected and _has_other_ranks()
        if queue or is_expected:
            for value, result in zip(queue, self._reduce(queue, is_expected=is_expected), strict=True):
                value.tensor.copy_(result)
            self._is_expected = bool(queue)

    def reduce(self, tensor: Any, group: Any, reduce_op: Any) -> Any:
        """Reduce at once; or later, and in place, what is logged in a step. Collective."""
        if not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        result, is_update = _calling_result()
        if result is None or not self._can_batch(tensor, group, reduce_op):
            return all_reduce(tensor, group, reduce_op, idle_ranks=self._idle_ranks)
        value = Value(f"{result.meta.fx}.{result.meta.name}", reduce_op, tensor)
        if is_update and self._queue is not None:
            self._queue.append(value)
            return tensor
        if not is_update:
            self._announce(value)
        return self._reduce([value])[0]

    def _announce(self, value: Value) -> None:
        """Say that this rank reads a value of an epoch, so that a rank that does not have it is told."""
        membership = current()
        if membership is None:
            return
        name = "a reduction of logged values"  # which of them, they find out in the reduction itself
        call = membership.meetings.begin(f"the reduction of {value}", calling_place(), name=name)
        if self._is_first_of_epoch:  # what follows is another such call, which forms a group, and names no value
            membership.meetings.wait(call)
            self._is_first_of_epoch = False

    def _reduce(self, values: list[Value], *, is_expected: bool = False) -> list[Tensor]:
        device, membership, group = self._strategy.root_device, current(), None
        # A rank that leaves this collective out may be in another one, which must not take its place.
        if not is_expected and device.type == "cpu" and membership is not None:
            group = membership.new_group(range(membership.world.world_size), backend="gloo", purpose="metrics")
        return reduce_batch(values, device=device, group=group, idle_ranks=self._idle_ranks)

    def _can_batch(self, tensor: Tensor, group: Any, op: Any) -> bool:
        is_plain = group is None and op in OPS and tensor.ndim == 0 and tensor.dtype in DTYPES
        device = self._strategy.root_device
        is_supported = tensor.device == device and (device.type == "cpu" or "nccl" in str(dist.get_backend()))
        return is_plain and is_supported and _has_other_ranks()

    @property
    def _idle_ranks(self) -> tuple[int, ...]:
        return self._strategy.sampling.evaluation.absent  # type: ignore[no-any-return]


def _has_other_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def _calling_result() -> tuple[Any, bool]:
    """The logged value, as Lightning keeps it, that ``reduce`` was called for, if any; and whether to update it.

    A user may call ``reduce`` with the same arguments, and needs the answer at once: only the calling frame differs.
    """
    frame: Any = sys._getframe(1)
    while frame.f_code.co_name == "reduce":  # also of a strategy that inherits from ours
        frame = frame.f_back
    is_update = frame.f_code is ResultMetric.update.__code__
    is_logged = is_update or frame.f_code is ResultMetric.compute.__code__
    return (frame.f_locals["self"] if is_logged else None), is_update
