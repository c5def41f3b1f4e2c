"""Choose when to reduce values of ``self.log(..., sync_dist=True)`` across ranks.

Lightning calls ``Strategy.reduce`` for each value:

==========================  ==============================================================
Tensor                      When it is reduced
==========================  ==============================================================
not logged, or logged for   in the call, by Lightning's own method
a group of ranks
a number of an epoch        in the call for the first one of the epoch, together with all
                            others, which Lightning reads next
logged in a step            when this rank reads it, or communicates for another reason,
                            or ends the step: in the first of these cases
logged elsewhere            in the call
==========================  ==============================================================

In a step, values are queued until then. The call returns a tensor that is reduced before
its first use, so no reader sees a value of one rank alone. Ranks may read at different
times: a rank that reads early waits for the others, which send their values at the latest
when their step ends. See ``value_exchange``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from lightning_ddp_ext.nested import values_of

from .cooperation import CooperatingRanks
from .data.evaluation import Evaluation
from .private.compat import (
    is_computing_epoch,
    result_reduced_by,
    results_to_compute,
    trainer_of,
)
from .private.lightning_tree import pl
from .start.devices import RankDevicesStrategy
from .strategy_ranks import report_step
from .value_exchange import Exchanged, Value, exchange, result_dtype


class Reduction:
    """``Strategy.reduce`` as an object; each access to the attribute returns another.

    Lightning keeps the object with which a name was first logged and calls it for all
    values of this name, so the object identifies the name. Other code gets objects that
    belong to no name.
    """

    def __init__(self, values: LoggedValues) -> None:
        self._values = values
        self._result: Any = None  # once it is known

    def __call__(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor and return it, or another object unchanged. Collective."""
        return self._values.reduce(tensor, group, reduce_op, self)

    def result_in(self, trainer: Any) -> Any:
        """Return Lightning's result for the name, or ``None`` if this belongs to no name."""
        if self._result is None and trainer is not None:
            self._result = result_reduced_by(trainer, self)
        return self._result

    # Lightning compares the arguments with which a name is logged, and refuses another
    # object for the same name.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Reduction) and self._values is other._values


@dataclass
class _Step:
    """A step in which values are queued.

    Attributes:
        needs_exchange: whether every rank makes another exchange in this step, even without
            values.
        queue: the values that this rank has logged and not reduced yet.
    """

    needs_exchange: bool
    queue: list[PendingTensor] = field(default_factory=list)


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
        self._step: _Step | None = None
        # Whether the last training step logged values. Evaluation does not change this,
        # since some ranks may have no evaluation step.
        self._logs_in_training = False
        # The reduced numbers of an epoch that Lightning has not read yet, by the tensors from
        # which they were reduced. These are compared by identity: when a name is logged again,
        # its result gets other tensors, so that no number is read for another epoch.
        self._numbers_of_epoch: dict[Tensor, Tensor] = {}

    def start_run(self) -> None:
        """Expect no values in the first step, since an earlier run may have stopped anywhere."""
        self._logs_in_training = False

    @contextmanager
    def step(self, *, is_training: bool) -> Iterator[None]:
        """Run a step in the block, and reduce the values that it has logged.

        Collective if it logged any, and in a training step if the one before did.
        """
        if self._step is not None:  # called by hand in a step, which also reduces its values
            yield
            return
        step = self._step = _Step(needs_exchange=is_training and self._logs_in_training)
        if is_training:
            report_step()
            self._logs_in_training = False
        try:
            yield
            while step.queue or step.needs_exchange:
                self._exchange_queue(step)
        finally:
            self._step = None
            for pending in step.queue:  # only after an exception
                pending.settle(math.nan)
        if is_training:
            report_step()  # so that a rank without values is named when the others reduce theirs

    def flush(self) -> None:
        """Reduce the values that are queued. Collective if there are any."""
        while self._step is not None and self._step.queue:
            self._exchange_queue(self._step)

    def reduce(self, tensor: Any, group: Any, reduce_op: Any, reduction: Reduction) -> Any:
        """Reduce a tensor for :meth:`Reduction.__call__`, see the module's table. Collective.

        Args:
            tensor: the value; what is not a tensor is returned unchanged.
            group: the ranks; ``None`` for all.
            reduce_op: a ``ReduceOp`` or its name.
            reduction: the object that was called, which identifies the logged name.
        """
        if (
            not isinstance(tensor, Tensor)
            or not dist.is_initialized()
            or self._strategy.world_size == 1
            or self._ranks.is_handling_exception  # other ranks may not make this call
        ):
            return tensor
        trainer = trainer_of(self._strategy.lightning_module)
        result = reduction.result_in(trainer)
        if result is None or group is not None:
            self.flush()
            if result is not None:  # Lightning would round a mean of integers down
                tensor = tensor.to(result_dtype(reduce_op, tensor))
            return pl.strategies.DDPStrategy.reduce(self._strategy, tensor, group, reduce_op)
        if is_computing_epoch(trainer, result):
            return self._reduce_of_epoch(tensor, result, trainer)
        value = Value(_name_of(result, on_step=True), reduce_op, tensor)
        if self._step is None:
            return self._exchange([value]).results[0]
        self._logs_in_training = self._logs_in_training or trainer.training
        pending = PendingTensor.of(value, self.flush)
        self._step.queue.append(pending)
        return pending

    def _exchange_queue(self, step: _Step) -> None:
        """Reduce the first queued values, as many as all ranks have sent. Collective."""
        values = [pending.value for pending in step.queue]
        results, step.needs_exchange = self._exchange(values, is_expected=step.needs_exchange)
        for pending, result in zip(step.queue, results, strict=False):
            pending.settle(result)
        del step.queue[: len(results)]

    def _reduce_of_epoch(self, tensor: Tensor, result: Any, trainer: Any) -> Tensor:
        """Reduce a number of a result, and with the first one those of all results.

        Lightning reads them one after another. Collective.
        """
        # Lightning passes a mean's number of samples itself, but a copy of a result's value.
        number = tensor if tensor is getattr(result, "cumulated_batch_size", None) else result.value
        if number not in self._numbers_of_epoch:
            values = [value for each in results_to_compute(trainer) for value in _numbers_of(each)]
            # If a message does not hold all, the first number that is left sends the others.
            reduced = zip(values, self._exchange(values).results, strict=False)
            self._numbers_of_epoch = {value.tensor: result for value, result in reduced}
        return self._numbers_of_epoch.pop(number)

    def _exchange(self, values: Sequence[Value], *, is_expected: bool = False) -> Exchanged:
        """Reduce the first values, as many as all ranks have sent. Collective."""
        return exchange(
            values,
            device=self._strategy.root_device,
            idle_ranks=self._evaluation.idle_ranks,
            is_expected=is_expected,
        )


def _name_of(result: Any, *, on_step: bool) -> str:
    """Return a result's name in errors, with the hook that logs it."""
    return f"{result.meta.fx}.{result.meta.forked_name(on_step=on_step)}"


def _numbers_of(result: Any) -> list[Value]:
    """Return the numbers from which Lightning computes a result of an epoch.

    A mean has two: a sum and the number of samples.
    """
    samples = [result.cumulated_batch_size] if result.meta.is_mean_reduction else []
    name = _name_of(result, on_step=False)
    return [Value(name, result.meta.sync.op, number) for number in (result.value, *samples)]


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
