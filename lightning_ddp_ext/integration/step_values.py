"""Queue the values that a step logs, and reduce them in one collective.

A rank sends its queue to the others in an **exchange**, a collective call. It makes one
when its step ends, and earlier if it reads a queued value, or before the strategy
communicates for another reason.

Ranks may read at different times, so one may send more values than another. An exchange
reduces the first values, as many as every rank has sent. A rank that has sent more keeps
the rest, and waits for the other ranks in its next exchange. They join it at the latest
when their step ends. With its last values, a rank sends the mark ``is_last``. It then
exchanges until every rank has sent the mark.
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
    """

    def __init__(self, reduce: Reduce) -> None:
        self._reduce = reduce
        self._queue: list[_Queued] = []
        # Whether every rank makes another exchange in this step, even without values.
        self._needs_another = False
        # Whether every rank makes it because the training step before logged values. In all
        # other cases the ranks first wait for each other, so that a missing rank is named.
        self._is_expected = False
        self._has_logged = False  # in the running step
        # In the last training step. Evaluation does not change this, since some ranks may
        # have no evaluation step in between.
        self._has_logged_in_training = False
        self.is_running = False

    @contextmanager
    def step(self, *, is_training: bool) -> Iterator[None]:
        """Run a step in the block, and reduce the values that it has logged.

        Collective if it logged any, and in a training step if the one before did.
        """
        self._is_expected = is_training and self._has_logged_in_training
        self._needs_another = self._is_expected
        self._has_logged = False
        self.is_running = True
        try:
            yield
            self._end()
        finally:
            self.is_running = False
            self._abandon()
        if is_training:
            self._has_logged_in_training = self._has_logged

    def add(self, value: Value) -> PendingTensor:
        """Queue a value, and return a tensor that is reduced before its first use."""
        self._has_logged = True
        pending = PendingTensor.of(value.tensor, self.flush)
        self._queue.append(_Queued(value, pending))
        return pending

    def flush(self) -> None:
        """Reduce the values that are queued. Collective if there are any."""
        while self._queue:
            self._exchange(is_last=False)

    def _end(self) -> None:
        while self._needs_another or self._queue:
            self._exchange(is_last=len(self._queue) <= PER_MESSAGE)

    def _exchange(self, *, is_last: bool) -> None:
        """Reduce the first queued values, as many as all ranks have sent. Collective."""
        sent = self._queue[:PER_MESSAGE]
        values = [queued.value for queued in sent]
        exchange = self._reduce(values, is_last=is_last, is_expected=self._is_expected)
        # Another rank may have sent fewer values.
        for queued, result in zip(sent, exchange.results, strict=False):
            _settle(queued, result)
        del self._queue[: len(exchange.results)]
        self._needs_another = exchange.needs_another
        self._is_expected = self._is_expected and self._needs_another

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
