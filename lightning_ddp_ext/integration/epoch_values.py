"""Reduce the logged values of an epoch in one collective, at its end.

Lightning computes the results of an epoch one after another, and requests a reduction
for each number in them. The first request reduces the numbers of all results that
Lightning computes next; later requests return what is known already.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from torch import Tensor

from lightning_ddp_ext.reductions.batched import PER_MESSAGE, Value, can_batch

from .private.compat import is_computed, results_of
from .start.devices import RankDevicesStrategy
from .step_values import Reduce


class _Known(NamedTuple):
    """A reduced number, and the value of the result that it belongs to.

    The value identifies result and epoch, since a reset replaces it.
    """

    value: Tensor
    number: Tensor


class EpochValues:
    """The numbers that Lightning requests next at the end of an epoch.

    Args:
        strategy: our strategy, of several ranks.
        reduce: reduces values of all ranks.
    """

    def __init__(self, strategy: RankDevicesStrategy, reduce: Reduce) -> None:
        self._strategy = strategy
        self._reduce = reduce
        self._known: deque[_Known] = deque()  # in the order in which Lightning requests them

    def reduce_next(self, result: Any) -> Tensor:
        """Return the next reduced number of a result.

        Collective if it is not known yet.
        """
        is_known = bool(self._known) and self._known[0].value is result.value
        if not is_known:
            self._known = self._reduce_from(result)
        return self._known.popleft().number

    def _reduce_from(self, first: Any) -> deque[_Known]:
        """Reduce the numbers of a result, and of those that are computed next."""
        results = results_of(self._strategy.current_trainer).values()
        due = [result for result in results if _is_due(result)]
        if not due or due[0] is not first:
            due = [first]  # user code reads it early, or Lightning computes it otherwise
        sent = due[: PER_MESSAGE // 2]  # a result has at most two numbers
        owners = [result.value for result in sent for _ in _numbers_of(result)]
        values = [
            Value(name_of(result), result.meta.sync.op, number)
            for result in sent
            for number in _numbers_of(result)
        ]
        # Another rank may compute fewer results, so this may not be the last reduction.
        numbers = self._reduce(values, is_last=False).results
        return deque(map(_Known, owners, numbers))


def _is_due(result: Any) -> bool:
    """Whether Lightning will request the numbers of a result in this epoch."""
    meta = result.meta
    is_of_epoch = result.is_tensor and meta.on_epoch and not result.has_reset
    is_reduced = meta.sync.should and not meta.sync.rank_zero_only
    if not (is_of_epoch and is_reduced) or is_computed(result):
        return False
    numbers = _numbers_of(result)
    return meta.sync.group is None and all(can_batch(each, meta.sync.op) for each in numbers)


def _numbers_of(result: Any) -> list[Tensor]:
    """Return the numbers of an epoch's result that Lightning reduces, in its order.

    For a mean, they are a sum and a number of samples.
    """
    if result.meta.is_mean_reduction:
        return [result.value, result.cumulated_batch_size]
    return [result.value]


def name_of(result: Any) -> str:
    """Return the hook in which a result is logged, and its name."""
    return f"{result.meta.fx}.{result.meta.name}"
