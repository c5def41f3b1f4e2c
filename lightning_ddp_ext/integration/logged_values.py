"""Reduce values of ``self.log(..., sync_dist=True)`` across ranks.

Lightning calls ``Strategy.reduce`` for each value. The place of the call determines
when the ranks communicate, and what the call returns:

===================  =================================================================
in a step            At the end of the step, or at the first read of a value, for all
                     values of the step together (``step_values``). The call returns a
                     tensor that is reduced before its first use (``pending``), so
                     no reader sees a value of one rank alone.
when an epoch ends   At the first call, for all values of the epoch together
                     (``epoch_values``). The call returns the result.
anywhere else        In the call, which returns the result.
===================  =================================================================

Tensors that are not logged, and logged values that cannot be batched, such as those of
a group of ranks, are also reduced in the call.
"""

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
from lightning_ddp_ext.reductions.batched import Exchange, Value, can_batch, reduce_common
from lightning_ddp_ext.rendezvous.process_context import current
from lightning_ddp_ext.supervision.stacks import call_site

from .checkpoints.collective import Checkpoints
from .data.evaluation import Evaluation
from .epoch_values import EpochValues, name_of
from .named_calls import report_step
from .private.compat import is_computing_epoch, result_reduced_by, trainer_of
from .start.devices import RankDevicesStrategy
from .step_values import StepValues


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
    next one is expected to, so all ranks exchange at its end, even if they have none. In
    all other cases they first wait for each other, so that a rank without values can be
    named.
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
        self._step_values = StepValues(self._reduce)
        self._epoch_values = EpochValues(self._strategy, self._reduce)

    @contextmanager
    def step(self, *, is_training: bool) -> Iterator[None]:
        """Run a step in the block, and reduce the values that it has logged.

        See :meth:`StepValues.step`.
        """
        if is_training:
            report_step()
        with self._step_values.step(is_training=is_training):
            yield
        if is_training:
            report_step()  # so that a rank without values is named when the others reduce theirs

    def flush(self) -> None:
        """Reduce the values that are queued. Collective if there are any."""
        self._step_values.flush()

    def reduce(self, tensor: Any, group: Any, reduce_op: Any, reduction: Reduction) -> Any:
        """Reduce a tensor for :meth:`Reduction.__call__`. Collective.

        Args:
            tensor: the value; what is not a tensor is returned unchanged.
            group: the ranks; ``None`` for all.
            reduce_op: a ``ReduceOp`` or its name.
            reduction: the object that was called, which identifies the logged name.
        """
        is_connected = dist.is_initialized() and not self._checkpoints.is_handling_exception
        if not is_connected or not isinstance(tensor, Tensor):
            return tensor
        result = self._result_of(reduction)
        is_of_all_ranks = group is None and self._strategy.world_size > 1
        if result is None or not is_of_all_ranks or not can_batch(tensor, reduce_op):
            self.flush()
            return all_reduce(tensor, group, reduce_op, idle_ranks=self._evaluation.idle_ranks)
        if is_computing_epoch(self._strategy.current_trainer):
            return self._epoch_values.reduce_next(result)
        value = Value(name_of(result), reduce_op, tensor)
        if not self._step_values.is_running:
            return self._reduce([value], is_last=True).results[0]
        pending = self._step_values.add(value)
        if result.meta.enable_graph:  # Lightning shows this value itself, and not a detached one
            self.flush()
        return pending

    def _result_of(self, reduction: Reduction) -> Any:
        """Return the logged value that calls a reduction; ``None`` for other code."""
        trainer = trainer_of(self._strategy.lightning_module)
        if reduction.result is None and trainer is not None:
            reduction.result = result_reduced_by(trainer, reduction)
        return reduction.result

    def _reduce(self, values: list[Value], *, is_last: bool, is_expected: bool = False) -> Exchange:
        """Reduce logged values, after waiting until all ranks do.

        The wait is skipped if the reduction is expected. Collective.
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
        exchange = reduce_common(
            values, is_last=is_last, device=message_device, group=group, idle_ranks=idle_ranks
        )
        if context is not None:
            context.peers.check()  # an aborted collective of NCCL returns arbitrary numbers
        return exchange
