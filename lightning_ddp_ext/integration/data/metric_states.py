"""Restore logged values and metrics after a step that does not count on this rank.

After the step they have their values from before it, but in the types and shapes that the
step gave them, because the ranks reduce them together.

Three attributes of metrics are private, because torchmetrics has no public names for the
neutral states (``_defaults``), their reductions (``_reductions``) and the number of updates
(``_update_count``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_cat

from ..private.compat import results_of


@contextmanager
def restoring_metrics(trainer: Any) -> Iterator[None]:
    """Restore logged values and the module's metrics, at any depth, after the block.

    A metric that the step created gets its neutral states. After an exception nothing is
    restored, because the run ends.
    """
    # By id, since the hash of a metric changes with its states.
    earlier = {id(metric): _copied_states(metric) for metric in _metrics_to_restore(trainer)}
    yield
    for metric in _metrics_to_restore(trainer):
        states = earlier[id(metric)] if id(metric) in earlier else _neutral_states(metric)
        attributes = vars(metric)
        for name, state in states.items():
            attributes[name] = _with_form_of(attributes[name], state)


def _copied_states(metric: Metric) -> dict[str, Any]:
    """Return copies of a metric's states, by name.

    Tensors in lists are not copied, since they are batches, which do not change.
    """
    return {
        name: state.detach().clone() if isinstance(state, Tensor) else copy.copy(state)
        for name, state in vars(metric).items()
        if name in metric._defaults or name == "_update_count"
    }


def _neutral_states(metric: Metric) -> dict[str, Any]:
    """Return a metric's states before its first update, by name.

    A wrapper may have the defaults of the metric in it, which has the states.
    """
    return {
        name: copy.deepcopy(default)
        for name, default in metric._defaults.items()
        if name in vars(metric)
    }


def _metrics_to_restore(trainer: Any) -> list[Metric]:
    """Return the metrics and logged values that the step must not change.

    Left out are values that are not reduced across ranks, and metrics with a list that
    torchmetrics gathers item by item, because it must have the same number of items on
    all ranks.
    """
    # Lightning keeps a logged value in a metric of its own, which contains a number or refers
    # to a metric that the user has logged.
    results = results_of(trainer).values()
    logged_metrics = [result.value for result in results if not result.is_tensor]
    reduced_numbers = [
        result
        for result in results
        if result.is_tensor and result.meta.sync.should and not result.meta.sync.rank_zero_only
    ]
    roots = [trainer.lightning_module, *logged_metrics]
    users = [metric for root in roots for metric in root.modules() if isinstance(metric, Metric)]
    return [metric for metric in (*reduced_numbers, *users) if not _gathers_items(metric)]


def _gathers_items(metric: Metric) -> bool:
    """Whether torchmetrics gathers a list of this metric item by item.

    It joins the items of other lists first.
    """
    return any(
        isinstance(metric._defaults[name], list) and reduction is not dim_zero_cat
        for name, reduction in metric._reductions.items()
    )


def _with_form_of(state: Any, earlier: Any) -> Any:
    """Return an earlier state with the type, dtype and shape of the state after the step.

    A step may change the dtype. The neutral state of a sum may be a single zero, which gets
    the shape of the sum. A list that has no batches yet gets an empty one, from which the
    ranks learn dtype and shape.

    >>> _with_form_of(torch.tensor([3, 4]), torch.tensor([1.0, 2.0]))
    tensor([1, 2])
    >>> _with_form_of(torch.tensor([3.0, 4.0]), torch.tensor(0.0))
    tensor([0., 0.])
    >>> _with_form_of([torch.ones(3)], [])
    [tensor([])]
    """
    if isinstance(earlier, Tensor) and isinstance(state, Tensor):
        is_neutral = earlier.ndim < state.ndim
        return torch.empty_like(state).copy_(earlier) if is_neutral else earlier.to(state)
    if isinstance(earlier, list) and not earlier and state:
        return [torch.atleast_1d(state[0])[:0]]
    return earlier
