"""Reduce values of ``self.log(..., sync_dist=True)`` across ranks when they are logged, and compare their names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_ddp_ext.errors import DivergenceError
from lightning_ddp_ext.ranks import Ranks
from lightning_ddp_ext.reductions.all_reduce import all_reduce
from lightning_ddp_ext.reductions.compared import OPS, Exchange, PendingTensor, reduced, resolve
from lightning_ddp_ext.rendezvous.process_context import ProcessContext, current
from lightning_ddp_ext.supervision.call_site import call_site
from lightning_ddp_ext.supervision.survey import Survey

from .compat import result_reduced_by
from .named_calls import ranks_of, refuse, report_step


class Reduction:
    """``Strategy.reduce`` as an object; each access to the attribute returns another one.

    Lightning keeps the object with which a name was first logged and calls it for all values of this name, so the
    object identifies the name. Other code gets objects that belong to no name.
    """

    def __init__(self, values: LoggedValues) -> None:
        self._values = values

    def __call__(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor in place, and return it; return other objects unchanged. Collective."""
        return self._values.reduce(tensor, group, reduce_op, self)

    def __eq__(self, other: object) -> bool:  # Lightning compares the arguments with which a name is logged
        return isinstance(other, Reduction) and self._values is other._values

    __hash__ = None  # type: ignore[assignment]


class LoggedExchanges:
    """All exchanges of logged values between a context's ranks; several Trainers share them.

    Their group is used for nothing else: collectives of ranks that log different values would otherwise mix.
    """

    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._group: dist.ProcessGroup | None = None
        self._started = 0

    def start(self, name: str, number: float = 0.0) -> Exchange:
        """Start an exchange. Collective."""
        group = self._context.new_group(backend="gloo", purpose="logged values")
        if group is not self._group:
            self._group = group
            self._started = 0
        self._started += 1
        return Exchange(name, number, group)

    def align(self, ranks: Ranks) -> None:
        """Complete exchanges that only some ranks have started, because exceptions ended a run. Collective."""
        if self._group not in self._context.groups.others.values():
            return  # nothing has been logged in the current groups
        most = max(ranks.gather(self._started))
        for filler in [self.start("") for _ in range(self._started, most)]:
            with suppress(DivergenceError):
                filler.numbers()


class LoggedValues:
    """Reduces the values that a strategy's ranks log with ``sync_dist=True``.

    The call that logs a value starts its exchange, and its first read waits for the result, at the latest the end of
    the phase, such as a training step. The ranks compare the names of their values, and all of them raise if they log
    different ones.

    A training step expects as many values as the last one. In a phase with another number of values, ranks also detect
    values that only some of them log: a rank with fewer than expected exchanges a message without a name at the end,
    and a rank with more first waits in a named barrier. After that, the end of the phase is compared.
    """

    def __init__(self, strategy: Any) -> None:
        self._strategy = strategy
        self.start_run()

    def start_run(self) -> None:
        """Forget an earlier run, which may have stopped anywhere."""
        self._is_aligned = False  # whether exchanges of earlier runs are complete
        self._values: list[Tensor] = []  # those of this phase
        self._expected = 0  # the number of values that all ranks expect in this phase
        self._of_last_step = 0  # the number of values in the last training step
        self._is_open = False  # whether all ranks will compare the end of this phase

    @contextmanager
    def step(self, *, is_training: bool) -> Iterator[None]:
        """Make the block a phase. Collective if it, or the training step before it, has values."""
        if is_training:
            report_step()  # first, so that this rank is named if it skipped a call in which the others wait
        self.end_phase()
        self._expected = self._of_last_step if is_training else 0
        yield
        count = self.end_phase()
        if is_training:
            self._of_last_step = count
            report_step()  # so that a rank without values is named when the others reduce theirs

    def end_phase(self) -> int:
        """Wait for the values of the current phase, and return their number. Collective if it has or expects any."""
        values, self._values = self._values, []
        is_compared = self._is_open or len(values) < self._expected
        self._is_open = False
        self._expected = 0
        with self._every_rank():
            end = self._exchanges.start("") if is_compared else None
            for value in values:
                resolve(value)
            if end is not None:
                end.numbers()
        return len(values)

    def end_run(self) -> None:
        """Give every value a result, as Lightning still reads them; after an exception, not all of them have one."""
        for value in self._values:
            resolve(value)

    def reduce(self, tensor: Any, group: Any, reduce_op: Any, reduction: Reduction) -> Any:
        """Reduce a tensor for :meth:`Reduction.__call__`."""
        is_alone = not dist.is_initialized() or self._strategy.checkpoints.is_handling_exception
        if is_alone or not isinstance(tensor, Tensor):
            return tensor
        result = self._result_of(reduction) if group is None and reduce_op in OPS else None
        if result is None:
            return all_reduce(tensor, group, reduce_op, idle_ranks=self._strategy.data.idle_ranks)
        name = f"{result.meta.fx}.{result.meta.name} ({reduce_op})"
        self._admit(name)
        start = self._start_on_cpu if tensor.device.type == "cpu" else self._reduce_on_device
        value = start(name, tensor, reduce_op)
        self._values.append(value)
        if result.meta.enable_graph:  # Lightning shows this value itself, and not a detached one
            resolve(value)
        return value

    def _result_of(self, reduction: Reduction) -> Any:
        """Return the logged value that calls a reduction, if the ranks can compare its name; otherwise ``None``."""
        if self._strategy.world_size == 1 or current() is None:
            return None
        return result_reduced_by(self._strategy.current_trainer, reduction)

    def _admit(self, name: str) -> None:
        """Wait until all ranks have a further value, unless this one is expected or the end will be compared."""
        context = current()
        assert context is not None
        if len(self._values) >= self._expected and not self._is_open:
            check = context.component(Survey).check_that_all_answer  # detects a stopped process before the timeout
            kind = "a reduction of logged values"
            context.barriers.enter(f"the reduction of {name}", call_site(), name=kind, check=check)
            self._is_open = True
        if not self._is_aligned:
            self._is_aligned = True
            self._exchanges.align(ranks_of(self._strategy))

    def _start_on_cpu(self, name: str, tensor: Tensor, op: str) -> Tensor:
        exchange = self._exchanges.start(name, float(tensor))
        checkpoints = self._strategy.checkpoints
        idle_ranks = self._strategy.data.idle_ranks

        def compute() -> float:
            # After an exception some ranks may never log this value.
            is_lost = checkpoints.is_interrupted and not exchange.is_completed()
            return math.nan if is_lost else reduced(exchange.numbers(), op, idle_ranks)

        is_mean_of_integers = op == "mean" and not tensor.is_floating_point()
        dtype = torch.get_default_dtype() if is_mean_of_integers else tensor.dtype  # as in `all_reduce`
        return PendingTensor.of(compute, dtype)

    def _reduce_on_device(self, name: str, tensor: Tensor, op: str) -> Tensor:
        """Reduce a tensor without waiting for its device."""
        with self._every_rank():  # a device would wait for a collective that other ranks do not start
            self._exchanges.start(name).numbers()
        return all_reduce(tensor, None, op, idle_ranks=self._strategy.data.idle_ranks)

    @contextmanager
    def _every_rank(self) -> Iterator[None]:
        """Raise an error about different names, once every rank has found it."""
        try:
            yield
        except DivergenceError as error:
            refuse(self._strategy, error)

    @property
    def _exchanges(self) -> LoggedExchanges:
        context = current()
        assert context is not None
        return context.component(LoggedExchanges)
