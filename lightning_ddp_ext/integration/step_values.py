"""Queue the values that a step logs, and reduce them in one collective.

The ranks exchange their queues when the step ends. A rank exchanges earlier when it
reads a queued value, or before the strategy communicates for another reason. An
exchange reduces the values that all ranks have queued by then, and each rank keeps the
others:

- If all ranks have sent equally many values, no rank waits for another one.
- Otherwise, a rank waits for values that others have not logged yet. These ranks
  exchange again at the latest when their step ends.
- When its step ends, a rank sends its last values, and exchanges until all ranks have
  done so.

================  ====================================================================
``is_last``       this rank sends no further values in this step
``is_over``       no rank does, so this was the last exchange
``is_even``       all ranks have sent equally many values, and more may follow
``_is_expected``  all ranks exchange at the step's end, so no barrier is needed
``_is_awaited``   another rank waits for this rank's further values
================  ====================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ddp_ext.reductions.batched import PER_MESSAGE, Reduced, Value
from lightning_ddp_ext.reductions.pending import PendingTensor

# Reduces the first of some values, as many as all ranks have; see ``reduce_common``.
Reduce = Callable[..., Reduced]


class _Queued(NamedTuple):
    """A value that this rank has logged, and the tensor that its readers have."""

    value: Value
    pending: PendingTensor


class StepValues:
    """The values that this rank has logged in the running step.

    Args:
        reduce: reduces values of all ranks; waits for them unless ``is_expected``.

    Attributes:
        is_running: whether a step is running.
        has_logged: whether the running step, or else the last one, has logged values.
    """

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce
        self._queue: list[_Queued] = []
        self.is_running = False
        self.has_logged = False
        self._is_expected = False
        self._is_awaited = False

    @contextmanager
    def step(self, *, is_expected: bool) -> Iterator[None]:
        """Run a step in the block, and reduce the values that it has logged.

        Collective if it logged any, or if ``is_expected``.
        """
        self.is_running = True
        self.has_logged = False
        self._is_expected = is_expected
        self._is_awaited = False
        try:
            yield
            self._end()
        finally:
            self.is_running = False
            self._abandon()

    def add(self, value: Value) -> PendingTensor:
        """Queue a value, and return a tensor that is reduced before its first use."""
        self.has_logged = True
        pending = PendingTensor.of(value.tensor, self.flush)
        self._queue.append(_Queued(value, pending))
        return pending

    def flush(self) -> None:
        """Reduce the values that are queued. Collective if there are any."""
        while self._queue:
            self._exchange(is_last=False)

    def _end(self) -> None:
        is_over = not (self._queue or self._is_expected or self._is_awaited)
        while not is_over:
            is_over = self._exchange(is_last=len(self._queue) <= PER_MESSAGE).is_over

    def _exchange(self, *, is_last: bool) -> Reduced:
        """Reduce the first queued values, as many as all ranks have. Collective."""
        sent = self._queue[:PER_MESSAGE]
        values = [queued.value for queued in sent]
        reduced = self._reduce(values, is_last=is_last, is_expected=self._is_expected)
        # Another rank may have queued fewer values.
        for (value, pending), result in zip(sent, reduced.results, strict=False):
            _fill(value.tensor, result)
            pending.settle()
        del self._queue[: len(reduced.results)]
        self._is_awaited = not (reduced.is_over or reduced.is_even)
        if reduced.is_even:
            # All ranks have logged; none waits for the end of the step.
            self._is_expected = False
        return reduced

    def _abandon(self) -> None:
        """Leave values without a result as NaN.

        Only an exception, in the step or in the reduction, leaves such values.
        """
        for value, pending in self._queue:
            if value.tensor.is_floating_point():
                _fill(value.tensor, math.nan)
            pending.settle()
        self._queue = []


def _fill(tensor: Tensor, value: Tensor | float) -> None:
    with torch.inference_mode(tensor.is_inference()):  # the mode in which it was logged
        tensor.fill_(value)
