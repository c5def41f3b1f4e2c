"""Run a step that does not count: restore logged values and metrics after it.

A rank that repeats a sample runs the same step as the other ranks, which wait for it in
collectives. Afterwards, metrics and logged values are as if there had been no step,
except that they have the same names, types and shapes as on the other ranks:

================================  ===================================================
metric                            its earlier states
state without a value before      an empty tensor, or the neutral value in the shape
                                  that the step gave it
metric created in the step        reset
logged value                      its earlier value, or the neutral one if it was
                                  logged for the first time
value not reduced across ranks    unchanged, so this rank's own value counts the step
================================  ===================================================
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat


@contextmanager
def uncounted(results: Mapping[str, Any], module: nn.Module) -> Iterator[None]:
    """Restore logged values and metrics after the block.

    A metric with a list that torchmetrics gathers item by item counts the step, because
    this list must have the same number of items on all ranks.

    Args:
        results: Lightning's collection of logged values, by key.
        module: the module whose metrics are restored, at any depth; ``results`` has
            those logged from elsewhere.
    """
    metrics = _restorable_metrics(results, module)
    earlier_metrics = {number: _EarlierMetric(metric) for number, metric in metrics.items()}
    # A logged value never changes in place. If it ``has_reset``, it has none in this epoch.
    earlier_values = {
        key: dict(vars(result)) for key, result in results.items() if not result.has_reset
    }
    yield  # after an exception, the run ends and nothing is restored
    for number, metric in _restorable_metrics(results, module).items():
        if number in earlier_metrics:
            earlier_metrics[number].restore()
        elif isinstance(metric, Metric):
            metric.reset()
    for key, result in results.items():
        if not result.has_reset:
            _restore_result(result, earlier_values.get(key))


def _restorable_metrics(results: Mapping[str, Any], module: nn.Module) -> dict[int, nn.Module]:
    """Return the metrics and metric collections that can be restored, by ``id``.

    The hash of a metric changes with its states.
    """
    logged = [result.value for result in results.values() if not result.is_tensor]
    return {
        id(metric): metric
        for root in (module, *logged)
        for metric in root.modules()
        if _is_restorable(metric)
    }


def _is_restorable(module: nn.Module) -> bool:
    """Whether a module is a metric without a list that is gathered item by item.

    Torchmetrics joins the items of other lists first.
    """
    if isinstance(module, Metric):
        return not any(
            isinstance(module._defaults[name], list) and reduction is not dim_zero_cat
            for name, reduction in module._reductions.items()
        )
    return isinstance(module, MetricCollection)


class _EarlierMetric:
    """Keeps the attributes of a metric before the step, and gives it copies to change."""

    def __init__(self, metric: nn.Module) -> None:
        self._metric = metric
        self._attributes = dict(vars(metric))
        for name, value in self._attributes.items():
            if name != "_modules":  # metrics in it are restored separately
                vars(metric)[name] = _copied(value)

    def restore(self) -> None:
        metric = self._metric
        if isinstance(metric, Metric):
            # A wrapper may share the reductions of the metric that has the states.
            for name in metric._reductions.keys() & self._attributes.keys():
                earlier = self._attributes[name]
                self._attributes[name] = _with_form_of(getattr(metric, name), earlier)
            # A result to reuse, or none, as on the ranks that count the step.
            self._attributes["_computed"] = metric._computed
        vars(metric).clear()
        vars(metric).update(self._attributes)


def _copied(value: Any) -> Any:
    """Copy state that a metric may change in place.

    Tensors in lists are not copied, since they are batches, which do not change.
    """
    if isinstance(value, Tensor):
        return value.detach().clone()
    if not isinstance(value, (dict, list, set, deque, np.ndarray)):
        return value
    copied: Any = copy.copy(value)  # of the same class
    if isinstance(value, dict):  # such as the groups of a collection
        for name, item in value.items():
            copied[name] = _copied(item)  # `Counter.update` would add to the counts
    elif isinstance(value, list):
        copied[:] = [item if isinstance(item, Tensor) else _copied(item) for item in value]
    return copied


def _with_form_of(state: Any, earlier: Any) -> Any:
    """Return the earlier state with the type, dtype and shape that the step has given it.

    The ranks must have these in common when they reduce the states.
    """
    if isinstance(earlier, Tensor) and isinstance(state, Tensor):
        if earlier.ndim < state.ndim:
            earlier = earlier.expand(state.shape).clone()
        return earlier.to(state)
    if isinstance(earlier, list) and not earlier and state:
        return [torch.atleast_1d(state[0])[:0]]
    return earlier


def _restore_result(result: Any, earlier: dict[str, Any] | None) -> None:
    """Restore the attributes that a logged value had before the step.

    ``earlier`` is ``None`` if the epoch had no value yet.
    """
    if not result.is_tensor:
        result._forward_cache = earlier["_forward_cache"] if earlier else None
        return
    is_reduced = result.meta.sync.should and not result.meta.sync.rank_zero_only
    if not is_reduced:
        return  # user code may have reduced it
    of_step = dict(vars(result))
    vars(result).update(earlier or result._defaults)
    for name in result._defaults:  # copied, so that none of them is changed in place
        setattr(result, name, getattr(result, name).to(of_step[name], copy=True))
    result._forward_cache = of_step["_forward_cache"]  # reduced over the ranks that count
