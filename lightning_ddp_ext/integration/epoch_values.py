"""Reduce the logged values of an epoch in one collective, at its end.

Lightning computes the results of an epoch one after another, and requests a reduction
for each number in them. The first request reduces the numbers of all results that
Lightning computes next; later requests return what is known already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from lightning_ddp_ext.reductions.batched import PER_MESSAGE, Value

from .private.compat import is_computed, results_of
from .start.devices import RankDevicesStrategy
from .step_values import Reduce


class _Reduced(NamedTuple):
    """A reduced number of a result.

    ``identity`` is the result's value, which a reset replaces, so the numbers of an
    earlier epoch are never returned.
    """

    identity: Tensor
    number: Tensor


class EpochValues:
    """The numbers that Lightning requests next at the end of an epoch.

    Args:
        reduce: reduces values of all ranks.
        can_batch: whether a tensor can be reduced together with others, for a group and
            an op.
    """

    def __init__(
        self,
        strategy: RankDevicesStrategy,
        reduce: Reduce,
        can_batch: Callable[[Tensor, Any, Any], bool],
    ) -> None:
        self._strategy = strategy
        self._reduce = reduce
        self._can_batch = can_batch
        self._reduced: deque[_Reduced] = deque()

    def reduce_next(self, result: Any) -> Tensor:
        """Return the next reduced number of a result.

        Collective if it is not known yet.
        """
        is_known = bool(self._reduced) and self._reduced[0].identity is result.value
        if not is_known:
            self._reduced = self._reduce_all(result)
        return self._reduced.popleft().number

    def _reduce_all(self, first: Any) -> deque[_Reduced]:
        """Reduce the numbers of a result, and of those that are computed next."""
        results = results_of(self._strategy.current_trainer).values()
        due = [result for result in results if self._is_due(result)]
        if not due or due[0] is not first:
            due = [first]  # user code reads it early, or Lightning computes it otherwise
        identities: list[Tensor] = []
        values: list[Value] = []
        for result in due[: PER_MESSAGE // 2]:  # a mean has a sum and a number of samples
            for number in _numbers_of(result):
                identities.append(result.value)
                values.append(Value(name_of(result), result.meta.sync.op, number))
        # Another rank may compute fewer results, so this may not be the last reduction.
        numbers = self._reduce(values, is_last=False).results
        return deque(map(_Reduced, identities, numbers))

    def _is_due(self, result: Any) -> bool:
        """Whether Lightning will request the numbers of a result in this epoch."""
        meta = result.meta
        is_of_epoch = result.is_tensor and meta.on_epoch and not result.has_reset
        is_reduced = meta.sync.should and not meta.sync.rank_zero_only
        if not (is_of_epoch and is_reduced) or is_computed(result):
            return False
        return all(
            self._can_batch(number, meta.sync.group, meta.sync.op) for number in _numbers_of(result)
        )


def _numbers_of(result: Any) -> list[Tensor]:
    """Return the numbers of an epoch's result that Lightning reduces, in its order."""
    if result.meta.is_mean_reduction:
        return [result.value, result.cumulated_batch_size]
    return [result.value]


def name_of(result: Any) -> str:
    """Return the hook in which a result is logged, and its name."""
    return f"{result.meta.fx}.{result.meta.name}"
