"""Queue the values that a step logs, and reduce them in one collective.

A rank sends its queue to the others in an **exchange**, a collective call:

- when its step ends;
- earlier, when it reads a queued value, or before the strategy communicates for another
  reason.

An exchange reduces the values that all ranks have sent. If a rank has sent more than
another one, it keeps the rest, and waits for the other rank in its next exchange. The
other rank makes it at the latest when its step ends. At the end of its step, a rank
marks what it sends as its last values (``is_last``), and exchanges until every rank has
done so.

An exchange leaves the ranks in one of these states (see ``batched.Exchange``):

===========================  ========================================================
``is_over``                  every rank has sent its last values: the step's last
                             exchange
``is_even``                  every rank has sent equally many; no rank waits
neither                      a rank waits, so this rank must exchange again
                             (``_is_awaited``)
===========================  ========================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_ddp_ext.reductions.batched import PER_MESSAGE, Exchange, Value
from lightning_ddp_ext.reductions.pending import PendingTensor


class Reduce(Protocol):
    """Makes an exchange; see ``reduce_common``."""

    def __call__(
        self, values: list[Value], *, is_last: bool, is_expected: bool = False
    ) -> Exchange:
        """Reduce the first values, as many as all ranks have; collective.

        Waits for the other ranks first, unless ``is_expected``.
        """


class _Queued(NamedTuple):
    """A value that this rank has logged, and the view of its tensor that readers have."""

    value: Value
    pending: PendingTensor


class StepValues:
    """The values that this rank has logged in the running step.

    Args:
        reduce: makes an exchange.

    Attributes:
        is_running: whether a step is running.
        has_logged: whether the running step, or else the last one, has logged values.
    """

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce
        self._queue: list[_Queued] = []
        self.is_running = False
        self.has_logged = False
        self._is_expected = False  # every rank will exchange, so no barrier is needed
        self._is_awaited = False  # another rank waits for this rank's next exchange

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

    def _exchange(self, *, is_last: bool) -> Exchange:
        """Reduce the first queued values, as many as all ranks have. Collective."""
        sent = self._queue[:PER_MESSAGE]
        values = [queued.value for queued in sent]
        exchange = self._reduce(values, is_last=is_last, is_expected=self._is_expected)
        # Another rank may have queued fewer values.
        for queued, result in zip(sent, exchange.results, strict=False):
            _settle(queued, result)
        del self._queue[: len(exchange.results)]
        self._is_awaited = not (exchange.is_over or exchange.is_even)
        if exchange.is_even:
            # Only a value or an awaiting rank makes the ranks exchange again.
            self._is_expected = False
        return exchange

    def _abandon(self) -> None:
        """Leave values without a result as NaN.

        Only an exception, in the step or in the reduction, leaves such values.
        """
        for queued in self._queue:
            is_integer = not queued.value.tensor.is_floating_point()  # NaN does not fit
            _settle(queued, None if is_integer else math.nan)
        self._queue = []


def _settle(queued: _Queued, result: Tensor | float | None) -> None:
    """Show readers a result, or else what this rank logged."""
    tensor = queued.value.tensor
    if result is not None:
        with torch.inference_mode(tensor.is_inference()):  # the mode in which it was logged
            tensor.fill_(result)
    queued.pending.settle()
