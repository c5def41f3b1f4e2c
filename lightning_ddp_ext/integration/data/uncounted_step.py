"""Run a step that does not count: restore logged values and metrics after it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.data import dim_zero_cat


@contextmanager
def uncounted(results: dict[str, Any], module: nn.Module) -> Iterator[None]:
    """Make ``self.log`` and torchmetrics work on copies within the block.

    The copies are discarded after the block. A key that is logged for the first time is
    kept with a value that does not affect any reduction, so that this rank takes part
    in the reductions at the end of the epoch. A value that is not reduced across ranks
    counts the step.

    A metric with a list that torchmetrics gathers item by item counts the step, because
    this list must have the same number of items on all ranks.

    Args:
        results: Lightning's collection of logged values, by key.
        module: the module whose metrics are preserved, at any depth; ``results`` has
            those logged from elsewhere.
    """
    metrics_before = _metrics(results, module)
    attributes_before = {id(metric): dict(vars(metric)) for metric in metrics_before}
    # Values never change in place.
    logged_before = {key: dict(vars(result)) for key, result in results.items()}
    for metric in metrics_before:
        for name, value in attributes_before[id(metric)].items():
            if name != "_modules":
                vars(metric)[name] = _copied(value)
    yield
    for metric in _metrics(results, module):
        if id(metric) in attributes_before:
            _restore(metric, attributes_before[id(metric)])
        elif isinstance(metric, Metric):
            metric.reset()
    for key, result in results.items():
        if not result.has_reset:
            _restore_result(result, logged_before.get(key))


def _metrics(results: Mapping[str, Any], module: nn.Module) -> list[nn.Module]:
    """Return the metrics that a step can be taken out of, each once.

    Metric collections are included.
    """
    logged = (result.value for result in results.values() if not result.is_tensor)
    modules = (each for root in (module, *logged) for each in root.modules())
    return list({id(each): each for each in modules if _can_be_restored(each)}.values())


def _can_be_restored(module: nn.Module) -> bool:
    """Whether a module is a metric without a list that is gathered item by item.

    Torchmetrics joins the items of other lists first.
    """
    if isinstance(module, Metric):
        return not any(
            isinstance(module._defaults[name], list) and reduction is not dim_zero_cat
            for name, reduction in module._reductions.items()
        )
    return isinstance(module, MetricCollection)


def _copied(value: Any) -> Any:
    """Copy state that a metric may change in place.

    Lists are copied shallowly, since their batches do not change.
    """
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):  # such as the groups of a collection
        copied = copy.copy(value)
        for name, each in value.items():
            copied[name] = _copied(each)  # Counter.update would add
        return copied
    return copy.copy(value) if isinstance(value, (list, set, deque)) else value


def _restore(metric: nn.Module, before: dict[str, Any]) -> None:
    if isinstance(metric, Metric):
        before.update(_empty_lists(metric, before))
        before.update(_shaped(metric, before))
        # A result to reuse, or none, as on the ranks that count the step.
        before["_computed"] = metric._computed
    vars(metric).clear()
    vars(metric).update(before)


def _shaped(metric: Metric, before: dict[str, Any]) -> dict[str, Tensor]:
    """Return earlier states in the shape that the step has given them.

    The ranks must have this shape in common.
    """
    states = {name: (before[name], getattr(metric, name)) for name in metric._reductions}
    return {
        name: earlier.expand(now.shape).clone()
        for name, (earlier, now) in states.items()
        if isinstance(earlier, Tensor) and isinstance(now, Tensor) and earlier.ndim < now.ndim
    }


def _empty_lists(metric: Metric, before: dict[str, Any]) -> dict[str, list[Tensor]]:
    """Return an empty tensor for each list that was empty before the step.

    It has the type and shape of the rows that the step added.
    """
    lists = [
        name
        for name, join in metric._reductions.items()
        if join is dim_zero_cat and before[name] == []
    ]
    states = {name: getattr(metric, name) for name in lists}
    return {name: [torch.atleast_1d(rows[0])[:0]] for name, rows in states.items() if rows}


def _restore_result(result: Any, before: dict[str, Any] | None) -> None:
    """Restore the earlier value; if it is missing or was reset, set a neutral one.

    A value that the ranks do not reduce is this rank's own; user code may have reduced
    it, and it stays.
    """
    if before is not None and before["has_reset"]:
        before = None
    is_reduced = result.meta.sync.should and not result.meta.sync.rank_zero_only
    if not result.is_tensor:
        result._forward_cache = before["_forward_cache"] if before else None
    elif is_reduced and before:
        value_of_step = result._forward_cache  # reduced over the ranks that count
        vars(result).update(before)
        result._forward_cache = value_of_step
    elif is_reduced:
        for state, neutral in result._defaults.items():
            setattr(result, state, neutral.clone().to(getattr(result, state).device))
