"""A step that leaves no trace in any metric: what was counted before it is what is counted after it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat

# What a metric is made of, rather than what it has counted. Of buffers the wrapper of DDP keeps references.
_KEPT = {"_modules", "_parameters", "_buffers", "_defaults"}


@contextmanager
def preserve_metric_state(results: dict[str, Any], module: nn.Module) -> Iterator[None]:
    """Put back, at the end, what ``self.log`` and the metrics of torchmetrics have gathered in between.

    A key that is logged for the first time stays, with a value that adds nothing to any reduction, so that this rank
    takes part in those at the end of the epoch. Values that are not reduced over the ranks stay where nothing else has
    been logged: alone, the neutral ones would be infinite or no number.

    Args:
        results: Lightning's collection of what was logged, by key.
        module: whose metrics, at any depth; those that were logged from elsewhere are in ``results``.
    """
    copies = _Copies()
    before = {id(metric): (metric, copies.of(metric)) for metric in _metrics(results, module)}
    logged = {key: dict(vars(result)) for key, result in results.items()}
    yield
    for metric in _metrics(results, module):
        if id(metric) in before:
            _put_back(metric, before[id(metric)][1])
        elif isinstance(metric, Metric):
            metric.reset()
    for key, result in results.items():
        if not result.has_reset:
            _take_out(result, logged.get(key))


def _metrics(results: Mapping[str, Any], module: nn.Module) -> Iterator[nn.Module]:
    """All metrics and collections of them, each once."""
    seen: set[int] = set()
    logged = (result.value for result in results.values() if not result.is_tensor)
    for root in (module, *logged):
        for each in root.modules():
            if isinstance(each, (Metric, MetricCollection)) and id(each) not in seen:
                seen.add(id(each))
                yield each


class _Copies:
    """Copies of what metrics hold; states that several of a collection share are shared by their copies too."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Any, Any]] = {}  # the original too, so that no other object gets its id

    def of(self, metric: nn.Module) -> dict[str, Any]:
        """What is to be put back; tensors are cloned, because metrics may add to them in place."""
        with torch.inference_mode(False):  # else a metric of training could not add to its states any more
            return {name: self._copy(value) for name, value in vars(metric).items() if name not in _KEPT}

    def _copy(self, value: Any) -> Any:
        if id(value) not in self._by_id:
            self._by_id[id(value)] = (value, self._fresh(value))
        return self._by_id[id(value)][1]

    def _fresh(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone()
        if isinstance(value, dict):  # such as the groups of a collection
            fresh = copy.copy(value)
            fresh.update((name, self._copy(each)) for name, each in value.items())
            return fresh
        # A list holds batches that were appended; these stay what they are.
        return copy.copy(value) if isinstance(value, (list, set, deque)) else value


def _put_back(metric: nn.Module, before: dict[str, Any]) -> None:
    held = vars(metric)
    if isinstance(metric, Metric):
        before.update(_empty_lists(metric, before))
    for name in [name for name in held if name not in before and name not in _KEPT]:
        del held[name]
    held.update(before)


def _empty_lists(metric: Metric, before: dict[str, Any]) -> dict[str, list[Tensor]]:
    """No rows for a list that was empty, but of the type and shape that the other ranks join them with."""
    return {
        name: [_no_rows(state[0])]
        for name, join in metric._reductions.items()
        if join is dim_zero_cat
        and before.get(name) == []
        and isinstance(state := getattr(metric, name), list)
        and state
    }


def _no_rows(rows: Tensor) -> Tensor:
    return (rows if rows.ndim else rows.unsqueeze(0))[:0]


def _take_out(result: Any, before: dict[str, Any] | None) -> None:
    """Leave what had been logged before: nothing if that is ``None``, or had been reset."""
    counted = before if before is not None and not before["has_reset"] else None
    is_joint = result.meta.sync.should and not result.meta.sync.rank_zero_only
    if not result.is_tensor:
        result._forward_cache = counted["_forward_cache"] if counted else None
        return
    if counted or is_joint:
        for state, neutral in result._defaults.items():
            device = getattr(result, state).device
            setattr(result, state, (counted[state] if counted else neutral.clone()).to(device))
    if counted and not is_joint:  # a joint one is that of the ranks that do count
        result._forward_cache = counted["_forward_cache"]
